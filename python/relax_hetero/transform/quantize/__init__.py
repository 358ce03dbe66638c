"""Quantized and low-precision arithmetic: what is computed in which element type."""
