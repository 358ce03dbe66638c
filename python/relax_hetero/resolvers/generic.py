"""Layouts for ``c`` targets and CPUs outside the tables: small tiles, every operand packed.

Packing all three makes every access of the kernel's tile contiguous, whatever the compiler behind makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..encoding.encoding import LHS, RHS, Encoding
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import BlockProductProblem, BlockRowsProblem, CachedAttentionProblem
from ..target.cpu_target import cpu_target_of
from ..target.dot_instructions import dot_instruction_for
from .resolver_base import ResolverBase, tiled

if TYPE_CHECKING:
    import tvm

M0, N0 = 8, 8
"""Rows and columns of a tile (as VMVX of IREE, the document's second device)."""


class GenericResolver(ResolverBase):
    """Tiles of 8 by 8, one k at a time."""

    name = "generic"
    problems = (BlockProductProblem, BlockRowsProblem, CachedAttentionProblem)

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """``[m/8, k, 8]``, ``[n/8, k, 8]`` and ``[m/8, n/8, 8, 8]``; convolutions stay stock ops."""
        if encoding.moves is not None or dot_instruction_for(cpu_target_of(target), *encoding.element_types) is None:
            return None
        index_map = encoding.index_map
        if encoding.operand_index == LHS:
            return tiled(index_map, ("m", "k"), {"m": M0})
        if encoding.operand_index == RHS:
            return tiled(index_map, ("n", "k"), {"n": N0})
        return tiled(index_map, ("m", "n"), {"m": M0, "n": N0})
