"""Runs of kernels become command buffers."""
