"""Command buffers: runs of kernels on one device become one function."""
