"""Other orders of first computations: which ones are worth a try, and problems seen in them."""
