"""Epilogue of accumulator fragments of tensor cores, and coalesced stores of the result.

A lane has pairs of neighbouring accumulators in rows of 8 matrices, so that direct stores would use an eighth of each
memory transaction. So a warp stages 16 rows of the result in shared memory, some columns at a time, and stores whole
rows. With swapped operands fragments are transposed: a warpgroup has 64 columns, with the result's rows across its
registers. It stages some rows at a time, and stores 64 neighbours of each.

If the epilogue reads only operands along rows or columns (a bias), results are staged, which have half the bytes of
accumulators. If it reads operands as large as the result, accumulators are staged, and the epilogue is computed on
whole rows, where loads of operands are coalesced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....encoding.packed_layout import CHUNK_BYTES
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import ALL_LANES, WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.expression import emit
from ..core.launch import SharedMemory, local, unrolled
from ..core.operand import GpuOperand
from .epilogue import EpilogueWriter
from .register_tile import WARP_ROWS, reinterpreted

SWAPPED_COLUMNS = 64  # columns of the result in a warpgroup's fragments with swapped operands: the M dimension of wgmma
STAGING_PAD = 32  # maximum padding of staged rows in bytes
_MAX_ROW_VECTOR = 8  # neighbouring elements that a lane computes together in whole rows
_Pair = list[tuple[Expr, list[Expr]]]  # accumulators of two neighbours, each with its epilogue operands


@dataclass(frozen=True)
class Staging:
    """Shared memory in which a warp, or a warpgroup if operands are swapped, transposes fragments to rows."""

    shared: SharedMemory
    offset: Expr  # offset of the memory in bytes
    # Rows and columns of the result that are staged at a time.
    rows: int
    columns: int
    element: int  # bytes of a staged element
    swap_ab: bool  # whether fragments are transposed

    @property
    def pitch(self) -> int:
        """Bytes between rows: padded, so that fragments are stored without bank conflicts."""
        pad = STAGING_PAD if self.element == 4 and not self.swap_ab else STAGING_PAD // 2
        return self.columns * self.element + pad

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.rows * self.pitch

    @property
    def threads(self) -> int:
        """Threads that store the rows together."""
        return WARPGROUP if self.swap_ab else WARP

    def lane_of(self, thread: Expr) -> tuple[Expr, Expr]:
        """Warp among those of the staging memory, and lane, of a thread."""
        return (thread // WARP, thread % WARP) if self.swap_ab else (0, thread)

    def pair(self, matrix: Expr, half: int, thread: Expr) -> list[Expr]:
        """Pointers to a lane's pair of neighbours in its first or second line of 8 in a matrix."""
        warp, lane = self.lane_of(thread)
        along = [matrix * 8 + lane % 4 * 2 + c for c in range(2)]
        line = warp * WARP_ROWS + (lane // 4 + 8 * half)
        return [self._at(each, line) if self.swap_ab else self._at(line, each) for each in along]

    def matrices(self, matrix: Expr, thread: Expr) -> Expr:
        """Pointer that a lane gives ``stmatrix`` to store both lines of one or two matrices, from `matrix` on."""
        warp, lane = self.lane_of(thread)
        if self.swap_ab:
            return self._at(matrix * 8 + (lane // 16 * 8 + lane % 8), warp * WARP_ROWS + lane // 8 % 2 * 8)
        return self._at(lane % WARP_ROWS, (matrix + lane // WARP_ROWS) * 8)

    def _at(self, row: Expr, column: Expr) -> Expr:
        return self.shared.at(self.offset + row * self.pitch + column * self.element)


class FragmentStore:
    """Writer of the epilogue and the stores of a product's fragments.

    `open` and `plan` belong to the function's body, before the launch; `fetch` and `emit` to the launch.
    """

    def __init__(self, writer: EpilogueWriter, gpu: GpuTarget) -> None:
        self.writer, self._result = writer, writer.result
        self._stores_matrices = gpu.capability >= 90
        self._fetched: list[Any] | None = None
        self._column_registers: dict[int, Any] = {}
        self._line_operands: list[dict[int, list[Expr]]] = []

    def open(self, m: Expr, n: Expr, in_rows: bool) -> None:
        """Declare the elements of operands and result.

        `m`, `n`: extents of the result. `in_rows`: whether the epilogue is computed on whole rows.
        """
        self._extents, self._in_rows = {"m": m, "n": n}, in_rows
        result, self._views = self._result, () if in_rows else self.writer.views
        if in_rows:
            for view in self.writer.operands:
                view.open_for_gpu()
            self._element, self._width = 4, 4 * min(result.vector("n"), _MAX_ROW_VECTOR)
            return
        for view in self._views:
            # 16-bit floats are loaded as bits, as TVM cannot bind variables to loads of bfloat16.
            if view.nominal in HALF_TYPES:
                view.open(raw=True)
            else:
                view.open_for_gpu()
        result.open(raw=True)
        self._element, self._width = bytes_of(result.nominal), _store_width(result, n)

    def plan(
        self,
        shared: SharedMemory,
        # Rows and columns of a tile. If they divide the result, stores need no predicates.
        tile: tuple[int, int],
        teams: int,  # warps that store 16 rows each; warpgroups if `swap_ab`
        # Columns that a warp stages at a time, or rows of a warpgroup; they divide those of `emit`.
        epilogue_columns: int,
        swap_ab: bool = False,  # whether operands are swapped
        is_repeated: bool = True,  # whether the block calls `emit` more than once
    ) -> None:
        """Reserve shared memory."""
        sizes = zip(self._extents.values(), tile, strict=True)
        self._divides_result = all(isinstance(size, int) and size % extent == 0 for size, extent in sizes)
        rows, columns = (epilogue_columns, SWAPPED_COLUMNS) if swap_ab else (WARP_ROWS, epilogue_columns)
        staging = Staging(shared, 0, rows, columns, self._element, swap_ab)
        self._staging = replace(staging, offset=shared.reserve(teams * staging.size))
        # Pairs of accumulators are neighbours along one dimension, the two lines of a lane along the other one.
        self._along, self._across = ("m", "n") if swap_ab else ("n", "m")
        self._is_repeated = is_repeated

    # -- operands

    def fetch(self, extents: tuple[int, int], at: Coordinates, first: tuple[Expr, Expr], thread: Expr) -> None:
        """Load operands ahead for `emit` of the same tile, with the same parameters.

        The loads overlap with the main loop. Operands along columns, such as a bias, are loaded completely; operands as
        large as the result only for what is staged first.
        """
        if self._in_rows:
            self._fetched = self._fetch_rows(at, first, thread)
            return
        if self._staging.swap_ab:
            origins = [self._origin(first, block, 0) for block in range(extents[0])]
            self._line_operands = [self._load_lines(at, origin, thread) for origin in origins]
            return
        self._column_registers = {}
        loads = -(-extents[1] // (2 * WARP))
        for number, view in enumerate(self._views):
            if not self._has_pairs(view):
                continue
            words = bytes_of(view.nominal) // 2
            bits = local(loads * words, "uint32")
            # Pair p is in lane p % 32.
            for load in range(loads):
                column = first[1] + T.Cast("int64", (thread + load * WARP) * 2)
                self._load_bits([bits[load * words + i] for i in range(words)], view, at, column)
            self._column_registers[number] = bits

    def _load_lines(self, at: Coordinates, origin: tuple[Expr, Expr], thread: Expr) -> dict[int, list[Expr]]:
        """Load operands that are equal for the accumulators of a pair, for both lines of a lane."""
        warp, lane = self._staging.lane_of(thread)
        first = origin[1] if self._staging.swap_ab else origin[0]
        lines = [T.bind(first + T.Cast("int64", warp * WARP_ROWS + lane // 4 + 8 * h)) for h in range(2)]
        operands = {}
        for number, view in enumerate(self._views):
            if not view.runs_along(self._along):
                different = lines if view.runs_along(self._across) else lines[:1]
                values = [T.bind(self._load(view, {**at, self._across: line})) for line in different]
                operands[number] = [values[0], values[-1]]
        return operands

    def _load(self, view: GpuOperand, at: Coordinates) -> Expr:
        """Load an element, with row and column clamped to the result."""
        clamped = {name: T.min(at[name], int64(extent - 1)) for name, extent in self._extents.items() if name in at}
        return _value_of(view, view.data[view.address({**at, **clamped})])

    def _has_pairs(self, view: GpuOperand) -> bool:
        """Return whether two neighbouring columns of an operand along columns are one aligned access."""
        size, n = bytes_of(view.nominal), self._extents["n"]
        is_aligned = size in (2, 4) and isinstance(n, int) and n % 2 == 0
        return is_aligned and view.is_contiguous("n") and view.alignment("n", 2 * size) == 2 * size

    def _load_bits(self, words: list[Expr], view: GpuOperand, at: Coordinates, column: Expr) -> None:
        """Load the bits of a pair of columns, clamped to the result."""
        clamped = {**at, "m": int64(0), "n": T.min(column, int64(self._extents["n"] - 2))}
        # Not as a constant: the result may overwrite an operand in place.
        ptx.load_global(words, T.address_of(view.data[view.address(clamped)]), is_constant=False)

    def _load_pair(self, number: int, at: Coordinates, position: Expr, pair: Expr, lane: Expr) -> list[Expr]:
        """Load elements of operand `number` for two neighbours along `_along`, the first even.

        `pair`: number of pairs of the tile before that of the first lane.
        """
        view = self._views[number]
        if self._staging.swap_ab or not self._has_pairs(view):
            return [T.bind(self._load(view, {**at, self._along: position + c})) for c in range(2)]
        size = bytes_of(view.nominal)
        bits = local(size // 2, "uint32")
        words = [bits[i] for i in range(size // 2)]
        if number in self._column_registers:
            full_mask, source = T.uint32(ALL_LANES), pair % WARP + lane % 4
            for i in range(len(words)):
                word_of_lane = self._column_registers[number][pair // WARP * len(words) + i]
                T.buffer_store(bits, T.tvm_warp_shuffle(full_mask, word_of_lane, source, WARP, WARP), [i])
        else:
            self._load_bits(words, view, at, position)
        if size == 4:
            return [T.bind(reinterpreted(word, view.nominal)) for word in words]
        low, high = T.Cast("uint16", words[0]), T.Cast("uint16", T.shift_right(words[0], T.uint32(16)))
        return [T.bind(_value_of(view, half)) for half in (low, high)]

    # -- fragments

    def emit(
        self,
        sums: Any,  # accumulators: for each block half as many registers as its extent
        # 1 and the number of columns; if operands are swapped, blocks of 64 columns and the number of rows.
        extents: tuple[int, int],
        at: Coordinates,  # coordinates of the batch
        first: tuple[Expr, Expr],  # row and column of the first element, int64
        # team, thread: index of the warp or warpgroup, and of the thread in it.
        team: Expr,
        thread: Expr,
    ) -> None:
        """Store the rows of a warp, or the columns of a warpgroup if operands are swapped."""
        swap_ab, (blocks, extent) = self._staging.swap_ab, extents
        staging = replace(self._staging, offset=T.bind(self._staging.offset + team * self._staging.size))
        fetched, self._fetched = self._fetched, None
        step = staging.rows if swap_ab else staging.columns
        parts = [(block, skip) for block in range(blocks) for skip in range(0, extent, step)]
        lines = self._line_operands if swap_ab else [self._load_lines(at, first, thread)]
        for block, skip in parts:
            origin = self._origin(first, block, skip)
            if self._in_rows and (fetched is None or block or skip):
                fetched = self._fetch_rows(at, origin, thread)
            operands = lines[block] if self._views else {}
            self._stage(staging, sums, (block * extent + skip) // 2, at, origin, operands, thread)
            self._barrier(team)
            self._store_rows(staging, at, origin, thread, fetched)
            if self._is_repeated or (block, skip) != parts[-1]:
                self._barrier(team)

    def _origin(self, first: tuple[Expr, Expr], block: int, skip: int) -> tuple[Expr, Expr]:
        """First row and column of a part of the tile."""
        if self._staging.swap_ab:
            return first[0] + skip, first[1] + block * SWAPPED_COLUMNS
        return first[0], first[1] + skip

    def _barrier(self, team: Expr) -> None:
        if self._staging.swap_ab:
            ptx.named_barrier(team + 1, WARPGROUP)
        else:
            ptx.warp_barrier()

    def _stage(
        self,
        staging: Staging,
        sums: Any,
        register: int,
        at: Coordinates,
        origin: tuple[Expr, Expr],
        lines: dict[int, list[Expr]],
        thread: Expr,
    ) -> None:
        """Stage results, or accumulators if the epilogue works on whole rows, from a register on."""
        first, matrices = (origin[0], staging.rows // 8) if staging.swap_ab else (origin[1], staging.columns // 8)
        lane = staging.lane_of(thread)[1]

        def pairs(matrix: Expr) -> Iterator[_Pair]:
            position = T.bind(first + T.Cast("int64", matrix * 8 + lane % 4 * 2))
            return self._pairs(sums, register + matrix * 4, at, position, lines, lane)

        if not (self._stores_matrices and self._is_packed):
            with unrolled(matrices) as matrix:
                for h, pair in enumerate(pairs(matrix)):
                    self._stage_pair(staging.pair(matrix, h, thread), pair)
            return
        # One stmatrix stores two matrices.
        for begin, count, each in ((0, matrices // 2, 2), (matrices // 2 * 2, matrices % 2, 1)):
            if count:
                with unrolled(count) as group:
                    numbers = [begin + group * each + i for i in range(each)]
                    packed = [self._packed(pair) for number in numbers for pair in pairs(number)]
                    ptx.store_matrices(staging.matrices(numbers[0], thread), packed, staging.swap_ab)

    def _pairs(
        self,
        sums: Any,
        register: Expr,
        at: Coordinates,
        position: Expr,
        lines: dict[int, list[Expr]],
        lane: Expr,
    ) -> Iterator[_Pair]:
        """Accumulators of two neighbours with their epilogue operands, for each line of a lane."""
        operands = []
        for number, view in enumerate(self._views):
            if view.runs_along(self._along):
                operands.append([self._load_pair(number, at, position, register, lane)] * 2)
            else:
                operands.append([[value] * 2 for value in lines[number]])
        for h in range(2):
            totals = [self._sum(sums[register + 2 * h + c]) for c in range(2)]
            yield [(total, [by_line[h][c] for by_line in operands]) for c, total in enumerate(totals)]

    def _stage_pair(self, targets: list[Expr], pair: _Pair) -> None:
        """Store a pair: with one access if the targets are neighbours."""
        if self._is_packed:
            ptx.store_shared(targets[0], [self._packed(pair)])
            return
        results = [total for total, _ in pair] if self._in_rows else self._results(pair, self.writer.expression)
        words = [reinterpreted(value, f"uint{8 * self._element}") for value in results]
        if self._staging.swap_ab:
            for target, word in zip(targets, words, strict=True):
                ptx.store_shared(target, [word], f"u{8 * self._element}")
        elif self._element == 4:
            ptx.store_shared(targets[0], words)
        else:
            low, high = (T.Cast("uint16", word) for word in words)
            ptx.store_shared(targets[0], [T.bitwise_or(low, T.shift_left(high, T.uint16(8)))], "u16")

    # -- values

    def _sum(self, register: Expr) -> Expr:
        """Accumulator from its bits."""
        return reinterpreted(register, "int32" if self.writer.acc_dtype == "int32" else "float32")

    @property
    def _is_packed(self) -> bool:
        """True if a staged pair of results is one register."""
        return not self._in_rows and self._element == 2

    def _packed(self, pair: _Pair) -> Expr:
        """Two 16-bit results in one register."""
        dtype, expression = self._result.nominal, self.writer.expression
        if dtype in HALF_TYPES:
            dtypes = self._dtypes
            # The final cast is fused into the packing conversion.
            if expression.term.op == "cast" and expression.term.params[0] == dtype:
                expression = Expression(expression.term.args[0])
            elif expression.dtype(dtypes) == dtype:
                expression = Expression(Term("cast", (expression.term,), ("float32",)))
            # So is a final relu.
            inner = Expression(expression.term.args[0]) if expression.term.op == "relu" else expression
            is_clamped = inner is not expression and inner.dtype(dtypes) == "float32"
            results = self._results(pair, inner if is_clamped else expression, is_rounded=False)
            if all(str(value.ty.dtype) == "float32" for value in results):
                register = local(1, "uint32")
                ptx.pack_pair(register[0], results[0], results[1], dtype, is_clamped)
                return register[0]
            results = [T.Cast(dtype, value) for value in results]
        else:
            results = self._results(pair, expression)
        low, high = (T.Cast("uint32", reinterpreted(value, "uint16")) for value in results)
        return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))

    @property
    def _dtypes(self) -> list[str]:
        """Element types of the expression's operands."""
        return [self.writer.acc_dtype, *(view.nominal for view in self._views)]

    def _results(self, pair: _Pair, expression: Expression, is_rounded: bool = True) -> list[Expr]:
        """Evaluate an expression for a pair, rounded to the result's type if `is_rounded`."""
        dtype = self._result.nominal
        results = [emit(expression, [total, *operands], self._dtypes, dtype) for total, operands in pair]
        if is_rounded and (str(results[0].ty.dtype) != dtype or dtype == "bool"):
            results = [T.Cast("uint8" if dtype == "bool" else dtype, value) for value in results]
        return results

    # -- rows

    @property
    def _run_bytes(self) -> int:
        """Bytes of a staged row that a thread stores at a time."""
        width = self._width
        while self._staging.columns * self._element % width:
            width //= 2
        return width

    @property
    def _runs(self) -> tuple[int, int]:
        """Runs of a row, and of a thread."""
        staging = self._staging
        per_row = staging.columns * self._element // self._run_bytes
        return per_row, -(-staging.rows * per_row // staging.threads)

    def _locate_run(
        self, number: Expr, at: Coordinates, origin: tuple[Expr, Expr]
    ) -> tuple[Expr, Expr, Coordinates, Expr]:
        """Row and index of a run of staged bytes, coordinates of its first element, and its predicate."""
        per_row, rows = self._runs[0], self._staging.rows
        row, chunk = number // per_row, number % per_row
        at_row = T.bind(origin[0] + T.Cast("int64", row))
        at_column = T.bind(origin[1] + T.Cast("int64", chunk * (self._run_bytes // self._element)))
        conditions = [] if self._divides_result else [at_row < self._extents["m"], at_column < self._extents["n"]]
        if rows * per_row % self._staging.threads:
            conditions.append(number < rows * per_row)
        return row, chunk, {**at, "m": at_row, "n": at_column}, tirx.all(*conditions) if conditions else True

    def _fetch_rows(self, at: Coordinates, origin: tuple[Expr, Expr], thread: Expr) -> list[Any]:
        """Load epilogue operands ahead for the runs that `_store_rows` stores; return their registers."""
        runs, elements = self._runs[1], self._run_bytes // self._element
        registers = self.writer.registers(runs, elements)
        with unrolled(runs) as i:
            _, _, position, exists = self._locate_run(thread + i * self._staging.threads, at, origin)
            with when(exists):
                self.writer.load(registers, i, position, elements)
        return registers

    def _store_rows(
        self, staging: Staging, at: Coordinates, origin: tuple[Expr, Expr], thread: Expr, fetched: list[Any] | None
    ) -> None:
        """Store staged rows to the result, coalesced."""
        width = self._run_bytes
        words = max(1, width // 4)
        registers = local(words, "uint32" if width >= 4 else f"uint{8 * width}")
        with unrolled(self._runs[1]) as i:
            row, chunk, position, exists = self._locate_run(thread + i * staging.threads, at, origin)
            source = staging.offset + row * staging.pitch + chunk * width
            with when(exists):
                loaded = [registers[w] for w in range(words)]
                for w in range(0, words, 4):
                    # A load has at most 16 bytes.
                    ptx.load_shared(loaded[w : w + 4], staging.shared.at(source + 4 * w), f"u{min(32, 8 * width)}")
                if fetched is not None:
                    self.writer.write([partial(self._sum, value) for value in loaded], position, loaded=(fetched, i))
                elif width >= 4:
                    ptx.store_global(T.address_of(self._result.data[self._result.address(position)]), loaded)
                else:
                    T.buffer_store(self._result.data, loaded[0], [self._result.address(position)])


def _value_of(view: GpuOperand, loaded: Expr) -> Expr:
    """Value of a load; bfloat16 is converted to float32."""
    if view.nominal == "bfloat16":
        return tirx.reinterpret("float32", T.shift_left(T.Cast("uint32", loaded), T.uint32(16)))
    return view.typed(loaded)


def _store_width(result: GpuOperand, n: Expr) -> int:
    """Bytes of a store: more than one element if rows are contiguous and aligned."""
    element = bytes_of(result.nominal)
    if result.index_map[-1] != "n" or not result.layout.is_identity or not isinstance(n, int):
        return element
    width = result.alignment("n", CHUNK_BYTES)
    while width > element and n * element % width:
        width //= 2
    return width
