"""Generators of kernels for NVIDIA GPUs."""
