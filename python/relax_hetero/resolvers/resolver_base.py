"""Layouts by the names of iteration dimensions, and what every resolver of this library shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..encoding.encoding import DYNAMIC, RHS, Encoding, IndexMap
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import (
    AttentionProblem,
    BlockProductProblem,
    BlockRowsProblem,
    CachedAttentionProblem,
    ConvProblem,
    ElementwiseProblem,
    MatmulProblem,
    Problem,
    RowsProblem,
)
from ..target.cpu_target import CpuTarget, cpu_target_of
from ..target.dot_instructions import dot_instruction_for
from ..target.tile_instructions import tile_instruction_for

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


def tiled(
    index_map: IndexMap,
    outer: Sequence[str],
    tiles: Mapping[str, int],
    compensation: bool = False,
    swizzle: bool = False,
) -> PackedLayout:
    """The layout with batch dimensions outermost, then the dimensions `outer`, then the tiles.

    Parameters
    ----------
    index_map : IndexMap
        Index map of the operand, as its shape has it: transposes are composed here.
    outer : sequence of str
        Order of the other dimensions: ("n", "k").
    tiles : mapping of str to int
        Tile of each dimension, in storage order; tiles of one are left out.
    compensation, swizzle : bool
        See `PackedLayout`.
    """
    batch = [dim for dim, name in enumerate(index_map) if name not in outer]
    inner = [(index_map.index(name), tile) for name, tile in tiles.items() if tile > 1]
    return PackedLayout(
        (*batch, *(index_map.index(name) for name in outer)),
        tuple(dim for dim, _ in inner),
        tuple(tile for _, tile in inner),
        compensation,
        swizzle,
    )


class ResolverBase(ABC):
    """Storage sizes and kernels, which follow from the layout and the CPU alone."""

    name = "base"

    @abstractmethod
    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """See `EncodingResolver.resolve`."""

    def is_packed_in_kernel(self, encoding: Encoding, cpu: CpuTarget) -> bool:
        """Return whether tile registers multiply rows of n that the kernel packs itself, panel by panel.

        Vectors read them as well, a group of k at a time, where the process may not use tiles; but not with
        compensation, which is part of packed storage.
        """
        if encoding.moves is not None or encoding.operand_index != RHS or encoding.index_map[-2:] != ("k", "n"):
            return False
        tiles = tile_instruction_for(cpu, *encoding.element_types)
        dot = dot_instruction_for(cpu, *encoding.element_types)
        sizes = encoding.sizes
        if tiles is None or dot is None or dot.compensation or DYNAMIC in (sizes["k"], sizes["n"]):
            return False
        return sizes["m"] == DYNAMIC or sizes["m"] >= tiles.least_rows

    def storage_size(self, encoding: Encoding, shape: Sequence[Any], target: tvm.target.Target) -> Any:
        """Bytes of a tensor of `shape` under its layout, row-major where it has none."""
        layout = self.resolve(encoding, target) or PackedLayout.identity(len(shape))
        return layout.storage_bytes(shape, encoding.element_type)

    def page_order(self, target: tvm.target.Target) -> str:
        """Tokens in lanes, whatever the CPU: its kernels read a page's keys so."""
        return "lanes"

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """The project's own kernel for the target's machine."""
        return _generators()[type(problem)](problem, cpu_target_of(target))


@cache
def _generators() -> dict[type, Callable[[Any, CpuTarget], tirx.PrimFunc]]:
    """Which generator solves which problem; they load when the first kernel is written."""
    from ..tir.attention.attention import attention_kernel
    from ..tir.attention.cached.cached_attention import cached_attention_kernel
    from ..tir.conv.convolution import conv_kernel
    from ..tir.elementwise.elementwise import elementwise_kernel
    from ..tir.matmul.block_product import block_product_kernel
    from ..tir.matmul.block_rows import block_rows_kernel
    from ..tir.matmul.matmul import matmul_kernel
    from ..tir.rows.rows import rows_kernel

    return {
        MatmulProblem: matmul_kernel,
        ConvProblem: conv_kernel,
        BlockProductProblem: block_product_kernel,
        BlockRowsProblem: block_rows_kernel,
        AttentionProblem: attention_kernel,
        CachedAttentionProblem: cached_attention_kernel,
        RowsProblem: rows_kernel,
        ElementwiseProblem: elementwise_kernel,
    }
