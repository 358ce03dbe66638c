"""The micro-kernel of CPU kernels: a tile of accumulators and its k-steps, with vectors and with Intel AMX."""
