"""What an epoch measures: sums on the device, metric objects, and what a loss is the mean of."""
