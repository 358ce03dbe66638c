"""Sums of a tile whose k the blocks of a cluster share: each block gets its part of the tile, added up.

Each block writes its sums of a part to the shared memory of the block that stores it: a store does not wait for its
answer, as reading the sums of others would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARPGROUP
from ...core.builder import Expr, when
from ..core import ptx
from ..core.launch import SharedMemory, local


def cluster_barrier() -> None:
    """All threads of the cluster wait for each other, and see what others wrote."""
    ptx.cluster_arrive()
    ptx.cluster_wait()


@dataclass(frozen=True)
class ClusterParts:
    """Where sums meet.

    Attributes
    ----------
    shared : SharedMemory
    offset : int
        Offset of memory for the sums of a whole tile, which nothing of the cluster uses any more when all its threads
        meet.
    split : int
        Blocks of the cluster.
    rank : PrimExpr
        Number of the block in it.
    groups : int
        Warpgroups of a block that have sums.
    """

    shared: SharedMemory
    offset: int
    split: int
    rank: Expr
    groups: int

    def add(self, sums: Any, extents: tuple[int, int], kind: str, group: Expr, member: Expr) -> Any:
        """Add the block's part, in the order of the blocks; threads without sums meet the others twice.

        Parameters
        ----------
        sums : Buffer
            Registers of a thread, in blocks of as many each; a part is so many neighbours of every block.
        extents : tuple of int
            Blocks of registers, and registers of each: a multiple of four for each part.
        kind : str
            "float32" or "uint32".
        group, member : PrimExpr
            Number of the warpgroup, and of the thread in it.
        """
        blocks, registers = extents
        count = registers // self.split
        pieces = [(block, quad) for block in range(blocks) for quad in range(count // 4)]
        each = len(pieces) * WARPGROUP * 16  # bytes of a warpgroup's sums of a part
        own, part = self.offset + group * each + member * 16, self.groups * each
        address = T.bind(ptx.shared_address(self.shared.at(own + self.rank * part)))
        remote = local(1, "uint32")
        cluster_barrier()
        for turn in range(self.split):
            # Every block begins with another one, and comes to itself last.
            for owner in range(self.split):
                with when(tirx.EQ(T.truncmod(self.rank + turn + 1, self.split), owner)):
                    ptx.remote_address(remote[0], address, owner)
                    for number, (block, quad) in enumerate(pieces):
                        first = block * registers + owner * count + 4 * quad
                        values = [_typed(sums[first + i], "uint32") for i in range(4)]
                        ptx.store_remote(remote[0] + T.uint32(number * WARPGROUP * 16), values)
        cluster_barrier()
        total, parts = local(blocks * count, kind), local(4, "uint32")
        for sender in range(self.split):
            for number in range(len(pieces)):
                source = own + sender * part + number * (WARPGROUP * 16)
                ptx.load_shared([parts[i] for i in range(4)], self.shared.at(source))
                for i in range(4):
                    value, register = _typed(parts[i], kind), 4 * number + i
                    T.buffer_store(total, value if sender == 0 else total[register] + value, [register])
        return total


def _typed(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.reinterpret(dtype, value)
