"""Sizes that only a call knows: what ops need of them, and what their tensors may take."""
