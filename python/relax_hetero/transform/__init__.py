"""Passes: one a file, named after what it does. A pass is a CamelCase function that returns a ``tvm.transform.Pass``.

``help(rh.transform.FormRows)`` says what a pass does, what it assumes, and shows a program before and after;
`passes` lists all of them, `find_pass` finds one by name.

Importing this package makes TVMScript's device look-up strict (see `relax_hetero.op`).
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from .. import op as _op  # noqa: F401 (makes TVMScript strict before a pass sees a module)
from ..providers import on_first_use
from .ir.declare import PassDeclaration as PassDeclaration
from .ir.declare import declared_passes

_PASSES: dict[str, str] = {
    "KeepFindings": ".ir.keep_findings",
    "UpdateVDevice": ".placement.update_vdevice",
    "KeepUnreadCalls": ".ir.keep_unread_calls",
    "IsolateWrites": ".simplify.isolate_writes",
    "RealizeTargets": ".placement.realize_targets",
    "RealizeVDevice": ".placement.realize_vdevice",
    "NoteGraph": ".placement.note_graph",
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
    "PassTrace": ".trace.pass_trace",
    "trace_passes": ".trace.pass_trace",
}

_EXPORTS = {**_PASSES, **_OTHERS}

__all__ = ["PassDeclaration", "find_pass", "passes", *_EXPORTS]


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


if TYPE_CHECKING:  # what checkers and editors see: a test compares these names with those of _EXPORTS
    from .dispatch.bind_targets import BindTargets as BindTargets
    from .dispatch.bound_kernels import BoundKernels as BoundKernels
    from .dispatch.check_values import CheckValues as CheckValues
    from .dispatch.form_dispatches import FormDispatches as FormDispatches
    from .dispatch.name_kernel_variables import NameKernelVariables as NameKernelVariables
    from .dispatch.schedule_cpu import ScheduleCPU as ScheduleCPU
    from .dispatch.schedule_gpu import ScheduleGPU as ScheduleGPU
    from .encode.encoding_description import describe_encodings as describe_encodings
    from .encode.hoist_encodings import HoistEncodings as HoistEncodings
    from .encode.materialize_encodings import MaterializeEncodings as MaterializeEncodings
    from .encode.propagate_encodings import PropagateEncodings as PropagateEncodings
    from .encode.set_encoding import SetEncoding as SetEncoding
    from .encode.specialize_encodings import SpecializeEncodings as SpecializeEncodings
    from .encode.verify_encodings import VerifyEncodings as VerifyEncodings
    from .encode.verify_encodings import verify_encodings as verify_encodings
    from .fuse.form_attention import FormAttention as FormAttention
    from .fuse.form_block_products import FormBlockProducts as FormBlockProducts
    from .fuse.form_rows import FormRows as FormRows
    from .ir.findings import collect_encodings as collect_encodings
    from .ir.findings import collect_fusions as collect_fusions
    from .ir.findings import collect_placement as collect_placement
    from .ir.keep_findings import KeepFindings as KeepFindings
    from .ir.keep_unread_calls import KeepUnreadCalls as KeepUnreadCalls
    from .ir.reports import EncodingReport as EncodingReport
    from .ir.reports import FusionReport as FusionReport
    from .ir.reports import PlacementEntry as PlacementEntry
    from .ir.reports import PlacementReport as PlacementReport
    from .lower.check_size_divisors import CheckSizeDivisors as CheckSizeDivisors
    from .lower.lower_loop_rows import LowerLoopRows as LowerLoopRows
    from .lower.lower_pinned_storage import LowerPinnedStorage as LowerPinnedStorage
    from .lower.lower_requirements import LowerRequirements as LowerRequirements
    from .lower.lower_to_vm import LowerToVM as LowerToVM
    from .lower.lower_transfers import LowerTransfers as LowerTransfers
    from .lower.note_memory import NoteMemory as NoteMemory
    from .lower.pin_transferred import PinTransferred as PinTransferred
    from .lower.plan_memory import PlanMemoryPerDevice as PlanMemoryPerDevice
    from .lower.settle_packed_results import SettlePackedResults as SettlePackedResults
    from .partition.form_schedules import FormSchedules as FormSchedules
    from .partition.partition_by_host import PartitionByHost as PartitionByHost
    from .permute.move_permutes import MovePermutes as MovePermutes
    from .placement.note_graph import NoteGraph as NoteGraph
    from .placement.realize_targets import RealizeTargets as RealizeTargets
    from .placement.realize_vdevice import RealizeVDevice as RealizeVDevice
    from .placement.realize_vdevice import verify_placement as verify_placement
    from .placement.update_vdevice import UpdateVDevice as UpdateVDevice
    from .quantize.sink_dequantize import SinkDequantize as SinkDequantize
    from .quantize.to_mixed_precision import ToMixedPrecision as ToMixedPrecision
    from .record.form_command_buffers import FormCommandBuffers as FormCommandBuffers
    from .record.form_cuda_graphs import FormCudaGraphs as FormCudaGraphs
    from .record.update_donated import UpdateDonated as UpdateDonated
    from .simplify.isolate_writes import IsolateWrites as IsolateWrites
    from .simplify.simplify_convolutions import SimplifyConvolutions as SimplifyConvolutions
    from .sizes.check_sizes import CheckSizes as CheckSizes
    from .trace.pass_trace import PassTrace as PassTrace
    from .trace.pass_trace import trace_passes as trace_passes

else:  # a name that is not among them is an error to checkers
    __getattr__ = on_first_use(__name__, _EXPORTS, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
