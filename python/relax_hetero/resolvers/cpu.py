"""Layouts for CPUs with vector instructions: x86 from SSE2 to AVX-512, and AArch64. Tables of `target` decide.

The left operand and the result stay row-major: the kernel broadcasts elements of the left one from where they lie, as
fast as from packed storage, and stores rows of the result with a mask at their end. The right operand is packed into
panels of n0 columns, ``[b.., n/n0, k/k0, n0, k0]``: a k-step reads one stretch of memory.

Convolutions: see `cpu_convolutions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..encoding.encoding import DYNAMIC, EXACT, RHS, Encoding
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import (
    AttentionProblem,
    BlockProductProblem,
    BlockRowsProblem,
    CachedAttentionProblem,
    RowPhase,
    RowsProblem,
)
from ..target.cpu_target import CpuTarget, cpu_target_of
from ..target.dot_instructions import DotInstruction, dot_instruction_for
from ..target.element_types import bytes_of
from ..target.tiles import tile_columns
from .cpu_convolutions import conv_layout, form_of
from .resolver_base import ResolverBase, tiled

if TYPE_CHECKING:
    import tvm

IN_PLACE_BYTES = 256 * 1024
"""A row-major right operand that is no larger is read in place: it fits the second-level cache, and packing it for one
product costs more than it saves. Measured (AVX-512, float32, M=128): 3 to 8 % faster in place up to here, level at
1 MiB, a third slower at 4 MiB."""

FEW_ROWS = 8
"""For no more rows of the left operand than this, laying a right operand out costs more than it saves. Measured
(AVX-512, float32, 4096x4096): 8 rows take a third of the time in place, one row a tenth."""


class CpuResolver(ResolverBase):
    """Row-major left operand and result, packed right operand."""

    name = "cpu"
    problems = (
        AttentionProblem,
        BlockProductProblem,
        BlockRowsProblem,
        CachedAttentionProblem,
        RowsProblem,
        RowPhase,
    )

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major left operand and result; panels for the right one, unless it is a small activation."""
        cpu = cpu_target_of(target)
        if encoding.moves is not None:
            return conv_layout(encoding, cpu)
        dot = dot_instruction_for(cpu, *encoding.element_types)
        if dot is None:
            return None
        index_map = encoding.index_map
        if encoding.operand_index != RHS or _read_in_place(encoding, dot):
            return PackedLayout.identity(len(index_map))
        tiles = {"n": panel_width(cpu, dot, encoding.sizes["n"]), "k": dot.k0}
        return tiled(index_map, ("n", "k"), tiles, dot.compensation != 0)

    def resolve_activation(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """As `resolve`, but a right operand that few rows meet stays as it is."""
        if encoding.moves is not None:
            # Windows are transformed when a model is compiled, not in a call, unless there is no other form.
            cpu = cpu_target_of(target)
            return conv_layout(replace(encoding, accuracy=EXACT), cpu) or conv_layout(encoding, cpu)
        dot = dot_instruction_for(cpu_target_of(target), *encoding.element_types)
        few = 0 <= encoding.sizes["m"] <= FEW_ROWS
        if dot is not None and encoding.operand_index == RHS and few and _is_readable(encoding, dot, by_few=True):
            return PackedLayout.identity(len(encoding.index_map))
        if self.is_packed_in_kernel(encoding, cpu_target_of(target)):
            return PackedLayout.identity(len(encoding.index_map))
        return self.resolve(encoding, target)

    def convolution_form(self, encoding: Encoding, target: tvm.target.Target, weight: PackedLayout) -> str:
        """Which form of a convolution a layout of the weight is for, and why; for `explain`."""
        return form_of(encoding, cpu_target_of(target), weight)


def panel_width(cpu: CpuTarget, dot: DotInstruction, n: int) -> int:
    """Columns of a packed panel: those of the kernel's tile, one vector where N is no wider."""
    lanes = cpu.lanes(dot.types[2])
    return lanes if 0 <= n <= lanes else tile_columns(cpu, dot.types[2])


def _read_in_place(encoding: Encoding, dot: DotInstruction) -> bool:
    """True if the right operand is a small activation: it runs along a batch dimension; weights are shared by all."""
    if not _is_readable(encoding, dot) or not any(name.startswith("b") for name in encoding.of(RHS).index_map):
        return False
    k, n = encoding.sizes["k"], encoding.sizes["n"]
    return DYNAMIC in (k, n) or k * n * bytes_of(encoding.element_types[RHS]) <= IN_PLACE_BYTES


def _is_readable(encoding: Encoding, dot: DotInstruction, by_few: bool = False) -> bool:
    """Return whether the kernel had better read the right operand as it lies: rows of n, one k a step.

    Of float16 in pairs, two rows are riffled in every step, which is worth it where few rows of the left operand do.
    """
    is_single = dot.k0 == 1 or (by_few and dot.short > 0)
    return is_single and encoding.of(RHS).index_map[-2:] == ("k", "n")
