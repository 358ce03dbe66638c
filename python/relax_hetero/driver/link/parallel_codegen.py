"""Parallel compilation of kernels in modules of a few kernels each.

LLVM compiles a module on one core. The split into modules does not depend on the number of cores, so that a model
compiles to the same bytes on any computer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target
from tvm_ffi import VisitInterrupt, structural_walk

from ...target.cpu_cores import num_cores
from ...transform.ir.rewriting import with_functions
from ...vm.device.interruptible import run_in_threads

KERNELS_PER_MODULE = 4  # fewer balance the load better, but each module repeats set-up worth about a tenth of a kernel

Build = Callable[[Target, tvm.IRModule], tvm.runtime.Module]
Progress = Callable[[str, int, int], None]
"""Function that is called with a stage, the number of its tasks that are done, and their total number."""


def cut(target: Target, group: tvm.IRModule) -> list[tvm.IRModule]:
    """Split the kernels of one target into modules, in order of the kernels' names.

    Kernels of other targets than llvm, and kernels that call each other, stay together.
    """
    kernels = sorted(group.functions.items(), key=lambda pair: pair[0].name_hint)
    if target.kind.name != "llvm" or len(kernels) <= KERNELS_PER_MODULE or _call_each_other(kernels):
        return [group]
    count = -(-len(kernels) // KERNELS_PER_MODULE)
    return [tvm.IRModule(dict(kernels[index::count])) for index in range(count)]


def build_in_parallel(
    parts: Sequence[tuple[Target, tvm.IRModule]], build: Build, progress: Progress | None = None
) -> list[tvm.runtime.Module]:
    """Call `build` for each part in several threads; returns the results in order.

    Raises the error of `build` for the first part, in order, that fails.
    """
    counter = _Counter(progress, sum(len(part.functions) for _, part in parts))
    context = tvm.transform.PassContext.current()
    if context.instruments:  # the caller's objects, which must be called from the caller's thread
        return [counter.done(part, build(target, part)) for target, part in parts]

    def task(target: Target, part: tvm.IRModule) -> tvm.runtime.Module:
        part = compact_blocks(part)
        with copy_of(context, COMPACTION, *(IDLE_ON_CPUS if target.kind.name == "llvm" else ())):
            return build(target, part)

    tasks = [partial(task, target, part) for target, part in parts]
    return run_in_threads(tasks, num_cores(), "relax_hetero.driver", lambda index: counter.done(parts[index][1]))


class _Counter:
    """Counter of compiled kernels, which reports progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._built, self._total = progress, 0, total

    def done(self, part: tvm.IRModule, library: Any = None) -> Any:
        """Count the kernels of a part; returns `library`."""
        self._built += len(part.functions)
        if self._progress is not None:
            self._progress("kernels", self._built, self._total)
        return library


COMPACTION = "s_tir.CompactBufferAllocation"  # TVM's pass that `compact_blocks` takes the place of
# Passes that change nothing in kernels of CPUs; finding that out takes a tenth of the time of TVM's pipeline.
# LLVM removes what RemoveNoOp does, which takes another tenth.
IDLE_ON_CPUS = ("tirx.RemoveNoOp",) + tuple(
    f"s_tir.{name}"
    for name in """InferFragment InjectPermutedLayout LowerAutoCopy LowerCrossThreadReduction LowerThreadAllreduce
    LowerVtcmAlloc ManifestSharedMemoryLocalStage MergeSharedMemoryAllocations ThreadSync TransformMmaBufferLayout
    VerifyVTCMLimit""".split()
)


def compact_blocks(part: tvm.IRModule) -> tvm.IRModule:
    """Reduce the buffers that blocks allocate to the elements that are accessed.

    TVM's pass does it for all temporaries, and takes longer than LLVM for unrolled kernels: it computes the region of
    each access to each register. The kernels of `tir` allocate what they use, without blocks.
    """
    functions = {gv: func for gv, func in part.functions.items() if _has_block_buffers(func)}
    return with_functions(part, dict(_compaction()(tvm.IRModule(functions)).functions.items()))


def _has_block_buffers(func: tirx.PrimFunc) -> bool:
    def on_block(block: s_tir.SBlock) -> VisitInterrupt | None:
        return VisitInterrupt(block) if block.alloc_buffers else None

    return structural_walk(func.body, (s_tir.SBlock, on_block)) is not None


def _compaction() -> tvm.transform.Pass:
    """The beginning of TVM's pipeline, up to its compaction of temporaries."""
    passes = s_tir.transform
    return tvm.transform.Sequential(
        [
            passes.CanonicalizeLoop(),
            passes.LowerCrossThreadReduction(),
            passes.LowerInitBlock(),
            passes.PlanAndUpdateBufferAllocationLocation(),
            passes.ConvertBlocksToOpaque(),
            passes.LiftThreadBinding(),
            passes.ManifestSharedMemoryLocalStage(),
            passes.CompactBufferAllocation(),
        ]
    )


def copy_of(context: tvm.transform.PassContext, *disabled: str) -> tvm.transform.PassContext:
    """A copy of a context for another thread, with more passes disabled."""
    disabled_pass = [*context.disabled_pass, *disabled]
    return tvm.transform.PassContext(
        int(context.opt_level), list(context.required_pass), disabled_pass, None, dict(context.config)
    )


def _call_each_other(kernels: Sequence[tuple[tvm.ir.GlobalVar, tirx.PrimFunc]]) -> bool:
    own = {str(func.attrs["global_symbol"]) for _, func in kernels if "global_symbol" in func.attrs}

    def on_name(text: tvm.ir.StringImm) -> VisitInterrupt | None:
        return VisitInterrupt(text) if str(text.value) in own else None

    seen = [(tvm.ir.GlobalVar, VisitInterrupt), (tvm.ir.StringImm, on_name)]
    return any(structural_walk(func.body, seen) is not None for _, func in kernels)
