"""Instructions, launches and epilogues, which all kernels of GPUs are written with."""
