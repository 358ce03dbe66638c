"""Passes for quantized and low-precision arithmetic."""
