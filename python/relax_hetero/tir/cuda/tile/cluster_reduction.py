"""Cluster split-k: each block of a cluster stores one part of a tile, reduced over the cluster.

A block writes its accumulators of each part to the shared memory of the block that stores it: unlike remote loads,
remote stores have no latency to wait for.
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
from .register_tile import reinterpreted


@dataclass(frozen=True)
class ClusterReduction:
    """Reduction of accumulators over a cluster."""

    shared: SharedMemory
    # Offset of memory for the accumulators of a whole tile, free when all threads of the cluster call `add`.
    offset: int
    cluster_split_k: int  # blocks of the cluster
    rank: Expr  # rank of the block in the cluster
    groups: int  # consumer warpgroups of a block

    def add(
        self,
        sums: Any,  # accumulators of a thread, in blocks of registers; a part has the same registers of each block
        extents: tuple[int, int],  # number of blocks, and registers of each: a multiple of four per part
        kind: str,  # "float32" or "uint32"
        # group, member: index of the consumer warpgroup, and of the thread in it.
        group: Expr,
        member: Expr,
    ) -> Any:
        """Reduce the block's part of the tile, in the order of blocks; producers take part in two cluster barriers."""
        blocks, registers = extents
        count = registers // self.cluster_split_k
        quads = [(block, quad) for block in range(blocks) for quad in range(count // 4)]
        warpgroup_bytes = len(quads) * WARPGROUP * 16  # bytes of a warpgroup's accumulators in a part
        offset, part_bytes = self.offset + group * warpgroup_bytes + member * 16, self.groups * warpgroup_bytes
        address = T.bind(ptx.shared_address(self.shared.at(offset + self.rank * part_bytes)))
        remote = local(1, "uint32")
        ptx.cluster_barrier()
        for rotation in range(self.cluster_split_k):
            # Blocks send in rotated order, to themselves last, to spread the traffic.
            for owner in range(self.cluster_split_k):
                with when(tirx.EQ(T.truncmod(self.rank + rotation + 1, self.cluster_split_k), owner)):
                    ptx.remote_address(remote[0], address, owner)
                    for number, (block, quad) in enumerate(quads):
                        first = block * registers + owner * count + 4 * quad
                        values = [reinterpreted(sums[first + i], "uint32") for i in range(4)]
                        ptx.store_remote(remote[0] + T.uint32(number * WARPGROUP * 16), values)
        ptx.cluster_barrier()
        total, received = local(blocks * count, kind), local(4, "uint32")
        for sender in range(self.cluster_split_k):
            for number in range(len(quads)):
                source = offset + sender * part_bytes + number * (WARPGROUP * 16)
                ptx.load_shared([received[i] for i in range(4)], self.shared.at(source))
                for i in range(4):
                    value, register = reinterpreted(received[i], kind), 4 * number + i
                    T.buffer_store(total, value if sender == 0 else total[register] + value, [register])
        return total
