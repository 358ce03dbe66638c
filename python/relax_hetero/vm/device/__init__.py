"""Devices of this process: memory, copies, threads, CUDA."""
