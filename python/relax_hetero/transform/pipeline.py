"""The pipeline: all passes that lower a model to the virtual machine's form, in order, with a line each.

`rh.compile` runs this list and links the result (`driver.compile`). `rh.get_pipeline` is the list without the steps
whose result only `rh.compile` can link. ``relax-hetero explain`` runs the list and prints the remarks, and the
table in docs/design.md is made from it. ``help`` of a pass says what it assumes, with a program before and after.

Two steps consist of several passes: `FormDispatches`, with TVM's legalizing and fusing, and `LowerToVM`.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from .check_sizes import CheckSizes
from .dispatch.check_values import CheckValues
from .dispatch.form_dispatches import FormDispatches
from .encode.hoist_encodings import HoistEncodings
from .encode.materialize_encodings import MaterializeEncodings
from .encode.propagate_encodings import PropagateEncodings
from .encode.set_encoding import SetEncoding
from .encode.specialize_encodings import SpecializeEncodings
from .fuse.form_attention import FormAttention
from .fuse.form_quantized_matmuls import FormQuantizedMatmuls
from .fuse.form_rows import FormRows
from .ir.keep_unread_calls import KeepUnreadCalls
from .ir.record_remarks import RecordRemarks
from .lower.lower_to_vm import LowerToVM
from .move_permutes import MovePermutes
from .partition.form_schedules import FormSchedules
from .placement.annotate_graph import AnnotateGraph
from .placement.realize_vdevice import RealizeTargets, RealizeVDevice
from .quantize.sink_dequantize import SinkDequantize
from .record.form_command_buffers import FormCommandBuffers
from .record.form_cuda_graphs import FormCudaGraphs
from .record.form_mailboxes import FormMailboxes
from .record.update_donated import UpdateDonated
from .shard.partition_by_mesh import PartitionByMesh
from .simplify.isolate_writes import IsolateWrites
from .simplify.simplify_convolutions import SimplifyConvolutions


@dataclass(frozen=True)
class PipelineStep:
    """A pass of the pipeline."""

    stage: str  # stage of lowering: most often the package of `relax_hetero.transform` that holds the pass
    run: tvm.transform.Pass
    does: str  # effect of the pass, in a line
    rh_only: bool = False  # True if only `rh.compile` can link the result; `tvm.compile` leaves the pass out

    @property
    def name(self) -> str:
        """The name of the pass."""
        return str(self.run.info.name)


def pipeline_steps(command_buffers: bool = True, stock: bool = False) -> list[PipelineStep]:
    """Steps from ops on tensors to the virtual machine's form.

    `command_buffers`: make command buffers of runs of kernels on one device. `stock`: leave out the steps whose result
    stock TVM cannot link. Returns the steps in order. Each can be run alone and is idempotent.
    """
    step = PipelineStep
    record_steps = [
        step("record", FormMailboxes(), "transfers where a GPU and the CPU alternate become mailboxes", rh_only=True),
        step(
            "record",
            FormCommandBuffers(separate_kernels=not stock),
            "runs of kernels on one device become one host function",
        ),
        step("record", FormCudaGraphs(), "on GPUs, that function becomes a CUDA graph", rh_only=True),
    ]
    steps = [
        step("ir", RecordRemarks(), "remarks of the passes from here on stay with the module"),
        step("ir", KeepUnreadCalls(), "calls of callbacks and packed functions stay even if their results are unused"),
        step("simplify", IsolateWrites(), "in-place kernels overwrite nothing that other code reads"),
        step(
            "shard", PartitionByMesh(), "values over a mesh become a value of each device, and exchanges between them"
        ),
        step("placement", RealizeTargets(), "a target that names a kind alone becomes this machine's CPU or GPU"),
        step("placement", RealizeVDevice(), "every value and op gets its device, transfers become explicit"),
        step("placement", AnnotateGraph(), "the graph of ops and their operands stays with the module, for reports"),
        step("sizes", CheckSizes(), "conditions on dynamic sizes are checked when a call begins"),
        step("quantize", SinkDequantize(), "dequantization moves down to the ops that compute with the numbers"),
        step("simplify", SimplifyConvolutions(), "norms and padding join convolutions"),
        step("fuse", FormQuantizedMatmuls(), "products with block-quantized weights become one op"),
        step("fuse", FormAttention(), "scores, mask, softmax and values become one op"),
        step("encode", SetEncoding(), "operands of products and convolutions get encodings, which name their roles"),
        step("encode", PropagateEncodings(), "ops around products move to their encoded operands and results"),
        step("fuse", FormRows(), "softmax, norms and the elementwise ops around them become one op on rows"),
        step(
            "encode",
            SpecializeEncodings(),
            "each device chooses layouts for its encoded values, or cancels encodings",
        ),
        step("encode", HoistEncodings(), "weights are packed at compile time, once for each layout and device"),
        step("encode", MaterializeEncodings(), "encoded ops become calls of the device's own kernels"),
        step("permute", MovePermutes(), "permutations move to where they cancel"),
        step("dispatch", CheckValues(), "an index out of bounds, or a divisor 0, becomes an error"),
        step("dispatch", FormDispatches(), "other ops become kernels: fused, scheduled, each with its device's target"),
        *(record_steps if command_buffers else []),
        step("record", UpdateDonated(), "kernels outside command buffers write over inputs that the caller donated"),
        step("partition", FormSchedules(), "functions on several devices are cut into steps, to overlap", rh_only=True),
        step("lower", LowerToVM(), "results are allocated, memory is planned, transfers become run-time calls"),
    ]
    return [entry for entry in steps if not (stock and entry.rh_only)]


def steps_before_hosts() -> list[PipelineStep]:
    """The steps that run on a module of several hosts, before `PartitionByHost` cuts it.

    The remaining steps, from command buffers on, run on each host's own module.
    """
    steps = pipeline_steps()
    return steps[: [step.name for step in steps].index("FormDispatches") + 1]


def pipeline_table() -> str:
    """The pipeline as a table in Markdown; docs/design.md shows it."""
    rows = [f"| {step.stage} | `{step.name}` | {step.does}{_RH_ONLY_NOTE[step.rh_only]} |" for step in pipeline_steps()]
    return "\n".join(["| stage | pass | what it does |", "| --- | --- | --- |", *rows])


_RH_ONLY_NOTE = {False: "", True: " (`rh.compile` only)"}
