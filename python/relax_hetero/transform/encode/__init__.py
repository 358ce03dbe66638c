"""Passes that set encodings, propagate them, specialize them to devices, pack constants and emit kernels."""
