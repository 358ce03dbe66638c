"""Generators of kernels: products, convolutions, attention, rows, elementwise, packing, scatter; one a family.

`loops` schedules stock kernels, `commands` writes command buffers; all are written with `core` and `math`.
"""
