"""Feeds data into training: batches, passes over the data, lengths, seeds and random states."""
