"""Passes: one a file, named after what it does. A pass is a CamelCase function that returns a ``tvm.transform.Pass``.

Importing this package makes TVMScript's device look-up strict (see `relax_hetero.op`).
"""

from __future__ import annotations

import importlib
from typing import Any

from .. import op as _op  # noqa: F401 (makes TVMScript strict before a pass sees a module)

# Public name -> module of this package that defines it.
_EXPORTS: dict[str, str] = {
    "UpdateVDevice": ".placement.update_vdevice",
    "RealizeVDevice": ".placement.realize_vdevice",
    "verify_placement": ".placement.realize_vdevice",
    "collect_placement": ".placement.realize_vdevice",
    "PlacementEntry": ".placement.realize_vdevice",
    "PlacementReport": ".placement.realize_vdevice",
    "collect_encodings": ".encode.encoding_report",
    "describe_encodings": ".encode.encoding_description",
    "EncodingReport": ".encode.encoding_report",
    "collect_fusions": ".ir.fusion_report",
    "FusionReport": ".ir.fusion_report",
    "SpecializeEncodings": ".encode.specialize_encodings",
    "HoistEncodings": ".encode.hoist_encodings",
    "MaterializeEncodings": ".encode.materialize_encodings",
    "ToMixedPrecision": ".quantize.to_mixed_precision",
    "SinkDequantize": ".quantize.sink_dequantize",
    "SimplifyConvolutions": ".simplify.simplify_convolutions",
    "FormAttention": ".fuse.form_attention",
    "FormBlockProducts": ".fuse.form_block_products",
    "FormRows": ".fuse.form_rows",
    "MovePermutes": ".permute.move_permutes",
    "SetEncoding": ".encode.set_encoding",
    "PropagateEncodings": ".encode.propagate_encodings",
    "VerifyEncodings": ".encode.verify_encodings",
    "verify_encodings": ".encode.verify_encodings",
    "NameKernelVariables": ".dispatch.name_kernel_variables",
    "BindTargets": ".dispatch.bind_targets",
    "FormDispatches": ".dispatch.form_dispatches",
    "FormCommandBuffers": ".record.form_command_buffers",
    "FormSchedules": ".partition.form_schedules",
    "ScheduleCPU": ".dispatch.schedule_cpu",
    "ScheduleGPU": ".dispatch.schedule_gpu",
    "SettlePackedResults": ".lower.settle_packed_results",
    "PlanMemoryPerDevice": ".lower.plan_memory",
    "LowerTransfers": ".lower.lower_transfers",
    "PinTransferred": ".lower.pin_transferred",
    "LowerPinnedStorage": ".lower.lower_pinned_storage",
    "LowerToVM": ".lower.lower_to_vm",
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
