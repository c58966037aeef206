"""The pruner that predicts the last loss: `pruner` decides by `promise`, which learns from `curves` of trials."""
