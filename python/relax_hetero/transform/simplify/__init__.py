"""Passes that simplify: convolutions with folded batch norms, scales and padding, and isolated in-place writes."""
