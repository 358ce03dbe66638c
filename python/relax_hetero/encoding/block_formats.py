"""Formats of block-quantized weights: their storage in GGUF files, and the numbers that their bits mean.

Every value of every format is ``scale * (quant + low) + minimum``: a quant of a few bits, the format's lowest code, and
a scale and perhaps a minimum for each block of neighbours along k. A file's row is a sequence of superblocks of bytes,
here "records". Formats whose names end in ``_k`` have superblocks of 256 weights, whose scales and minimums are small
integers times the superblock's two float16 numbers (ggml's ``d`` and ``dmin``).

The meaning of the bytes is written once, over a few operations on arrays (`Arrays`): numpy's here, Relax ops in the
pass that dequantizes weights for products without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import EncodingError

ScaleKind = str
"""``""``: none; ``float16`` or ``float32``: a number; ``int8``: an integer times a float16 of the superblock."""


@dataclass(frozen=True)
class BlockFormat:
    """Storage of block-quantized weights.

    Attributes
    ----------
    name : str
    bits : int
        Bits of a quant; 16 for plain numbers (``f16``, ``bf16``), without blocks.
    low : int
        The code of quant 0: codes are from `low` to ``low + 2 ** bits - 1``.
    block : int
        Weights that share a scale.
    span : int
        Weights of a superblock.
    record_bytes : int
        Bytes of a superblock in a file; 0 for separate arrays of integers and scales (`of_integers`).
    scale, minimum : ScaleKind
    """

    name: str
    bits: int
    low: int
    block: int
    span: int
    record_bytes: int
    scale: ScaleKind
    minimum: ScaleKind = ""

    @property
    def is_plain(self) -> bool:
        """True if weights are plain numbers, without scales."""
        return self.bits == 16

    def bytes_of_row(self, depth: int) -> int:
        """Bytes of a row of `depth` weights in a file.

        Raises
        ------
        EncodingError
            If the row is not a whole number of superblocks.
        """
        if depth % self.span:
            raise EncodingError(f"{self.name}: found rows of {depth} weights, expected a multiple of {self.span}")
        return depth // self.span * self.record_bytes


_FILE_FORMATS = (
    BlockFormat("q8_0", 8, -128, 32, 32, 34, "float16"),
    BlockFormat("q4_0", 4, -8, 32, 32, 18, "float16"),
    BlockFormat("q4_1", 4, 0, 32, 32, 20, "float16", "float16"),
    BlockFormat("q5_0", 5, -16, 32, 32, 22, "float16"),
    BlockFormat("q5_1", 5, 0, 32, 32, 24, "float16", "float16"),
    BlockFormat("q4_k", 4, 0, 32, 256, 144, "int8", "int8"),
    BlockFormat("q5_k", 5, 0, 32, 256, 176, "int8", "int8"),
    BlockFormat("q6_k", 6, -32, 16, 256, 210, "int8"),
    BlockFormat("f16", 16, 0, 1, 1, 2, ""),
    BlockFormat("bf16", 16, 0, 1, 1, 2, ""),
)

FILE_FORMATS = {form.name: form for form in _FILE_FORMATS}
"""The formats that GGUF files store weights in, by their names in lower case."""


def of_integers(bits: int, block: int, has_minimum: bool) -> BlockFormat:
    """The format of integers with scales, and perhaps minimums, of float32, as in ONNX models."""
    name = f"int{bits}_{block}" + ("_minimum" if has_minimum else "")
    minimum = "float32" if has_minimum else ""
    return BlockFormat(name, bits, -(1 << (bits - 1)), block, block, 0, "float32", minimum)


def block_format(name: str) -> BlockFormat:
    """The format with a name of `FILE_FORMATS` or one that `of_integers` makes; EncodingError for any other."""
    if name in FILE_FORMATS:
        return FILE_FORMATS[name]
    bits, _, rest = name.removeprefix("int").partition("_")
    block, _, minimum = rest.partition("_")
    if name.startswith("int") and bits in ("2", "4", "8") and block.isdigit() and minimum in ("", "minimum"):
        return of_integers(int(bits), int(block), bool(minimum))
    raise EncodingError(f"found weights of format {name!r}, expected one of {', '.join(FILE_FORMATS)}")


class Arrays(Protocol):
    """Operations on arrays of bytes, in which the readers of superblocks are written."""

    def part(self, x: Any, begin: int, end: int) -> Any:
        """Elements from `begin` to `end` of the last axis."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """The elements in another shape; one extent may be -1."""

    def stack(self, parts: Sequence[Any], axis: int) -> Any:
        """Arrays of one shape along a new axis."""

    def bits(self, x: Any, first: int, count: int) -> Any:
        """Bits `first` to ``first + count - 1`` of each byte, shifted to bit 0."""

    def join(self, x: Any, above: Any, first: int) -> Any:
        """``x | above << first``."""

    def flip(self, x: Any, bit: int) -> Any:
        """Bytes with one bit inverted."""

    def half(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a float16, as float32 without that axis."""

    def bf16(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a bfloat16, as float32 without that axis."""


@dataclass(frozen=True)
class Parts:
    """Rows of weights, separated into quants, scales and minimums.

    Attributes
    ----------
    fields : array of uint8, (n, depth)
        Quants; for plain formats the numbers themselves, float32.
    scales, minimums : array, (n, blocks) or None
        float32; or, where the format's kind is ``int8``, integers as bytes, to be multiplied by `superblock_scales`
        and `outer_minimums`.
    superblock_scales, outer_minimums : array of float32, (n, records) or None
        The value of a block's minimum is ``-outer_minimum * minimum``.
    """

    fields: Any
    scales: Any = None
    minimums: Any = None
    superblock_scales: Any = None
    outer_minimums: Any = None


def parts_of_rows(raw: Any, form: BlockFormat, depth: int, arrays: Arrays, rows: int) -> Parts:
    """Quants, scales and minimums of `rows` rows of a file's bytes, ``(rows, form.bytes_of_row(depth))``."""
    records = depth // form.span
    record = arrays.reshape(raw, [rows, records, form.record_bytes])
    return _READERS[form.name](record, _Rows(arrays, rows, records))


@dataclass(frozen=True)
class _Rows:
    """Operations on the superblocks of rows."""

    arrays: Arrays
    rows: int
    records: int

    def flat(self, x: Any) -> Any:
        return self.arrays.reshape(x, [self.rows, -1])

    def cut(self, x: Any, *extents: int) -> Any:
        """The bytes of each superblock, reshaped to `extents`."""
        return self.arrays.reshape(x, [self.rows, self.records, *extents])

    def half(self, record: Any, offset: int) -> Any:
        return self.arrays.half(self.arrays.part(record, offset, offset + 2))

    def nibbles(self, data: Any, run: int) -> Any:
        """The two quants of each byte: the low halves of a run of bytes, then the high halves."""
        halves = [self.arrays.bits(data, first, 4) for first in (0, 4)]
        if run == 0:
            return self.arrays.stack(halves, 2)
        return self.arrays.stack([self.cut(half, -1, run) for half in halves], 3)


def _read_q8_0(record: Any, rows: _Rows) -> Parts:
    return Parts(rows.flat(rows.arrays.flip(rows.arrays.part(record, 2, 34), 7)), rows.half(record, 0))


def _read_q4(minimum: bool) -> Callable[[Any, _Rows], Parts]:
    def read(record: Any, rows: _Rows) -> Parts:
        first = 4 if minimum else 2
        fields = rows.flat(rows.nibbles(rows.arrays.part(record, first, first + 16), 16))
        return Parts(fields, rows.half(record, 0), rows.half(record, 2) if minimum else None)

    return read


def _read_q5(minimum: bool) -> Callable[[Any, _Rows], Parts]:
    def read(record: Any, rows: _Rows) -> Parts:
        arrays, first = rows.arrays, 4 if minimum else 2
        low = rows.flat(rows.nibbles(arrays.part(record, first + 4, first + 20), 16))
        data = arrays.part(record, first, first + 4)
        high = rows.flat(arrays.stack([arrays.bits(data, bit, 1) for bit in range(8)], 3))
        return Parts(arrays.join(low, high, 4), rows.half(record, 0), rows.half(record, 2) if minimum else None)

    return read


def _k_scales(record: Any, rows: _Rows) -> tuple[Any, Any]:
    """Eight scales and eight minimums of 6 bits in 12 bytes, from byte 4 on."""
    arrays = rows.arrays
    first, second, third = (arrays.part(record, offset, offset + 4) for offset in (4, 8, 12))
    factors = []
    for data, shift in ((first, 0), (second, 4)):
        last = arrays.join(arrays.bits(third, shift, 4), arrays.bits(data, 6, 2), 4)
        factors.append(rows.flat(arrays.stack([arrays.bits(data, 0, 6), last], 2)))
    return factors[0], factors[1]


def _read_q4_k(record: Any, rows: _Rows) -> Parts:
    fields = rows.flat(rows.nibbles(rows.arrays.part(record, 16, 144), 32))
    return Parts(fields, *_k_scales(record, rows), rows.half(record, 0), rows.half(record, 2))


def _read_q5_k(record: Any, rows: _Rows) -> Parts:
    arrays = rows.arrays
    low = rows.flat(rows.nibbles(arrays.part(record, 48, 176), 32))
    data = arrays.part(record, 16, 48)
    high = rows.flat(arrays.stack([arrays.bits(data, bit, 1) for bit in range(8)], 2))
    fields = arrays.join(low, high, 4)
    return Parts(fields, *_k_scales(record, rows), rows.half(record, 0), rows.half(record, 2))


def _read_q6_k(record: Any, rows: _Rows) -> Parts:
    arrays = rows.arrays
    low = rows.flat(rows.nibbles(arrays.part(record, 0, 128), 64))
    data = rows.cut(arrays.part(record, 128, 192), 2, 32)
    high = rows.flat(arrays.stack([arrays.bits(data, first, 2) for first in (0, 2, 4, 6)], 3))
    scales = rows.flat(arrays.part(record, 192, 208))
    return Parts(arrays.join(low, high, 4), scales, superblock_scales=rows.half(record, 208))


def _read_f16(record: Any, rows: _Rows) -> Parts:
    return Parts(rows.arrays.half(record))


def _read_bf16(record: Any, rows: _Rows) -> Parts:
    return Parts(rows.arrays.bf16(record))


_READERS: dict[str, Callable[[Any, _Rows], Parts]] = {
    "q8_0": _read_q8_0,
    "q4_0": _read_q4(False),
    "q4_1": _read_q4(True),
    "q5_0": _read_q5(False),
    "q5_1": _read_q5(True),
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
    "f16": _read_f16,
    "bf16": _read_bf16,
}


class _NumpyArrays:
    """`Arrays` of numpy."""

    def part(self, x: np.ndarray, begin: int, end: int) -> np.ndarray:
        return x[..., begin:end]

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(shape)

    def stack(self, parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(parts, axis)

    def bits(self, x: np.ndarray, first: int, count: int) -> np.ndarray:
        return x >> np.uint8(first) & np.uint8((1 << count) - 1)

    def join(self, x: np.ndarray, above: np.ndarray, first: int) -> np.ndarray:
        return x | above << np.uint8(first)

    def flip(self, x: np.ndarray, bit: int) -> np.ndarray:
        return x ^ np.uint8(1 << bit)

    def half(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view("<f2")[..., 0].astype(np.float32)

    def bf16(self, x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class BlockWeights:
    """Rows of weights as integers, scales and minimums: ``scales * codes + minimums``.

    Attributes
    ----------
    codes : array of int8, (n, depth)
        Codes; for plain formats the numbers, float32.
    scales, minimums : array of float32, (n, blocks) or None
        Factors and offsets of blocks; None where the format lacks them.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    minimums: np.ndarray | None


def read_rows(raw: np.ndarray, form: BlockFormat, depth: int) -> Parts:
    """Quants, scales and minimums of rows of a file's bytes, ``(n, form.bytes_of_row(depth))`` of uint8."""
    return parts_of_rows(np.ascontiguousarray(raw), form, depth, _NumpyArrays(), raw.shape[0])


def weights_of_rows(raw: np.ndarray, form: BlockFormat, depth: int) -> BlockWeights:
    """Rows of a file's bytes as integers, scales and minimums."""
    parts = read_rows(raw, form, depth)
    if form.is_plain:
        return BlockWeights(parts.fields, None, None)
    codes = (parts.fields + np.uint8(form.low & 255)).view(np.int8)  # modulo 256: codes fit int8
    scales, minimums = parts.scales, parts.minimums
    if form.scale == "int8":
        scales = _times_superblock(scales, parts.superblock_scales)
    if form.minimum == "int8":
        minimums = -_times_superblock(minimums, parts.outer_minimums)
    return BlockWeights(codes, scales, minimums)


def numbers_of_rows(raw: np.ndarray, form: BlockFormat, depth: int) -> np.ndarray:
    """Rows of a file's bytes as float32, (n, depth)."""
    weights = weights_of_rows(raw, form, depth)
    if weights.scales is None:
        return weights.codes
    numbers = np.repeat(weights.scales, form.block, 1)[:, :depth]
    numbers *= weights.codes
    if weights.minimums is not None:
        numbers += np.repeat(weights.minimums, form.block, 1)[:, :depth]
    return numbers


def _times_superblock(integers: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Integers of blocks, stored as bytes of int8, times the numbers of their superblocks."""
    return integers.view(np.int8).astype(np.float32) * np.repeat(factors, integers.shape[1] // factors.shape[1], 1)
