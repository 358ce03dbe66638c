"""The pipeline: all passes that lower a model to the virtual machine's form, in order, with a line each.

`rh.compile` runs this list and links the result (`driver.compile`). `rh.get_pipeline` is the list without the steps
that only our linker and machine understand. ``relax-hetero explain`` runs the list and prints the remarks, and the
table in docs/design.md is made from it. ``help`` of a pass says what it assumes, and shows a program before and after.

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
from .record.update_donated import UpdateDonated
from .simplify.isolate_writes import IsolateWrites
from .simplify.simplify_convolutions import SimplifyConvolutions


@dataclass(frozen=True)
class PipelineStep:
    """A pass of the pipeline.

    Attributes
    ----------
    stage : str
        Stage of lowering: most often the package of `relax_hetero.transform` that holds the pass.
    does : str
        Effect of the pass, in a line.
    only_ours : bool
        True if only our linker and machine understand its result; `tvm.compile` runs without it.
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
    """Steps from ops on tensors to the virtual machine's form.

    Parameters
    ----------
    command_buffers : bool
        Make command buffers of runs of kernels on one device.
    stock : bool
        Leave out the steps whose result stock TVM cannot link.

    Returns
    -------
    list of PipelineStep
        Steps in order. Each can be run alone, and changes nothing in a module that has been through it.
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
        step("ir", RecordRemarks(), "remarks of the passes from here on stay with the module"),
        step("ir", KeepUnreadCalls(), "code that the module only calls runs, even if nobody reads its results"),
        step("simplify", IsolateWrites(), "in-place kernels overwrite nothing that other code reads"),
        step("placement", RealizeTargets(), "a target that names a kind alone becomes this machine's CPU or GPU"),
        step("placement", RealizeVDevice(), "every value and op gets its device, transfers become explicit"),
        step("placement", AnnotateGraph(), "the graph of ops and their operands stays with the module, for reports"),
        step("sizes", CheckSizes(), "conditions on sizes that only a call knows are checked when a call begins"),
        step("quantize", SinkDequantize(), "bytes stay bytes up to the op that computes with their numbers"),
        step("simplify", SimplifyConvolutions(), "norms and padding join convolutions"),
        step("fuse", FormQuantizedMatmuls(), "products with weights of 4 or 8 bits become one op"),
        step("fuse", FormAttention(), "scores, mask, softmax and values become one op"),
        step("encode", SetEncoding(), "operands of products and convolutions get encodings, which say their role"),
        step("encode", PropagateEncodings(), "work around products moves to their encoded operands and results"),
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
    return [one for one in steps if not (stock and one.only_ours)]


def steps_before_hosts() -> list[PipelineStep]:
    """The steps that run on a module of several hosts, before `PartitionByHost` cuts it.

    The remaining ones, from command buffers on, run on each host's own module.
    """
    steps = pipeline_steps()
    return steps[: [step.name for step in steps].index("FormDispatches") + 1]


def pipeline_table() -> str:
    """The pipeline as a table in Markdown; docs/design.md shows it."""
    rows = [f"| {step.stage} | `{step.name}` | {step.does}{_NOTE[step.only_ours]} |" for step in pipeline_steps()]
    return "\n".join(["| stage | pass | what it does |", "| --- | --- | --- |", *rows])


_NOTE = {False: "", True: " (`rh.compile` only)"}
