"""Convolutions in the forms that kernels know: batch norms, scales and padding folded."""
