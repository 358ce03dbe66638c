"""Attention on GPUs: scores, softmax and the averages of values in one launch."""
