"""Plans and measurements as words and pictures; nothing here imports torch."""
