"""Kernel generators, one per family: products, convolutions, attention, rows, elementwise, packing, scatter.

`loops` schedules stock kernels and `commands` writes command buffers. All are written with `core` and `math`.
"""
