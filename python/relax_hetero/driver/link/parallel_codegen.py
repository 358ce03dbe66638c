"""Kernels of a target are compiled a few at a time, on all cores.

LLVM compiles a module on one core. A module is cut into parts of a few kernels whose code does not depend on how many
cores there are, so that a model compiles to the same bytes anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target
from tvm_ffi import VisitInterrupt, structural_walk

from ...target.cpu_cores import num_cores
from ...vm.device.interruptible import run_in_threads

# Each module repeats some code and set-up, worth about a tenth of a kernel; fewer kernels a module share work better.
KERNELS_A_MODULE = 4

Build = Callable[[Target, tvm.IRModule], tvm.runtime.Module]
Progress = Callable[[str, int, int], None]
"""Called with a step, how many parts of it are done, and how many there are."""


def cut(target: Target, group: tvm.IRModule) -> list[tvm.IRModule]:
    """Kernels of one target as modules that are compiled one by one, in order of the kernels' names.

    Kernels of llvm targets are cut apart unless one of them calls another; kernels of other targets stay together.
    """
    kernels = sorted(group.functions.items(), key=lambda pair: pair[0].name_hint)
    if target.kind.name != "llvm" or len(kernels) <= KERNELS_A_MODULE or _call_each_other(kernels):
        return [group]
    parts = -(-len(kernels) // KERNELS_A_MODULE)
    return [tvm.IRModule(dict(kernels[part::parts])) for part in range(parts)]


def build_in_parallel(
    parts: Sequence[tuple[Target, tvm.IRModule]], build: Build, progress: Progress | None = None
) -> list[tvm.runtime.Module]:
    """The results of `build` for each part, in order; it is called from several threads.

    Raises
    ------
    Exception
        The error that `build` raises for the first part, in order, that fails.
    """
    counter = _Counter(progress, sum(len(part.functions) for _, part in parts))
    context = tvm.transform.PassContext.current()
    if context.instruments:  # the caller's objects, which are asked from the caller's thread only
        return [counter.done(part, build(target, part)) for target, part in parts]

    def task(target: Target, part: tvm.IRModule) -> tvm.runtime.Module:
        with _copy(context):
            return build(target, part)

    tasks = [partial(task, target, part) for target, part in parts]
    return run_in_threads(tasks, num_cores(), "relax_hetero.driver", lambda number: counter.done(parts[number][1]))


class _Counter:
    """Tells how many kernels are built."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._built, self._total = progress, 0, total

    def done(self, part: tvm.IRModule, library: Any = None) -> Any:
        """Count the kernels of a part; returns `library`."""
        self._built += len(part.functions)
        if self._progress is not None:
            self._progress("kernels", self._built, self._total)
        return library


def _copy(context: tvm.transform.PassContext) -> tvm.transform.PassContext:
    """The settings of a context, which is itself one thread's."""
    return tvm.transform.PassContext(
        int(context.opt_level), list(context.required_pass), list(context.disabled_pass), None, dict(context.config)
    )


def _call_each_other(kernels: Sequence[tuple[tvm.ir.GlobalVar, tirx.PrimFunc]]) -> bool:
    own = {str(func.attrs["global_symbol"]) for _, func in kernels if "global_symbol" in func.attrs}

    def on_name(text: tvm.ir.StringImm) -> VisitInterrupt | None:
        return VisitInterrupt(text) if str(text.value) in own else None

    seen = [(tvm.ir.GlobalVar, VisitInterrupt), (tvm.ir.StringImm, on_name)]
    return any(structural_walk(func.body, seen) is not None for _, func in kernels)
