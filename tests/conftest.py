"""What all tests share."""

import os

# One thread a test: the suite runs in parallel, and bit-exactness holds at an equal number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

pytest_plugins = ["tests.hpo.databases"]
