"""CUDA kernels become machine code of the GPUs that the targets name; needs a compiler, but no GPU and no driver."""
