"""Kernels of GPUs that begin while the launch before them ends: programmatic dependent launch.

Before::

    for block in T.thread_binding(16, "blockIdx.x"):
        for thread in T.thread_binding(64, "threadIdx.x"): ...

After::

    for block in T.thread_binding(16, "blockIdx.x"):
        griddepcontrol.launch_dependents                 # the next launch may come up to its own wait
        griddepcontrol.wait                              # until the launch before is complete
        for thread in T.thread_binding(64, "threadIdx.x"): ...

A kernel that a generator wrote with a wait of its own (`tir.cuda.core.launch.enable_pdl`) waits later than that,
behind work that depends on no other launch. Every kernel of a chain waits: so one whose wait is over knows that all
launches before it are complete, not only the last; several launches may have begun that wait for each other, and the
weights of the last are on their way. Kernels behind one that waits first begin when the launches before that are
complete.
"""

from __future__ import annotations

from tvm import tirx
from tvm_ffi import structural_map

from ..cuda.core.ptx import waiting_statements
from .table_kernel import nest_of


def waiting_first(kernel: tirx.PrimFunc, next_waits: bool = False) -> tirx.PrimFunc:
    """A kernel of one launch that waits before all that it does: reads of a table of addresses too.

    Parameters
    ----------
    next_waits : bool
        Whether the next launch may begin only when this one has waited.
    """
    nest = nest_of(kernel)
    assert nest is not None, "a kernel of one launch is expected"

    def on_loop(loop: tirx.For) -> tirx.For:
        if not loop.loop_var.same_as(nest.loop_var):
            return loop
        first = waiting_statements() if next_waits else waiting_statements()[::-1]
        body = tirx.SeqStmt([*first, loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
        )

    return kernel.with_body(structural_map(kernel.body, (tirx.For, on_loop)))


def launched_early(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel, which waits for launches before it, launched so that it does begin early.

    TVM hands the tag on to the driver ("programmatic stream serialization"), and capturing a stream keeps it, as an
    edge of the graph. The kernel promises no longer that its tensors do not overlap: the CUDA compiler would take what
    nobody in it writes for constant, and may read it before the wait.
    """
    tagged = kernel.with_attr("tirx.kernel_launch_params", ["tirx.use_programtic_dependent_launch"])
    return tagged.with_attr("tirx.noalias", False)
