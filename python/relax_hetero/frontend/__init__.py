"""Front ends: models of other formats become placed Relax modules."""

from .auto.auto_placement import AutoPlacement, auto_placement
from .auto.cost_model import CostModel, DeviceCost, LinkCost
from .from_gguf import from_gguf
from .from_onnx import from_onnx
from .from_torch import from_torch
from .import_limits import ImportLimits
from .onnx_report import NodeReport, OnnxReport, onnx_report
from .paged_cache import PagedCache
from .place import place

__all__ = [
    "AutoPlacement",
    "CostModel",
    "DeviceCost",
    "ImportLimits",
    "LinkCost",
    "NodeReport",
    "OnnxReport",
    "PagedCache",
    "auto_placement",
    "from_gguf",
    "from_onnx",
    "from_torch",
    "onnx_report",
    "place",
]
