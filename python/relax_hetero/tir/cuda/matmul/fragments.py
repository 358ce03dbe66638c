"""Epilogue of accumulator fragments of tensor cores, and coalesced stores of the result.

A warp holds 16 rows. Lane l has, in every 8 columns, the pair ``2 * (l % 4)`` of rows ``l // 4`` and ``l // 4 + 8``;
direct stores would use an eighth of each memory transaction. So each warp stages values in its part of shared memory,
and stores whole rows.

If the epilogue reads only operands along rows or columns (a bias), results are staged, which have half the bytes of
accumulators. If it reads operands as large as the result, accumulators are staged, and the epilogue is computed on
whole rows, where loads of operands are coalesced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....encoding.packed_layout import CHUNK_BYTES
from ....encoding.problem import Epilogue
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.epilogue import EpilogueWriter
from ..core.expression import emit
from ..core.launch import SharedMemory, local, unrolled
from ..core.operand import GpuOperand
from .wgmma_tiling import STAGING_PAD

WARP_ROWS = 16


@dataclass(frozen=True)
class StoreGroup:
    """Rows that are staged together, and the threads that store them.

    Attributes
    ----------
    rows : int
    threads : int
    """

    rows: int
    threads: int


_WARP_GROUP = StoreGroup(WARP_ROWS, WARP)
_Pair = list[tuple[Expr, list[Expr]]]  # accumulators of two neighbouring columns, each with its epilogue operands
_MAX_ROW_VECTOR = 8  # neighbouring elements that a lane computes together in whole rows


class FragmentStore:
    """Writer of a product's epilogue.

    Declares parameters when it is constructed; `open` belongs to the function's body, `fetch` and `emit` to the launch.

    Parameters
    ----------
    function : Function
    init : GpuOperand, optional
        Initial values of accumulators.
    epilogue : Epilogue, optional
    acc_dtype : str
        Nominal type of accumulators.
    gpu : GpuTarget

    Attributes
    ----------
    views : list of GpuOperand
        Operands of the epilogue.
    """

    def __init__(
        self, function: Function, init: GpuOperand | None, epilogue: Epilogue | None, acc_dtype: str, gpu: GpuTarget
    ) -> None:
        self._stores_matrices = gpu.capability >= 90
        operands = epilogue.operands if epilogue else ()
        self.views = [GpuOperand(function, f"x{i + 1}", operand) for i, operand in enumerate(operands)]
        self._init = init
        self._expression = epilogue.expression if epilogue else Expression.operand(0)
        self._acc_dtype = acc_dtype
        self._rows: EpilogueWriter | None = None
        self._column_registers: dict[int, Any] = {}
        self._fetched: list[Any] | None = None
        self._divides_result = False

    def set_tile_size(self, rows: int, columns: int) -> None:
        """Set the tile size: if tiles divide the result, stores need no predicates."""
        self._divides_result = all(
            isinstance(size, int) and size % tile == 0 for size, tile in ((self._m, rows), (self._n, columns))
        )

    def open(self, result: GpuOperand, m: Expr, n: Expr, in_rows: bool) -> None:
        """Declare the elements of operands and result, in the body of the function, before the launch.

        Parameters
        ----------
        m, n : PrimExpr or int
            Extents of the result.
        in_rows : bool
            Whether the epilogue is computed on whole rows.
        """
        self._m, self._n = m, n
        if in_rows:
            self._rows = EpilogueWriter(self._expression, self._init, tuple(self.views), result, self._acc_dtype)
            for view in self._rows.operands:
                view.open_for_gpu()
            self._result, self.element, self._width = result, 4, 4 * min(result.vector("n"), _MAX_ROW_VECTOR)
            return
        for view in self.views:
            # 16-bit floats are loaded as bits, as TVM cannot bind variables to loads of bfloat16.
            if view.nominal in HALF_TYPES:
                view.open(raw=True)
            else:
                view.open_for_gpu()
        result.open(raw=True)
        self._result = result
        self.element = bytes_of(result.nominal)
        self._width = _store_width(result, n)

    def plan(self, shared: SharedMemory, warps: int, epilogue_columns: int) -> Staging:
        """Reserve shared memory in which `warps` warps stage `epilogue_columns` columns each."""
        # Rows are padded, so that the pairs of eight rows are stored without bank conflicts.
        pitch = epilogue_columns * self.element + (STAGING_PAD if self.element == 4 else STAGING_PAD // 2)
        return Staging(shared, shared.reserve(warps * WARP_ROWS * pitch), epilogue_columns, pitch)

    def fetch(self, columns: int, staging: Staging, at: Coordinates, first: tuple[Expr, Expr], lane: Expr) -> None:
        """Load operands ahead for `emit` of the same warp and tile, with the same parameters.

        The loads overlap with the main loop. Operands along columns, such as a bias, are loaded completely; operands as
        large as the result only for the columns that are staged first.
        """
        self._column_registers = {}
        if self._rows:
            self._fetched = self.fetch_rows(at, first, 0, min(columns, staging.columns), lane, _WARP_GROUP)
            return
        for number, view in enumerate(self.views):
            if not self._has_pairs(view):
                continue
            words = bytes_of(view.nominal) // 2
            bits = local(-(-columns // (2 * WARP)) * words, "uint32")
            # Pair p is in lane p % 32.
            for load in range(-(-columns // (2 * WARP))):
                column = first[1] + T.Cast("int64", (lane + load * WARP) * 2)
                self._load_bits([bits[load * words + i] for i in range(words)], view, at, column)
            self._column_registers[number] = bits

    def emit(
        self,
        sums: Any,
        columns: int,
        staging: Staging,
        at: Coordinates,
        first: tuple[Expr, Expr],
        warp: Expr,
        lane: Expr,
    ) -> None:
        """Store `columns` columns of a warp's rows.

        Parameters
        ----------
        sums : Buffer
            Accumulators, ``columns / 2`` registers.
        at : Coordinates
            Coordinates of the batch.
        first : tuple of PrimExpr
            Row and column of the warp's first element, int64.
        warp : PrimExpr
            Index of the warp's staging memory.
        """
        begin = staging.offset + warp * (WARP_ROWS * staging.pitch)
        rows = [T.bind(first[0] + T.Cast("int64", lane // 4 + 8 * h)) for h in range(2)]
        by_row = {} if self._rows else self._load_row_operands(at, rows)
        fetched, self._fetched = self._fetched, None
        for part in range(-(-columns // staging.columns)):
            count = min(staging.columns, columns - part * staging.columns)
            if self._rows and (part or fetched is None):
                fetched = self.fetch_rows(at, first, part * staging.columns, count, lane, _WARP_GROUP)
            # One stmatrix stores two matrices of 8 columns.
            matrices = 2 if self._stores_matrices and self.is_packed and count % 16 == 0 else 1
            with unrolled(count // (8 * matrices)) as group:
                packed: list[Expr] = []
                for i in range(matrices):
                    j = group * matrices + i
                    column = T.bind(first[1] + T.Cast("int64", part * staging.columns + j * 8 + lane % 4 * 2))
                    register = (part * staging.columns // 8 + j) * 4
                    if matrices == 1:
                        self._stage_pairs(sums, register, staging, begin, at, rows, column, by_row, (j, lane))
                    else:
                        pairs = self._pairs(sums, register, at, column, by_row, lane)
                        packed += [self.packed(pair) for pair in pairs]
                if packed:
                    target = begin + lane % WARP_ROWS * staging.pitch + (group * 2 + lane // WARP_ROWS) * CHUNK_BYTES
                    ptx.store_matrices(staging.shared.at(target), packed)
            ptx.warp_barrier()
            self.store_rows(staging, begin, at, first, part * staging.columns, count, lane, fetched, _WARP_GROUP)
            ptx.warp_barrier()

    def _load_row_operands(self, at: Coordinates, rows: list[Expr]) -> dict[tuple[int, int], Expr]:
        """Load the operands that do not depend on columns."""
        by_row: dict[tuple[int, int], Expr] = {}
        for number, view in enumerate(self.views):
            if view.runs_along("n"):
                continue
            for h in range(2):
                if h and not view.runs_along("m"):
                    by_row[number, h] = by_row[number, 0]
                else:
                    by_row[number, h] = T.bind(self.load(view, at, rows[h], int64(0)))
        return by_row

    def load(self, view: GpuOperand, at: Coordinates, row: Expr, column: Expr) -> Expr:
        """Load an element, with row and column clamped to the result."""
        clamped = {**at, "m": T.min(row, int64(self._m - 1)), "n": T.min(column, int64(self._n - 1))}
        return _value_of(view, view.data[view.address(clamped)])

    def _has_pairs(self, view: GpuOperand) -> bool:
        """Return whether two neighbouring columns of an operand along columns are one aligned access."""
        size = bytes_of(view.nominal)
        is_aligned = size in (2, 4) and isinstance(self._n, int) and self._n % 2 == 0
        return is_aligned and view.is_contiguous("n") and view.alignment("n", 2 * size) == 2 * size

    def _load_bits(self, words: list[Expr], view: GpuOperand, at: Coordinates, column: Expr) -> None:
        """Load the bits of a pair of columns, clamped to the result."""
        clamped = {**at, "m": int64(0), "n": T.min(column, int64(self._n - 2))}
        # Not as a constant: the result may overwrite an operand in place.
        ptx.load_global(words, T.address_of(view.data[view.address(clamped)]), is_constant=False)

    def _load_pair(self, number: int, at: Coordinates, column: Expr, pair: Expr, lane: Expr) -> list[Expr]:
        """Load elements of two neighbouring columns, the first even, of operand `number`.

        Parameters
        ----------
        pair : PrimExpr
            Number of column pairs of the tile before that of the first lane.
        """
        view = self.views[number]
        if not self._has_pairs(view):
            return [T.bind(self.load(view, at, int64(0), column + c)) for c in range(2)]
        size = bytes_of(view.nominal)
        bits = local(size // 2, "uint32")
        words = [bits[i] for i in range(size // 2)]
        if number in self._column_registers:
            full_mask, source = T.uint32(0xFFFFFFFF), pair % WARP + lane % 4
            for i in range(len(words)):
                word_of_lane = self._column_registers[number][pair // WARP * len(words) + i]
                T.buffer_store(bits, T.tvm_warp_shuffle(full_mask, word_of_lane, source, WARP, WARP), [i])
        else:
            self._load_bits(words, view, at, column)
        if size == 4:
            return [T.bind(_bits(word, view.nominal)) for word in words]
        low, high = T.Cast("uint16", words[0]), T.Cast("uint16", T.shift_right(words[0], T.uint32(16)))
        return [T.bind(_value_of(view, half)) for half in (low, high)]

    def _stage_pairs(
        self,
        sums: Any,
        register: Expr,
        staging: Staging,
        begin: Expr,
        at: Coordinates,
        rows: list[Expr],
        column: Expr,
        by_row: dict[tuple[int, int], Expr],
        position: tuple[Expr, Expr],
    ) -> None:
        """Stage pairs of two rows in 8 columns: results, or accumulators if the epilogue works on whole rows."""
        j, lane = position
        if self._rows:
            for h in range(2):
                target = begin + (lane // 4 + 8 * h) * staging.pitch + (j * 8 + lane % 4 * 2) * 4
                pair = [_bits(sums[register + 2 * h + c], "uint32") for c in range(2)]
                ptx.store_shared(staging.shared.at(target), pair)
            return
        for h, values in enumerate(self._pairs(sums, register, at, column, by_row, lane)):
            target = begin + (lane // 4 + 8 * h) * staging.pitch + (j * 8 + lane % 4 * 2) * self.element
            self._write_pair(staging.shared.at(target), values)

    def _pairs(
        self, sums: Any, register: Expr, at: Coordinates, column: Expr, by_row: dict[tuple[int, int], Expr], lane: Expr
    ) -> Iterator[_Pair]:
        """Accumulators of two neighbouring columns with their epilogue operands, for each of two rows."""
        column_operands = {
            number: self._load_pair(number, at, column, register, lane)
            for number, view in enumerate(self.views)
            if view.runs_along("n")
        }
        for h in range(2):
            pairs = []
            for number, view in enumerate(self.views):
                if not view.runs_along("n"):
                    pairs.append([by_row[number, h]] * 2)
                else:
                    pairs.append(column_operands[number])
            totals = [self.sum(sums[register + 2 * h + c]) for c in range(2)]
            yield [(totals[c], [pair[c] for pair in pairs]) for c in range(2)]

    def sum(self, register: Expr) -> Expr:
        """Accumulator from its bits."""
        return _bits(register, "int32" if self._acc_dtype == "int32" else "float32")

    @property
    def in_rows(self) -> bool:
        """True if the epilogue is computed on whole rows."""
        return self._rows is not None

    @property
    def is_packed(self) -> bool:
        """True if a staged pair of results is one register."""
        return not self._rows and self.element == 2

    def _write_pair(self, address: Expr, values: _Pair) -> None:
        if self.is_packed:
            ptx.store_shared(address, [self.packed(values)])
            return
        words = self.words(values)
        if self.element == 4:
            ptx.store_shared(address, words)
        else:
            low, high = (T.Cast("uint16", word) for word in words)
            ptx.store_shared(address, [T.bitwise_or(low, T.shift_left(high, T.uint16(8)))], "u16")

    def words(self, values: _Pair) -> list[Expr]:
        """Bits of two staged elements: accumulators if the epilogue works on whole rows, else results."""
        results = [total for total, _ in values] if self._rows else self.results(values, self._expression)
        return [_bits(value, f"uint{8 * self.element}") for value in results]

    def packed(self, values: _Pair) -> Expr:
        """Two 16-bit results in one register."""
        dtype, expression = self._result.nominal, self._expression
        if dtype in HALF_TYPES:
            dtypes = [self._acc_dtype, *(view.nominal for view in self.views)]
            # The final cast is fused into the packing conversion.
            if expression.term.op == "cast" and expression.term.params[0] == dtype:
                expression = Expression(expression.term.args[0])
            elif expression.dtype(dtypes) == dtype:
                expression = Expression(Term("cast", (expression.term,), ("float32",)))
            # So is a final relu.
            inner = Expression(expression.term.args[0]) if expression.term.op == "relu" else expression
            is_clamped = inner is not expression and inner.dtype(dtypes) == "float32"
            results = self.results(values, inner if is_clamped else expression, is_rounded=False)
            if all(str(value.ty.dtype) == "float32" for value in results):
                pair = local(1, "uint32")
                ptx.pack_pair(pair[0], results[0], results[1], dtype, is_clamped)
                return pair[0]
            results = [T.Cast(dtype, value) for value in results]
        else:
            results = self.results(values, expression)
        low, high = (T.Cast("uint32", _bits(value, "uint16")) for value in results)
        return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))

    def results(self, values: _Pair, expression: Expression, is_rounded: bool = True) -> list[Expr]:
        """Evaluate an expression for a pair, rounded to the result's type if `is_rounded`."""
        dtype, dtypes = self._result.nominal, [self._acc_dtype, *(view.nominal for view in self.views)]
        results = [emit(expression, [total, *operands], dtypes, dtype) for total, operands in values]
        if is_rounded and (str(results[0].ty.dtype) != dtype or dtype == "bool"):
            results = [T.Cast("uint8" if dtype == "bool" else dtype, value) for value in results]
        return results

    def _run_width(self, count: int) -> int:
        """Bytes of a staged row that a lane stores at a time."""
        width = self._width
        while count * self.element % width:
            width //= 2
        return width

    def _locate_run(
        self, number: Expr, at: Coordinates, first: tuple[Expr, Expr], skip: int, count: int, team: StoreGroup
    ) -> tuple[Expr, Expr, Coordinates, list[Expr]]:
        """Row and index of a run of staged bytes, coordinates of its first element, and its predicates."""
        width = self._run_width(count)
        per_row = count * self.element // width
        row, chunk = number // per_row, number % per_row
        at_row = T.bind(first[0] + T.Cast("int64", row))
        at_column = T.bind(first[1] + T.Cast("int64", skip + chunk * (width // self.element)))
        conditions = [] if self._divides_result else [at_row < self._m, at_column < self._n]
        if team.rows * per_row % team.threads:
            conditions.append(number < team.rows * per_row)
        return row, chunk, {**at, "m": at_row, "n": at_column}, conditions

    def _runs_per_thread(self, count: int, team: StoreGroup) -> int:
        return -(-team.rows * (count * self.element // self._run_width(count)) // team.threads)

    def fetch_rows(
        self, at: Coordinates, first: tuple[Expr, Expr], skip: int, count: int, lane: Expr, team: StoreGroup
    ) -> list[Any]:
        """Load epilogue operands ahead for the runs that `store_rows` stores; return their registers."""
        assert self._rows is not None
        runs, elements = self._runs_per_thread(count, team), self._run_width(count) // self.element
        registers = self._rows.registers(runs, elements)
        with unrolled(runs) as i:
            _, _, position, conditions = self._locate_run(lane + i * team.threads, at, first, skip, count, team)
            with when(tirx.all(*conditions) if conditions else True):
                self._rows.load(registers, i, position, elements)
        return registers

    def store_rows(
        self,
        staging: Staging,
        begin: Expr,
        at: Coordinates,
        first: tuple[Expr, Expr],
        skip: int,
        count: int,
        lane: Expr,
        fetched: list[Any] | None,
        team: StoreGroup,
    ) -> None:
        """Store staged rows to the result, coalesced."""
        width = self._run_width(count)
        words = max(1, width // 4)
        word_type = "uint32" if width >= 4 else f"uint{8 * width}"
        registers = local(words, word_type)
        with unrolled(self._runs_per_thread(count, team)) as i:
            row, chunk, position, conditions = self._locate_run(lane + i * team.threads, at, first, skip, count, team)
            source = begin + row * staging.pitch + chunk * width
            with when(tirx.all(*conditions) if conditions else True):
                loaded = [registers[w] for w in range(words)]
                for w in range(0, words, 4):
                    # A load has at most 16 bytes.
                    ptx.load_shared(loaded[w : w + 4], staging.shared.at(source + 4 * w), f"u{min(32, 8 * width)}")
                if self._rows:
                    assert fetched is not None
                    self._rows.write([partial(self.sum, value) for value in loaded], position, loaded=(fetched, i))
                elif width >= 4:
                    ptx.store_global(T.address_of(self._result.data[self._result.address(position)]), loaded)
                else:
                    T.buffer_store(self._result.data, loaded[0], [self._result.address(position)])


@dataclass(frozen=True)
class Staging:
    """Shared memory in which fragments are transposed to rows.

    Attributes
    ----------
    offset : int
        Offset of the first warp's part.
    columns : int
        Columns that are staged at a time.
    pitch : int
        Bytes between rows.
    """

    shared: SharedMemory
    offset: int
    columns: int
    pitch: int


def _bits(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.reinterpret(dtype, value)


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
