"""One optimizer step: forward, backward, update, in fp32 or mixed precision, direct or as one CUDA graph."""
