"""Sums of the blocks of a cluster, each of its own keys, put together through the shared memory of all of them."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARPGROUP
from ...attention.attention_tile import LOWEST
from ...core.builder import Expr, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..matmul.operand_tiles import PRODUCERS
from .attention_tensors import AttentionTensors, to_int32
from .row_store import RowStore
from .score_tile import LOG2_E, ScoreTile, average, averaged

_PITCH = 4
"""Floats between the rows of sums: rows begin in different banks."""


class ClusterSums:
    """The end of an attention whose keys the blocks of a cluster share, in the order of the blocks.

    Parameters
    ----------
    tensors : AttentionTensors
    tile : ScoreTile
        Scores of a warp, after its last keys.
    shared : SharedMemory
        Its first `size` bytes are free by then.
    width : int
        Columns of sums, a multiple of 4.
    """

    def __init__(self, tensors: AttentionTensors, tile: ScoreTile, shared: SharedMemory, width: int) -> None:
        self.tensors, self.tile, self.shared, self.width = tensors, tile, shared, width
        self.height, self.pitch = tensors.plan.consumers * 64, width + _PITCH

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.height * (self.pitch + 2) * 4

    def share(self, sums: Any, group: Expr, warp: Expr) -> None:
        """Sums and maxima of this block's keys into shared memory, in the place of all tiles."""
        tile, height = self.tile, self.height
        ptx.named_barrier(1, self.tensors.plan.consumers * WARPGROUP)
        own = T.bind(group * 64 + warp * 16 + tirx.floordiv(tile.lane, 4))
        for i in range(0, self.width // 2, 2):
            row = own + i // 2 % 2 * 8
            column = i // 4 * 8 + tirx.floormod(tile.lane, 4) * 2
            target = self.shared.at((row * self.pitch + column) * 4)
            ptx.store_shared(target, [_bits(sums[i + c]) for c in range(2)])
        with when(tirx.floormod(tile.lane, 4) == 0):
            for h in range(2):
                target = self.shared.at((height * self.pitch + (own + 8 * h) * 2) * 4)
                ptx.store_shared(target, [_bits(tile.row_max[h]), _bits(tile.sums[h])])

    def put_together(self, thread: Expr, rank: Expr, first: Expr, at: Coordinates) -> None:
        """Write the block's share of the rows from `first` on: averages over the keys of all blocks.

        All threads take part. Barriers of the cluster stand before and after it.
        """
        plan, result, problem = self.tensors.plan, self.tensors.result, self.tensors.problem
        height, width = self.height, int(self.tensors.sizes["e"])
        threads = PRODUCERS + plan.consumers * WARPGROUP
        quads = self.width // 4
        items = -(-height // plan.split) * quads
        remote, facts = local(1, "uint32"), local(2 * plan.split, "uint32")
        part, total = local(4 * plan.split, "uint32"), local(4, "float32")
        state, value = local(2, "float32"), local(1, "float32")
        scale = LOG2_E * (self.tile.scale or 1.0)
        store = RowStore(self.tensors, self.tile, self.shared, at)
        with T.serial(-(-items // threads)) as turn:
            item = T.bind(turn * threads + thread)
            row = T.bind(tirx.floordiv(item, quads) * plan.split + rank)
            column = T.bind(tirx.floormod(item, quads) * 4)
            own = T.bind(first + row)
            with when(tirx.all(row < height, own < to_int32(self.tensors.rows.count), column < width)):
                sums_at = T.bind(ptx.shared_address(self.shared.at((row * self.pitch + column) * 4)))
                facts_at = T.bind(ptx.shared_address(self.shared.at((height * self.pitch + row * 2) * 4)))
                for other in range(plan.split):
                    ptx.remote_address(remote[0], facts_at, other)
                    ptx.load_remote([facts[2 * other + i] for i in range(2)], remote[0])
                    ptx.remote_address(remote[0], sums_at, other)
                    ptx.load_remote([part[4 * other + i] for i in range(4)], remote[0])
                row_max: Expr = T.float32(LOWEST)
                for other in range(plan.split):
                    row_max = T.max(row_max, _float(facts[2 * other]))
                T.buffer_store(state, row_max, [0])
                T.buffer_store(state, T.float32(0), [1])
                for i in range(4):
                    T.buffer_store(total, T.float32(0), [i])
                for other in range(plan.split):
                    ptx.power_of_two(value[0], (_float(facts[2 * other]) - state[0]) * T.float32(scale))
                    T.buffer_store(state, state[1] + _float(facts[2 * other + 1]) * value[0], [1])
                    for i in range(4):
                        T.buffer_store(total, total[i] + _float(part[4 * other + i]) * value[0], [i])
                T.buffer_store(value, average(state[1], problem.nan_to_zero), [0])
                for i in range(4):
                    T.buffer_store(total, averaged(total[i], value[0], problem.nan_to_zero), [i])
                if result.is_contiguous("k") and width % 4 == 0 and result.alignment("k", 8) == 8:
                    pairs = local(2, "uint32")
                    for pair in range(2):
                        ptx.pack_pair(pairs[pair], total[2 * pair], total[2 * pair + 1], self.tensors.query.nominal)
                    place = {**at, "row": T.Cast("int64", own), "k": T.Cast("int64", column)}
                    ptx.store_global(T.address_of(result.data[result.address(place)]), [pairs[0], pairs[1]])
                else:
                    for i in range(4):
                        with when(column + i < width):
                            store.one(own, column + i, total[i])


def _bits(value: Expr) -> Expr:
    return tirx.reinterpret("uint32", value)


def _float(value: Expr) -> Expr:
    return tirx.reinterpret("float32", value)
