"""What all kernels of GPUs are written with."""
