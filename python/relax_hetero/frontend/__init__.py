"""Front ends: models of other formats become placed Relax modules.

The functions that do it are `relax_hetero.from_onnx` and its like. Names are resolved on first use: a language model
that was compiled before reads its tokenizer's file here, and needs no importer of anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..providers import on_first_use

# Public name -> module.
_EXPORTS = {
    "AutoPlacement": ".auto.auto_placement",
    "CostModel": ".auto.cost_model",
    "DeviceCost": ".auto.cost_model",
    "ImportLimits": ".import_limits",
    "LinkCost": ".auto.cost_model",
    "NodeReport": ".onnx_report",
    "OnnxReport": ".onnx_report",
    "PagedCache": ".paged_cache",
    "auto_placement": ".auto.auto_placement",
}

__all__ = sorted(_EXPORTS)


if TYPE_CHECKING:  # what checkers and editors see: a test compares these names with those of _EXPORTS
    from .auto.auto_placement import AutoPlacement as AutoPlacement
    from .auto.auto_placement import auto_placement as auto_placement
    from .auto.cost_model import CostModel as CostModel
    from .auto.cost_model import DeviceCost as DeviceCost
    from .auto.cost_model import LinkCost as LinkCost
    from .import_limits import ImportLimits as ImportLimits
    from .onnx_report import NodeReport as NodeReport
    from .onnx_report import OnnxReport as OnnxReport
    from .paged_cache import PagedCache as PagedCache

else:  # a name that is not among them is an error to checkers
    __getattr__ = on_first_use(__name__, _EXPORTS, globals())


def __dir__() -> list[str]:
    return __all__
