"""Converters of ATen ops, one module for each family; importing this package registers them."""

from . import detection, elementwise, indexing, moving, neural, reductions

__all__ = ["detection", "elementwise", "indexing", "moving", "neural", "reductions"]
