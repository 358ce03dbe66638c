"""Front ends: models of other formats become placed Relax modules."""

from .auto.auto_placement import AutoPlacement, auto_placement
from .auto.cost_model import CostModel, DeviceCost, LinkCost
from .from_onnx import from_onnx
from .import_limits import ImportLimits

__all__ = ["AutoPlacement", "CostModel", "DeviceCost", "ImportLimits", "LinkCost", "auto_placement", "from_onnx"]
