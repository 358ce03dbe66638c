"""Paged attention without tensor cores, for pages of floats: one token, several tokens, or a chunk of a sequence.

A block has a query of one head, and a thread for each token of a page. In each page, threads score their token, combine
the maximum of the scores, and exchange probabilities in shared memory. For the values, a thread has eight elements and
every n-th token: neighbouring threads read neighbouring tokens, 16 bytes of each. Their sums are added at the end.

New keys and values are in their pages already (`page_append`).
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import VECTOR_BYTES, WARP, GpuTarget
from ...attention.attention_tile import LOWEST
from ...core.builder import Expr, ceil_div, lane_indices, when
from ...math.casts import cast
from ..core.dialect import shared_scope
from ..core.expression import emit
from ..core.launch import SharedMemory, local, unrolled
from ..matmul.simt_tiles import barrier
from ..tile.register_tile import add, reduce_lanes
from .attention_plan import AttentionPlan
from .attention_tensors import CHUNK, PagedTensors, kernel_of, require_supported
from .head_vector import HeadVector, from_page

THREADS = PAGE
_WARPS = THREADS // WARP


def simt_paged_unsupported_reason(problem: CachedAttentionProblem) -> str:
    """Reason why the kernel does not support a problem; empty if it does."""
    dtype = problem.operands[0].dtype
    if problem.page_type not in ("float32", *HALF_TYPES) or dtype not in ("float32", *HALF_TYPES):
        return f"pages of {problem.page_type} and rows of {dtype}, expected pages of floats"
    if problem.size % CHUNK or problem.value_size % CHUNK:
        return f"heads of {problem.size} and values of {problem.value_size}, expected multiples of {CHUNK}"
    return ""


def simt_cached_attention_kernel(problem: CachedAttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a paged attention on any GPU; `CachedAttentionProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If pages are not of floats, or heads are not a multiple of `CHUNK`.
    """
    require_supported(problem, gpu, simt_paged_unsupported_reason(problem))
    plan = AttentionPlan(1, PAGE, heads_per_tile=1)
    return kernel_of("paged_attention", problem, plan, gpu, lambda tensors: _Kernel(tensors).emit())


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: PagedTensors) -> None:
        self.tensors, problem = tensors, tensors.problem
        self.size, self.value_size, self.page_type = problem.size, problem.value_size, problem.page_type
        chunks = self.value_size // CHUNK
        self.chunks_per_thread = ceil_div(chunks, THREADS)
        # Threads with the same chunk of values and other tokens.
        self.splits = max(1, THREADS >> (chunks - 1).bit_length())

    def emit(self) -> None:
        """Write the launch."""
        tensors = self.tensors
        with tensors.launch(THREADS, SharedMemory()) as place:
            self.thread = place.thread
            decodes = tensors.problem.is_decode
            self.row = tensors.at["b"] if decodes else T.bind(T.Cast("int64", tensors.row))
            self.head = tensors.at["group"]
            sequence, position = T.bind(tensors.sequences[self.row]), T.bind(tensors.positions[self.row])
            self._start()
            with when(sequence >= 0):
                self._load_query()
                window = tensors.problem.window
                first = T.bind(T.max(position - (window - 1), 0)) if window else T.int32(0)
                begin = T.bind(tirx.floordiv(first, PAGE))
                with T.serial(tirx.floordiv(position, PAGE) - begin + 1) as number:
                    index = T.bind(begin + number)
                    page = T.bind(tensors.page_of(sequence, index))
                    with when(page >= 0):
                        self._attend(page, index * PAGE, first, position)
            self._store()

    def _start(self) -> None:
        """Allocate shared memory and registers; a sink is a score without a value."""
        shared = shared_scope()
        self.query = T.alloc_buffer((self.size,), "float32", scope=shared)
        self.exchanged = T.alloc_buffer((_WARPS,), "float32", scope=shared)
        self.probabilities = T.alloc_buffer((PAGE,), "float32", scope=shared)
        self.partial = T.alloc_buffer((THREADS * self.chunks_per_thread * CHUNK,), "float32", scope=shared)
        self.score, self.row_max, self.row_sum, self.new_max = (local(1, "float32") for _ in range(4))
        self.sums = local(self.chunks_per_thread * CHUNK, "float32")
        self.loaded = local(CHUNK, "uint32" if self.page_type == "float32" else "uint16")
        sinks = self.tensors.problem.operand_index("sinks") is not None
        T.buffer_store(self.row_max, self.tensors.sinks[self.head] if sinks else T.float32(-math.inf), [0])
        T.buffer_store(self.row_sum, T.Select(self.thread == 0, T.float32(float(sinks)), T.float32(0)), [0])
        with unrolled(self.chunks_per_thread * CHUNK) as i:
            T.buffer_store(self.sums, T.float32(0), [i])

    def _load_query(self) -> None:
        """Store the query, normalized and rotated, to shared memory; every warp computes it."""
        vector = HeadVector(self.tensors, T.bind(tirx.floormod(self.thread, WARP)))
        vector.load(self.row, self.head, "query")

        def store(element: Expr, value: Expr) -> None:
            with when(self.thread < WARP):
                T.buffer_store(self.query, value, [element])

        vector.finish("query", store, in_float32=True)
        barrier()

    def _load(self, begin: Expr) -> None:
        """Load eight neighbouring elements of a page."""
        lanes = min(CHUNK, VECTOR_BYTES // bytes_of(self.page_type))
        for part in range(0, CHUNK, lanes):
            value = self.tensors.pages[lane_indices(begin + part, lanes)]
            T.buffer_store(self.loaded, value, [lane_indices(tirx.const(part, "int32"), lanes)])

    def _attend(self, page: Expr, first_token: Expr, first: Expr, position: Expr) -> None:
        """Attend to a page whose tokens begin at a position."""
        self._score(page, first_token, first, position)
        self._combine(T.max, self.score, self.new_max)
        # -inf - -inf is NaN.
        new_max = T.bind(T.max(T.max(self.row_max[0], self.new_max[0]), T.float32(LOWEST)))
        rescale = T.bind(T.exp(self.row_max[0] - new_max))
        probability = T.bind(T.exp(self.score[0] - new_max))
        T.buffer_store(self.row_max, new_max, [0])
        T.buffer_store(self.row_sum, self.row_sum[0] * rescale + probability, [0])
        T.buffer_store(self.probabilities, probability, [self.thread])
        barrier()
        self._add_values(page, rescale)
        barrier()

    def _score(self, page: Expr, first_token: Expr, first: Expr, position: Expr) -> None:
        begin = T.bind(self.tensors.tile(page, self.tensors.at_keys["g"], 0))
        product = local(1, "float32")
        T.buffer_store(product, T.float32(0), [0])
        with T.serial(self.size // CHUNK) as chunk:
            self._load(begin + (chunk * PAGE + self.thread) * CHUNK)
            with unrolled(CHUNK) as i:
                key = from_page(self.loaded[i], self.page_type)
                T.buffer_store(product, product[0] + self.query[chunk * CHUNK + i] * key, [0])
        token = T.bind(first_token + self.thread)
        is_visible = tirx.all(token <= position, token >= first)
        scaled = T.bind(emit(self.tensors.scores, [product[0]], ["float32"]))
        T.buffer_store(self.score, T.Select(is_visible, scaled, T.float32(-math.inf)), [0])

    def _combine(self, combine: Any, value: Any, result: Any) -> None:
        """Combine a value of all threads of the block; every thread gets the result."""
        T.buffer_store(result, value[0], [0])
        reduce_lanes(result, 0, combine)
        with when(tirx.floormod(self.thread, WARP) == 0):
            T.buffer_store(self.exchanged, result[0], [tirx.floordiv(self.thread, WARP)])
        barrier()
        T.buffer_store(result, self.exchanged[0], [0])
        for warp in range(1, _WARPS):
            T.buffer_store(result, combine(result[0], self.exchanged[warp]), [0])

    def _add_values(self, page: Expr, rescale: Expr) -> None:
        tensors, problem = self.tensors, self.tensors.problem
        kind = 0 if problem.shared_values else 1
        begin = T.bind(tensors.tile(page, tensors.at_keys["g"], kind))
        first = (self.size - self.value_size) // CHUNK
        with unrolled(self.chunks_per_thread * CHUNK) as i:
            T.buffer_store(self.sums, self.sums[i] * rescale, [i])
        for part in range(self.chunks_per_thread):
            chunk = T.bind(self._chunk(part))
            with when(chunk < self.value_size // CHUNK), T.serial(PAGE // self.splits) as step:
                token = T.bind(step * self.splits + tirx.floormod(self.thread, self.splits))
                # A page has unwritten tokens, which may be NaN, behind the last.
                with when(self.probabilities[token] > 0):
                    self._load(begin + ((first + chunk) * PAGE + token) * CHUNK)
                    with unrolled(CHUNK) as i:
                        value = from_page(self.loaded[i], self.page_type) * self.probabilities[token]
                        T.buffer_store(self.sums, self.sums[part * CHUNK + i] + value, [part * CHUNK + i])

    def _chunk(self, part: int) -> Expr:
        return part * THREADS + tirx.floordiv(self.thread, self.splits)

    def _store(self) -> None:
        """Add the sums of threads with the same chunk, and store averages; zeros if the row has no keys."""
        result, decodes = self.tensors.result, self.tensors.problem.is_decode
        self._combine(add, self.row_sum, self.new_max)
        for part in range(self.chunks_per_thread):
            with unrolled(CHUNK) as i:
                index = ((part * THREADS) + self.thread) * CHUNK + i
                T.buffer_store(self.partial, self.sums[part * CHUNK + i], [index])
        barrier()
        total = local(1, "float32")
        with T.serial(ceil_div(self.value_size, THREADS)) as iteration:
            element = T.bind(iteration * THREADS + self.thread)
            with when(element < self.value_size):
                T.buffer_store(total, T.float32(0), [0])
                chunk = T.bind(tirx.floordiv(element, CHUNK))
                with T.serial(self.splits) as split:
                    index = (chunk * self.splits + split) * CHUNK + tirx.floormod(element, CHUNK)
                    T.buffer_store(total, total[0] + self.partial[index], [0])
                has_keys = self.new_max[0] > 0
                average = total[0] / T.Select(has_keys, self.new_max[0], T.float32(1))
                row = {"b": self.row} if decodes else {"b": T.int64(0), "m": self.row}
                at = {**row, "h": self.head, "e": T.Cast("int64", element)}
                value = cast(T.Select(has_keys, average, T.float32(0)), result.nominal)
                T.buffer_store(result.data, value, [result.address(at)])
