"""Encodings: set, propagated, specialized to devices, hoisted to compile time, made into kernels."""
