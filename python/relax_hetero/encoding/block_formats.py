"""Formats of block-quantized weights: their storage in GGUF files, and the numbers that their bits mean.

A weight is ``scale * code + minimum`` with ``code = quant + min_code``: the quant is an unsigned integer of a few bits,
`min_code` a constant of the format. Formats with a table have ``code = codes[quant]`` instead. A block of neighbours
along k shares a scale and perhaps a minimum. A row of a file is a sequence of superblocks of equal size: one block each
or, in formats whose names end in ``_k``, 256 weights in several blocks, whose scales and minimums are small integers
times the superblock's float16 factors (ggml's ``d`` and ``dmin``).

Each format has one reader, written with a few array operations (`ArrayOps`). They are numpy's here, and Relax ops in
FormQuantizedMatmuls, which dequantizes weights of products without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import EncodingError

ScaleKind = str
"""``""``: none; ``float16`` or ``float32``: a number; ``int8``: an integer times a float16 of the superblock;
``e8m0``: a byte, the biased exponent of a power of two."""

E8M0_VALUES = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Numbers of the bytes of ``e8m0``: halves of those in the OCP specification, as ggml doubles the codes of fp4."""

FLOAT4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of fp4 e2m1: a sign, two bits of exponent and one of fraction (OCP Microscaling Formats)."""


def stored_scale_type(kind: ScaleKind) -> str:
    """Element type of scales as they are stored."""
    return "uint8" if kind in ("int8", "e8m0") else kind


@dataclass(frozen=True)
class BlockFormat:
    """Storage of block-quantized weights.

    Attributes
    ----------
    name : str
    bits : int
        Bits of a quant; 16 for plain numbers (``f16``, ``bf16``), without blocks.
    min_code : int
        Smallest code. Without a table it is that of quant 0: codes are from `min_code` to ``min_code + 2 ** bits - 1``.
    block : int
        Number of weights that share a scale.
    superblock_size : int
        Number of weights of a superblock.
    superblock_bytes : int
        Bytes of a superblock in a file; 0 for separate arrays of integers and scales (`integer_format`).
    scale, minimum : ScaleKind
    codes : tuple of int
        Code of each quant, if codes are not consecutive.
    """

    name: str
    bits: int
    min_code: int
    block: int
    superblock_size: int
    superblock_bytes: int
    scale: ScaleKind
    minimum: ScaleKind = ""
    codes: tuple[int, ...] = ()

    @property
    def is_float4(self) -> bool:
        """True if quants are fp4 numbers."""
        return self.codes == FLOAT4_CODES

    @property
    def is_plain(self) -> bool:
        """True if weights are plain numbers, without scales."""
        return self.bits == 16

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of `depth` weights in a file.

        Raises
        ------
        EncodingError
            If the row is not a whole number of superblocks.
        """
        if depth % self.superblock_size:
            raise EncodingError(
                f"{self.name}: found rows of {depth} weights, expected a multiple of {self.superblock_size}"
            )
        return depth // self.superblock_size * self.superblock_bytes


_FILE_FORMATS = (
    BlockFormat("q8_0", 8, -128, 32, 32, 34, "float16"),
    BlockFormat("q4_0", 4, -8, 32, 32, 18, "float16"),
    BlockFormat("q4_1", 4, 0, 32, 32, 20, "float16", "float16"),
    BlockFormat("q5_0", 5, -16, 32, 32, 22, "float16"),
    BlockFormat("q5_1", 5, 0, 32, 32, 24, "float16", "float16"),
    BlockFormat("q4_k", 4, 0, 32, 256, 144, "int8", "int8"),
    BlockFormat("q5_k", 5, 0, 32, 256, 176, "int8", "int8"),
    BlockFormat("q6_k", 6, -32, 16, 256, 210, "int8"),
    BlockFormat("mxfp4", 4, -12, 32, 32, 17, "e8m0", codes=FLOAT4_CODES),
    BlockFormat("f16", 16, 0, 1, 1, 2, ""),
    BlockFormat("bf16", 16, 0, 1, 1, 2, ""),
)

FILE_FORMATS = {form.name: form for form in _FILE_FORMATS}
"""The formats that GGUF files store weights in, by their names in lower case."""


def integer_format(bits: int, block: int, has_minimum: bool) -> BlockFormat:
    """The format of separate arrays, as in ONNX models: integers, float32 scales and perhaps float32 minimums."""
    name = f"int{bits}_{block}" + ("_minimum" if has_minimum else "")
    minimum = "float32" if has_minimum else ""
    return BlockFormat(name, bits, -(1 << (bits - 1)), block, block, 0, "float32", minimum)


def block_format(name: str) -> BlockFormat:
    """The format of a name, as in `FILE_FORMATS` or as `integer_format` makes it; EncodingError for any other name."""
    if name in FILE_FORMATS:
        return FILE_FORMATS[name]
    bits, _, rest = name.removeprefix("int").partition("_")
    block, _, minimum = rest.partition("_")
    if name.startswith("int") and bits in ("2", "4", "8") and block.isdigit() and minimum in ("", "minimum"):
        return integer_format(int(bits), int(block), bool(minimum))
    raise EncodingError(f"found weights of format {name!r}, expected one of {', '.join(FILE_FORMATS)}")


class ArrayOps(Protocol):
    """Operations on arrays of bytes that the readers of superblocks need."""

    def slice(self, x: Any, begin: int, end: int) -> Any:
        """Elements from `begin` to `end` of the last axis."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """The elements in another shape; one extent may be -1."""

    def stack(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays of one shape along a new axis."""

    def bits(self, x: Any, first: int, count: int) -> Any:
        """Bits `first` to ``first + count - 1`` of each byte, shifted to bit 0."""

    def or_shifted(self, x: Any, high: Any, shift: int) -> Any:
        """``x | high << shift``."""

    def flip_bit(self, x: Any, bit: int) -> Any:
        """Bytes with one bit inverted."""

    def f16(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a float16, as float32 without that axis."""

    def bf16(self, x: Any) -> Any:
        """Pairs of bytes along the last axis, each a bfloat16, as float32 without that axis."""


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of weights, separated into quants, scales and minimums as they are stored.

    Attributes
    ----------
    quants : array of uint8, (n, depth)
        Quants; for plain formats the numbers themselves, float32.
    scales, minimums : array, (n, blocks) or None
        float32; or bytes, where the format's kind is ``e8m0`` or ``int8``: integers, to be multiplied by
        `superblock_scales` and `superblock_minimums`.
    superblock_scales, superblock_minimums : array of float32, (n, superblocks) or None
        ggml's ``d`` and ``dmin``. The minimum of a block is ``-superblock_minimum * minimum``.
    """

    quants: Any
    scales: Any = None
    minimums: Any = None
    superblock_scales: Any = None
    superblock_minimums: Any = None


def split_rows(raw: Any, form: BlockFormat, depth: int, ops: ArrayOps, rows: int) -> QuantizedRows:
    """Separate `rows` rows of a file's bytes, ``(rows, form.row_bytes(depth))``, into quants, scales and minimums."""
    superblocks = depth // form.superblock_size
    data = ops.reshape(raw, [rows, superblocks, form.superblock_bytes])
    return _READERS[form.name](data, _SuperblockReader(ops, rows, superblocks))


@dataclass(frozen=True)
class _SuperblockReader:
    """Helpers of the functions below, whose `data` has the shape ``(rows, superblocks, bytes of a superblock)``."""

    ops: ArrayOps
    rows: int
    superblocks: int

    def by_row(self, x: Any) -> Any:
        """An array with the elements of each row along one axis."""
        return self.ops.reshape(x, [self.rows, -1])

    def by_superblock(self, x: Any, *extents: int) -> Any:
        """An array with the elements of each superblock in the shape `extents`."""
        return self.ops.reshape(x, [self.rows, self.superblocks, *extents])

    def f16(self, data: Any, offset: int) -> Any:
        """The float16 at a byte offset of each superblock."""
        return self.ops.f16(self.ops.slice(data, offset, offset + 2))

    def nibbles(self, data: Any, run: int) -> Any:
        """Quants of 4 bits: for each run of `run` bytes first their low halves, then their high halves."""
        halves = [self.ops.bits(data, first, 4) for first in (0, 4)]
        return self.by_row(self.ops.stack([self.by_superblock(half, -1, run) for half in halves], 3))


def _read_q8_0(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    quants = reader.ops.flip_bit(reader.ops.slice(data, 2, 34), 7)  # int8 to uint8, plus 128
    return QuantizedRows(reader.by_row(quants), reader.f16(data, 0))


def _read_q4(has_minimum: bool) -> Callable[[Any, _SuperblockReader], QuantizedRows]:
    def read(data: Any, reader: _SuperblockReader) -> QuantizedRows:
        offset = 4 if has_minimum else 2
        quants = reader.nibbles(reader.ops.slice(data, offset, offset + 16), 16)
        return QuantizedRows(quants, reader.f16(data, 0), reader.f16(data, 2) if has_minimum else None)

    return read


def _read_q5(has_minimum: bool) -> Callable[[Any, _SuperblockReader], QuantizedRows]:
    def read(data: Any, reader: _SuperblockReader) -> QuantizedRows:
        ops, offset = reader.ops, 4 if has_minimum else 2
        low_bits = reader.nibbles(ops.slice(data, offset + 4, offset + 20), 16)
        high_bytes = ops.slice(data, offset, offset + 4)
        high_bits = reader.by_row(ops.stack([ops.bits(high_bytes, bit, 1) for bit in range(8)], 3))
        quants = ops.or_shifted(low_bits, high_bits, 4)
        return QuantizedRows(quants, reader.f16(data, 0), reader.f16(data, 2) if has_minimum else None)

    return read


def _read_k_scales(data: Any, reader: _SuperblockReader) -> tuple[Any, Any]:
    """Eight scales and eight minimums of 6 bits, in 12 bytes from byte 4 on.

    The last four of each have their low bits in the third group of 4 bytes, and their high bits above the first four.
    """
    ops = reader.ops
    scale_bytes, minimum_bytes, low_bytes = (ops.slice(data, offset, offset + 4) for offset in (4, 8, 12))
    factors = []
    for first_bytes, low_bit in ((scale_bytes, 0), (minimum_bytes, 4)):
        last_four = ops.or_shifted(ops.bits(low_bytes, low_bit, 4), ops.bits(first_bytes, 6, 2), 4)
        factors.append(reader.by_row(ops.stack([ops.bits(first_bytes, 0, 6), last_four], 2)))
    return factors[0], factors[1]


def _read_q4_k(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    quants = reader.nibbles(reader.ops.slice(data, 16, 144), 32)
    return QuantizedRows(quants, *_read_k_scales(data, reader), reader.f16(data, 0), reader.f16(data, 2))


def _read_q5_k(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    low_bits = reader.nibbles(ops.slice(data, 48, 176), 32)
    high_bytes = ops.slice(data, 16, 48)
    high_bits = reader.by_row(ops.stack([ops.bits(high_bytes, bit, 1) for bit in range(8)], 2))
    quants = ops.or_shifted(low_bits, high_bits, 4)
    return QuantizedRows(quants, *_read_k_scales(data, reader), reader.f16(data, 0), reader.f16(data, 2))


def _read_q6_k(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    ops = reader.ops
    low_bits = reader.nibbles(ops.slice(data, 0, 128), 64)
    high_bytes = reader.by_superblock(ops.slice(data, 128, 192), 2, 32)
    high_bits = reader.by_row(ops.stack([ops.bits(high_bytes, first, 2) for first in (0, 2, 4, 6)], 3))
    scales = reader.by_row(ops.slice(data, 192, 208))
    quants = ops.or_shifted(low_bits, high_bits, 4)
    return QuantizedRows(quants, scales, superblock_scales=reader.f16(data, 208))


def _read_mxfp4(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    scales = reader.by_row(reader.ops.slice(data, 0, 1))
    return QuantizedRows(reader.nibbles(reader.ops.slice(data, 1, 17), 16), scales)


def _read_f16(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    return QuantizedRows(reader.ops.f16(data))


def _read_bf16(data: Any, reader: _SuperblockReader) -> QuantizedRows:
    return QuantizedRows(reader.ops.bf16(data))


_READERS: dict[str, Callable[[Any, _SuperblockReader], QuantizedRows]] = {
    "q8_0": _read_q8_0,
    "q4_0": _read_q4(has_minimum=False),
    "q4_1": _read_q4(has_minimum=True),
    "q5_0": _read_q5(has_minimum=False),
    "q5_1": _read_q5(has_minimum=True),
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
    "mxfp4": _read_mxfp4,
    "f16": _read_f16,
    "bf16": _read_bf16,
}


class _NumpyOps:
    """`ArrayOps` of numpy."""

    def slice(self, x: np.ndarray, begin: int, end: int) -> np.ndarray:
        return x[..., begin:end]

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(shape)

    def stack(self, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(arrays, axis)

    def bits(self, x: np.ndarray, first: int, count: int) -> np.ndarray:
        return x >> np.uint8(first) & np.uint8((1 << count) - 1)

    def or_shifted(self, x: np.ndarray, high: np.ndarray, shift: int) -> np.ndarray:
        return x | high << np.uint8(shift)

    def flip_bit(self, x: np.ndarray, bit: int) -> np.ndarray:
        return x ^ np.uint8(1 << bit)

    def f16(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view("<f2")[..., 0].astype(np.float32)

    def bf16(self, x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class BlockWeights:
    """Rows of weights ``scales * codes + minimums``, with the superblocks' factors multiplied in.

    Attributes
    ----------
    codes : array of int8, (n, depth)
        Codes; for plain formats the numbers themselves, float32.
    scales, minimums : array of float32, (n, blocks) or None
        Scale and minimum of each block; None where the format lacks them.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    minimums: np.ndarray | None


def split_numpy_rows(raw: np.ndarray, form: BlockFormat, depth: int) -> QuantizedRows:
    """Call `split_rows` for a numpy array."""
    return split_rows(np.ascontiguousarray(raw), form, depth, _NumpyOps(), raw.shape[0])


def read_block_weights(raw: np.ndarray, form: BlockFormat, depth: int) -> BlockWeights:
    """Codes, scales and minimums of rows of a file's bytes, ``(n, form.row_bytes(depth))`` of uint8."""
    rows = split_numpy_rows(raw, form, depth)
    if form.is_plain:
        return BlockWeights(rows.quants, None, None)
    if form.codes:
        codes = np.array(form.codes, np.int8)[rows.quants]
    else:
        codes = (rows.quants + np.uint8(form.min_code & 255)).view(np.int8)  # the sum wraps to a code, which fits int8
    scales, minimums = rows.scales, rows.minimums
    if form.scale == "e8m0":
        scales = E8M0_VALUES[scales]
    if form.scale == "int8":
        scales = _times_superblock(scales, rows.superblock_scales)
    if form.minimum == "int8":
        minimums = -_times_superblock(minimums, rows.superblock_minimums)
    return BlockWeights(codes, scales, minimums)


def dequantize_rows(raw: np.ndarray, form: BlockFormat, depth: int) -> np.ndarray:
    """Dequantize rows of a file's bytes to float32, (n, depth)."""
    weights = read_block_weights(raw, form, depth)
    if weights.scales is None:
        return weights.codes
    numbers = np.repeat(weights.scales, form.block, 1)[:, :depth]
    numbers *= weights.codes
    if weights.minimums is not None:
        numbers += np.repeat(weights.minimums, form.block, 1)[:, :depth]
    return numbers


def _times_superblock(integers: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Integers of blocks (int8, as bytes) times the factors of their superblocks."""
    return integers.view(np.int8).astype(np.float32) * np.repeat(factors, integers.shape[1] // factors.shape[1], 1)
