"""Kernels for NVIDIA GPUs, each of one launch: products, work on rows, elementwise work, packing, and schedules."""
