"""What holds a peak up, and the message for a budget that cannot be met."""
