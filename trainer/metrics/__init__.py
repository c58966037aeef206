"""Measures an epoch: sums on the device, metric objects, and the divisors of losses that are means."""
