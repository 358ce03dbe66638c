"""Passes: one a file, named after what it does. A pass is a CamelCase function that returns a ``tvm.transform.Pass``.

``help(rh.transform.FormRows)`` says what a pass does, what it assumes, and shows a program before and after;
`passes` lists all of them, `find_pass` finds one by name.

Importing this package makes TVMScript's device look-up strict (see `relax_hetero.op`).
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from .. import op as _op  # noqa: F401 (makes TVMScript strict before a pass sees a module)
from .ir.declare import PassDeclaration, declared_passes

_PASSES: dict[str, str] = {
    "KeepFindings": ".ir.keep_findings",
    "UpdateVDevice": ".placement.update_vdevice",
    "IsolateWrites": ".simplify.isolate_writes",
    "RealizeVDevice": ".placement.realize_vdevice",
    "CheckSizes": ".sizes.check_sizes",
    "ToMixedPrecision": ".quantize.to_mixed_precision",
    "SinkDequantize": ".quantize.sink_dequantize",
    "SimplifyConvolutions": ".simplify.simplify_convolutions",
    "FormBlockProducts": ".fuse.form_block_products",
    "FormAttention": ".fuse.form_attention",
    "FormRows": ".fuse.form_rows",
    "SetEncoding": ".encode.set_encoding",
    "PropagateEncodings": ".encode.propagate_encodings",
    "SpecializeEncodings": ".encode.specialize_encodings",
    "HoistEncodings": ".encode.hoist_encodings",
    "MaterializeEncodings": ".encode.materialize_encodings",
    "VerifyEncodings": ".encode.verify_encodings",
    "MovePermutes": ".permute.move_permutes",
    "CheckValues": ".dispatch.check_values",
    "FormDispatches": ".dispatch.form_dispatches",
    "BoundKernels": ".dispatch.bound_kernels",
    "BindTargets": ".dispatch.bind_targets",
    "NameKernelVariables": ".dispatch.name_kernel_variables",
    "ScheduleCPU": ".dispatch.schedule_cpu",
    "ScheduleGPU": ".dispatch.schedule_gpu",
    "FormCommandBuffers": ".record.form_command_buffers",
    "FormCudaGraphs": ".record.form_cuda_graphs",
    "UpdateDonated": ".record.update_donated",
    "PartitionByHost": ".partition.partition_by_host",
    "FormSchedules": ".partition.form_schedules",
    "CheckSizeDivisors": ".lower.check_size_divisors",
    "LowerToVM": ".lower.lower_to_vm",
    "LowerRequirements": ".lower.lower_requirements",
    "SettlePackedResults": ".lower.settle_packed_results",
    "LowerTransfers": ".lower.lower_transfers",
    "PinTransferred": ".lower.pin_transferred",
    "PlanMemoryPerDevice": ".lower.plan_memory",
    "NoteMemory": ".lower.note_memory",
    "LowerLoopRows": ".lower.lower_loop_rows",
    "LowerPinnedStorage": ".lower.lower_pinned_storage",
}
"""Each pass, and the module of this package that declares it: in the order of the pipeline, parts after the whole."""

_OTHERS: dict[str, str] = {
    "verify_placement": ".placement.realize_vdevice",
    "collect_placement": ".ir.findings",
    "PlacementEntry": ".ir.reports",
    "PlacementReport": ".ir.reports",
    "collect_encodings": ".ir.findings",
    "describe_encodings": ".encode.encoding_description",
    "EncodingReport": ".ir.reports",
    "collect_fusions": ".ir.findings",
    "FusionReport": ".ir.reports",
    "verify_encodings": ".encode.verify_encodings",
    "PassDeclaration": ".ir.declare",
    "PassTrace": ".trace.pass_trace",
    "trace_passes": ".trace.pass_trace",
}

_EXPORTS = {**_PASSES, **_OTHERS}

__all__ = ["find_pass", "passes", *_EXPORTS]


def passes() -> dict[str, PassDeclaration]:
    """Every pass of this library by name, with its summary, its text and its options."""
    return {name: find_pass(name) for name in _PASSES}


def find_pass(name: str) -> PassDeclaration:
    """A pass by name.

    Parameters
    ----------
    name : str
        E.g. "FormRows".

    Returns
    -------
    PassDeclaration
        Its ``constructor`` takes the options and returns the ``tvm.transform.Pass``.

    Raises
    ------
    KeyError
        There is no such pass; near names are listed.
    """
    if name not in _PASSES:
        near = ", ".join(difflib.get_close_matches(name, _PASSES)) or "none"
        raise KeyError(f"no pass is called {name!r}; near names: {near}")
    importlib.import_module(_PASSES[name], __name__)
    return declared_passes()[name]


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
