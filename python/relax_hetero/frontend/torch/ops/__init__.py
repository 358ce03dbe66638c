"""Converters of ATen ops, one module for each family; importing this package registers them."""

from . import (  # noqa: F401
    control_flow,
    detection,
    indexing,
    neural,
    quantized,
    run_time,
    searching,
    torch_elementwise,
    torch_moving,
    torch_recurrent,
    torch_reductions,
)
