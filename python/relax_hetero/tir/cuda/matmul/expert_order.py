"""Pairs of tokens and experts sorted by expert on the device, for products of many pairs (`wgmma_experts`).

One block counts the pairs of each expert, adds up the counts, and writes each pair to the next place of its expert.
Which of an expert's pairs comes first depends on the order of atomic additions, on which no result depends: each pair
has a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import ExpertOrderProblem
from ....target.gpu_target import ALL_LANES, MAX_BLOCK_THREADS, WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import SharedMemory, enable_pdl, launch, local, unrolled
from ..core.operand import GpuOperand
from ..tile.register_tile import add_lanes_before

_THREADS = MAX_BLOCK_THREADS
_LOADS_IN_FLIGHT = 8  # loads of a thread


def expert_order_kernel(problem: ExpertOrderProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that sorts pairs by expert, one launch; `ExpertOrderProblem` documents its parameters."""
    function = Function("expert_order", registers="local")
    with function:
        index = GpuOperand(function, "index", problem.index)
        order = GpuOperand(function, "order", problem.result)
        with function.body():
            index.open()
            order.open()
            _Kernel(problem, index, order).emit(gpu)
    return enable_pdl(function.result) if gpu.overlaps_launches else function.result


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, problem: ExpertOrderProblem, index: GpuOperand, order: GpuOperand) -> None:
        self.problem, self.index, self.order = problem, index, order

    def emit(self, gpu: GpuTarget) -> None:
        """Write the launch."""
        self.shared = SharedMemory()
        # Counts of experts, then their next places in the sorted order.
        self.places_at = self.shared.reserve(4 * self.problem.experts)
        with launch(1, _THREADS) as place:
            self.thread = place.thread
            self.shared.open()
            with T.serial(ceil_div(self.problem.experts, _THREADS)) as i:
                expert = T.bind(i * _THREADS + self.thread)
                with when(expert < self.problem.experts):
                    ptx.store_shared(self._place(expert), [T.uint32(0)])
            if gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            ptx.block_barrier()
            self._each_pair(lambda _, expert: ptx.add_shared(self._place(expert), T.uint32(1)))
            ptx.block_barrier()
            with when(self.thread < WARP):
                self._write_tiles()
            ptx.block_barrier()
            register = local(1, "uint32")

            def write(pair: Expr, expert: Expr) -> None:
                ptx.fetch_add_shared(register[0], self._place(expert), T.uint32(1))
                self._store(self.problem.pairs_at + T.Cast("int32", register[0]), pair)

            self._each_pair(write)

    def _place(self, expert: Expr) -> Expr:
        return self.shared.at(self.places_at + expert * 4)

    def _store(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self.order.data, value, [index])

    def _each_pair(self, body: Callable[[Expr, Expr], None]) -> None:
        """Write `body` for each pair of a thread, given the pair and its expert, with several loads in flight."""
        pairs, experts = self.problem.pairs, local(_LOADS_IN_FLIGHT, "int32")
        step = _THREADS * _LOADS_IN_FLIGHT

        def pair_of(batch: Expr, i: Expr) -> Expr:
            return T.bind(batch * step + i * _THREADS + self.thread)

        with T.serial(tirx.const(ceil_div(pairs, step), "int32")) as batch:
            with unrolled(_LOADS_IN_FLIGHT) as i:
                number = T.Cast("int32", self.index.data[T.min(pair_of(batch, i), pairs - 1)])
                T.buffer_store(experts, T.max(T.min(number, self.problem.experts - 1), 0), [i])
            with unrolled(_LOADS_IN_FLIGHT) as i:
                pair = pair_of(batch, i)
                with when(pair < pairs):
                    body(pair, experts[i])

    def _write_tiles(self) -> None:
        """Write the tiles, and the first place of each expert, by a warp whose lanes have an expert each."""
        problem, lane = self.problem, self.thread
        tile, word = problem.tile, local(1, "uint32")
        ends = [local(1, "int32") for _ in range(2)]  # of pairs and tiles, up to the lane's
        begins = local(2, "int32")
        for i in range(2):
            T.buffer_store(begins, T.int32(0), [i])
        for first in range(0, problem.experts, WARP):
            expert = T.bind(first + lane)
            ptx.load_shared([word[0]], self._place(T.min(expert, problem.experts - 1)))
            count = T.bind(T.Select(expert < problem.experts, T.Cast("int32", word[0]), 0))
            tiles = T.bind(T.truncdiv(count + (tile - 1), tile))
            starts = []
            for i, (end, value) in enumerate(zip(ends, (count, tiles), strict=True)):
                T.buffer_store(end, value, [0])
                add_lanes_before(end, lane)
                starts.append(T.bind(begins[i] + end[0] - value))
                last = T.tvm_warp_shuffle(T.uint32(ALL_LANES), end[0], WARP - 1, WARP, WARP)
                T.buffer_store(begins, begins[i] + last, [i])
            ptx.warp_barrier()
            with when(expert < problem.experts):
                ptx.store_shared(self._place(expert), [T.Cast("uint32", starts[0])])
            with T.serial(tiles) as number:
                record = T.bind(problem.TILES_AT + (starts[1] + number) * problem.TILE_WORDS)
                skip = number * tile
                for i, value in enumerate((expert, starts[0] + skip, T.min(count - skip, tile))):
                    self._store(record + i, value)
        with when(tirx.EQ(lane, 0)):
            self._store(tirx.const(0, "int32"), begins[1])
