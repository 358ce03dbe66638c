"""Compilation of CUDA kernels to machine code of the targets' GPUs, without a GPU or a driver."""
