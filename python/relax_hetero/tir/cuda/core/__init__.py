"""What kernels of GPUs share: instructions, shared memory, launches, views of parameters."""
