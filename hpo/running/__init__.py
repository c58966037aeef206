"""Around the workers: how they start, what they may use, how they are stopped, and what is said of them."""
