"""Kernels and bytecode become one library."""
