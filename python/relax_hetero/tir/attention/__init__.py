"""Attention in one kernel: scores, mask, softmax and values."""
