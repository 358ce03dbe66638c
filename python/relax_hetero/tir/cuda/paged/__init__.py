"""Attention that reads keys and values from the pages of a cache, on NVIDIA GPUs."""
