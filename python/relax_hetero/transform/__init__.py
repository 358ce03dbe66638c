"""Passes: one a file, named after what it does. A pass is a CamelCase function that returns a ``tvm.transform.Pass``.

Importing this package makes TVMScript's device look-up strict (see `relax_hetero.op`).
"""

from __future__ import annotations

import importlib
from typing import Any

from .. import op as _op  # noqa: F401 (makes TVMScript strict before a pass sees a module)

# Public name -> module of this package that defines it.
_EXPORTS: dict[str, str] = {
    "UpdateVDevice": ".update_vdevice",
    "RealizeVDevice": ".realize_vdevice",
    "verify_placement": ".realize_vdevice",
    "collect_placement": ".realize_vdevice",
    "PlacementEntry": ".realize_vdevice",
    "PlacementReport": ".realize_vdevice",
    "collect_encodings": ".encoding_report",
    "describe_encodings": ".encoding_description",
    "EncodingReport": ".encoding_report",
    "collect_fusions": ".fusion_report",
    "FusionReport": ".fusion_report",
    "SpecializeEncodings": ".specialize_encodings",
    "HoistEncodings": ".hoist_encodings",
    "MaterializeEncodings": ".materialize_encodings",
    "ToMixedPrecision": ".to_mixed_precision",
    "SinkDequantize": ".sink_dequantize",
    "SimplifyConvolutions": ".simplify_convolutions",
    "FormAttention": ".form_attention",
    "FormBlockProducts": ".form_block_products",
    "FormRows": ".form_rows",
    "MovePermutes": ".move_permutes",
    "SetEncoding": ".set_encoding",
    "PropagateEncodings": ".propagate_encodings",
    "VerifyEncodings": ".verify_encodings",
    "verify_encodings": ".verify_encodings",
    "NameKernelVariables": ".name_kernel_variables",
    "BindTargets": ".bind_targets",
    "FormDispatches": ".form_dispatches",
    "FormCommandBuffers": ".form_command_buffers",
    "FormSchedules": ".form_schedules",
    "ScheduleCPU": ".schedule_cpu",
    "ScheduleGPU": ".schedule_gpu",
    "SettlePackedResults": ".settle_packed_results",
    "PlanMemoryPerDevice": ".plan_memory",
    "LowerTransfers": ".lower_transfers",
    "PinTransferred": ".pin_transferred",
    "LowerPinnedStorage": ".lower_pinned_storage",
    "LowerToVM": ".lower_to_vm",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    try:
        module_name = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module_name, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
