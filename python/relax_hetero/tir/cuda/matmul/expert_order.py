"""Pairs of tokens and experts sorted by expert on the device, for products of many pairs (`wgmma_experts`).

One block counts the pairs of each expert, adds up the counts, and writes each pair to the next place of its expert.
Tiles of an expert are neighbours, so that blocks that run at the same time read its weights from memory once. Which of
its pairs comes first depends on the order of atomic additions, on which no result depends: each pair has a row of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
        # Numbers of pairs of each expert, and its next place in the sorted order.
        self.counts_at, self.places_at = (self.shared.reserve(4 * self.problem.experts) for _ in range(2))
        with launch(1, _THREADS) as place:
            self.thread = place.thread
            self.shared.open()
            with T.serial(ceil_div(self.problem.experts, _THREADS)) as i:
                expert = T.bind(i * _THREADS + self.thread)
                with when(expert < self.problem.experts):
                    ptx.store_shared(self._word(self.counts_at, expert), [T.uint32(0)])
            if gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            ptx.block_barrier()
            self._each_pair(lambda _, expert: ptx.add_shared(self._word(self.counts_at, expert), T.uint32(1)))
            ptx.block_barrier()
            with when(self.thread < WARP):
                self._write_tiles()
            ptx.block_barrier()
            register = local(1, "uint32")

            def write(pair: Expr, expert: Expr) -> None:
                ptx.fetch_add_shared(register[0], self._word(self.places_at, expert), T.uint32(1))
                self._store(self.problem.pairs_at + T.Cast("int32", register[0]), pair)

            self._each_pair(write)

    def _word(self, begin: int, expert: Expr) -> Expr:
        return self.shared.at(begin + expert * 4)

    def _store(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self.order.data, value, [index])

    def _each_pair(self, body: Callable[[Expr, Expr], None]) -> None:
        """Write `body` for each pair of a thread, given the pair and its expert, with several loads in flight.

        Pairs of negative numbers are left out.
        """
        pairs, experts = self.problem.pairs, local(_LOADS_IN_FLIGHT, "int32")
        step = _THREADS * _LOADS_IN_FLIGHT

        def pair_of(batch: Expr, i: Expr) -> Expr:
            return T.bind(batch * step + i * _THREADS + self.thread)

        with T.serial(tirx.const(ceil_div(pairs, step), "int32")) as batch:
            with unrolled(_LOADS_IN_FLIGHT) as i:
                number = T.Cast("int32", self.index.data[T.min(pair_of(batch, i), pairs - 1)])
                T.buffer_store(experts, T.min(number, self.problem.experts - 1), [i])
            with unrolled(_LOADS_IN_FLIGHT) as i:
                pair = pair_of(batch, i)
                with when(tirx.all(pair < pairs, experts[i] >= 0)):
                    body(pair, T.max(experts[i], 0))  # lanes without a pair compute the address, too

    def _write_tiles(self) -> None:
        """Write the first place of each expert, and the tiles, by a warp whose lanes have an expert each."""
        problem, tile = self.problem, self.problem.tile
        end, pairs, tiles = (local(1, "int32") for _ in range(3))

        def count_before(value: Expr, begin: Any) -> Expr:
            """Sum of the values of experts before the lane's; `begin` is that before the warp's, and advanced."""
            T.buffer_store(end, value, [0])
            add_lanes_before(end, self.thread)
            before = T.bind(begin[0] + end[0] - value)
            last = T.tvm_warp_shuffle(T.uint32(ALL_LANES), end[0], WARP - 1, WARP, WARP)
            T.buffer_store(begin, begin[0] + last, [0])
            return before

        for begin in (pairs, tiles):
            T.buffer_store(begin, T.int32(0), [0])
        for expert, count in self._experts_of_lane():
            place = count_before(count, pairs)
            with when(expert < problem.experts):
                ptx.store_shared(self._word(self.places_at, expert), [T.Cast("uint32", place)])
            number = T.bind(T.truncdiv(count + (tile - 1), tile))
            record = T.bind(problem.TILES_AT + count_before(number, tiles) * problem.TILE_WORDS)
            with T.serial(number) as i:
                skip = T.bind(i * tile)
                for word, value in enumerate((expert, place + skip, T.min(count - skip, tile))):
                    self._store(record + i * problem.TILE_WORDS + word, value)
        with when(tirx.EQ(self.thread, 0)):
            self._store(tirx.const(0, "int32"), tiles[0])

    def _experts_of_lane(self) -> Iterator[tuple[Expr, Expr]]:
        """The experts of the lane, and their numbers of pairs; 0 for numbers beyond the last."""
        for first in range(0, self.problem.experts, WARP):
            expert = T.bind(first + self.thread)
            count = self._load(self.counts_at, expert)
            yield expert, T.bind(T.Select(expert < self.problem.experts, count, 0))

    def _load(self, begin: int, expert: Expr) -> Expr:
        """An expert's word in shared memory, int32; of the last expert for numbers beyond."""
        word = local(1, "uint32")
        ptx.load_shared([word[0]], self._word(begin, T.min(expert, self.problem.experts - 1)))
        return T.bind(T.Cast("int32", word[0]))
