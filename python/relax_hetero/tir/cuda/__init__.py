"""Kernels of NVIDIA GPUs, written with the IRBuilder; TVM's default TIR pipeline compiles them."""
