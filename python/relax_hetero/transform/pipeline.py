"""The passes that make a model ready for the virtual machine: all of them, in order, with a line each.

`rh.compile` runs this list and links the result (`driver.compile`). `rh.get_pipeline` is the list without the steps
that only our linker and machine understand. ``relax-hetero explain`` runs the list and prints what it found, and the
table in docs/design.md is made from it. ``help`` of a pass says what it assumes, and shows a program before and after.

Two steps are lists of their own: `form_dispatches`, with TVM's legalizing and fusing, and `lowering_steps` in
`transform.lower.lower_to_vm`.
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
from .record.update_donated import UpdateDonated
from .simplify.isolate_writes import IsolateWrites
from .simplify.simplify_convolutions import SimplifyConvolutions


@dataclass(frozen=True)
class PipelineStep:
    """A pass of the pipeline.

    Attributes
    ----------
    stage : str
        The room of `relax_hetero.transform` that the pass lives in.
    does : str
        Effect of the pass, in a line.
    only_ours : bool
        Whether only our linker and machine understand its result; `tvm.compile` does without it.
    """

    stage: str
    run: tvm.transform.Pass
    does: str
    only_ours: bool = False

    @property
    def name(self) -> str:
        """The name of the pass."""
        return str(self.run.info.name)


def pipeline_steps(command_buffers: bool = True, stock: bool = False) -> list[PipelineStep]:
    """The way of a model, from ops on tensors to the virtual machine's form.

    Parameters
    ----------
    command_buffers : bool
        Whether runs of kernels on one device become command buffers.
    stock : bool
        Whether stock TVM links the result, and not `rh.compile`.

    Returns
    -------
    list of PipelineStep
        Each can be run alone, and does nothing to a module that has been through it.
    """
    step = PipelineStep
    record = [
        step(
            "record",
            FormCommandBuffers(separate_kernels=not stock),
            "runs of kernels on one device become one host function",
        ),
        step("record", FormCudaGraphs(), "on GPUs, that function becomes a CUDA graph", only_ours=True),
    ]
    steps = [
        step("ir", RecordRemarks(), "what the passes find from here on stays with the module"),
        step("ir", KeepUnreadCalls(), "code that the module only calls runs, even if nobody reads its results"),
        step("simplify", IsolateWrites(), "kernels in place overwrite nothing that others read"),
        step("placement", RealizeTargets(), "a target that names a kind alone becomes this machine's CPU or GPU"),
        step("placement", RealizeVDevice(), "every value and op gets its device, transfers are written out"),
        step("placement", AnnotateGraph(), "which op reads what stays with the module, for reports"),
        step("sizes", CheckSizes(), "what ops need of sizes that only a call knows is checked when a call begins"),
        step("quantize", SinkDequantize(), "bytes stay bytes up to the op that computes with their numbers"),
        step("simplify", SimplifyConvolutions(), "norms and padding join convolutions"),
        step("fuse", FormQuantizedMatmuls(), "products with weights of 4 or 8 bits become one op"),
        step("fuse", FormAttention(), "scores, mask, softmax and values become one op"),
        step("encode", SetEncoding(), "products and convolutions say what their operands are for"),
        step("encode", PropagateEncodings(), "work around products is done on their encoded operands and results"),
        step("fuse", FormRows(), "softmax, norms and the work around them become one op on rows"),
        step("encode", SpecializeEncodings(), "each device chooses the layout of its encoded values, or has none"),
        step("encode", HoistEncodings(), "weights are packed now, once for each layout and device"),
        step("encode", MaterializeEncodings(), "encoded ops become calls of the device's own kernels"),
        step("permute", MovePermutes(), "permutations move to where they cancel"),
        step("dispatch", CheckValues(), "an index outside of its axis, or a divisor 0, becomes an error"),
        step("dispatch", FormDispatches(), "other ops become kernels: fused, scheduled, each with its device's target"),
        *(record if command_buffers else []),
        step("record", UpdateDonated(), "kernels outside command buffers write over inputs that the caller donated"),
        step(
            "partition", FormSchedules(), "functions on several devices are cut into steps, to overlap", only_ours=True
        ),
        step("lower", LowerToVM(), "results are allocated, memory is planned, transfers become run-time calls"),
    ]
    return [each for each in steps if not (stock and each.only_ours)]


def steps_before_hosts() -> list[PipelineStep]:
    """The steps that a module on several hosts goes through as a whole, before `PartitionByHost` cuts it.

    The others, from command buffers on, are those of each host's own module.
    """
    steps = pipeline_steps()
    return steps[: [step.name for step in steps].index("FormDispatches") + 1]


def pipeline_table() -> str:
    """The pipeline as a table in Markdown; docs/design.md shows it."""
    rows = [f"| {step.stage} | `{step.name}` | {step.does}{_NOTE[step.only_ours]} |" for step in pipeline_steps()]
    return "\n".join(["| stage | pass | what it does |", "| --- | --- | --- |", *rows])


_NOTE = {False: "", True: " (`rh.compile` only)"}
