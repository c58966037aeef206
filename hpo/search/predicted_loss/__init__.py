"""The pruner by predicted final loss: `pruner` decides with the model in `promise`, from the trials' `curves`."""
