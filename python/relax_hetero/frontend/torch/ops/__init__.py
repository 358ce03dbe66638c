"""Converters of ATen ops, one module for each family; importing this package registers them."""

from . import (
    control_flow,
    detection,
    elementwise,
    indexing,
    moving,
    neural,
    quantized,
    recurrent,
    reductions,
    run_time,
    searching,
)

__all__ = [
    "control_flow",
    "detection",
    "elementwise",
    "indexing",
    "moving",
    "neural",
    "quantized",
    "recurrent",
    "reductions",
    "run_time",
    "searching",
]
