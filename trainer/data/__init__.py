"""What goes into training: batches, passes over them, lengths, seeds and random states."""
