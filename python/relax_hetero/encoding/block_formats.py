"""Formats of block-quantized weights: their storage in GGUF files, and the numbers that their bits mean.

A weight is ``scale * code + minimum`` with ``code = quant + min_code``: the quant is an unsigned integer of a few bits,
`min_code` a constant of the format. Formats with a table have ``code = codes[quant]`` instead. A block of neighbours
along k shares a scale and perhaps a minimum. A row of a file is a sequence of superblocks of equal size: one block each
or, in formats with scales of ``int8``, 256 weights in several blocks, whose scales and minimums are small integers
times the superblock's float16 factors (ggml's ``d`` and ``dmin``).

A format is one row here, for packing and for kernels, and one reader of its bytes (`block_readers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EncodingError
from .block_readers import READERS, ArrayOps, QuantizedRows, SuperblockReader

ScaleKind = str
"""``""``: none; ``float16`` or ``float32``: a number; ``int8``: an integer times a float16 of the superblock;
``e8m0``: a byte, the biased exponent of a power of two; ``e4m3``: a byte, a float without a sign."""

_EXPONENTS, _FRACTIONS = np.arange(256) >> 3 & 15, np.float32(np.arange(256) & 7)

SCALES_OF_BYTES = {
    "e8m0": np.ldexp(np.float32(1), np.arange(256) - 128),
    "e4m3": np.ldexp(np.float32(1), np.maximum(_EXPONENTS, 1) - 11) * (_FRACTIONS + np.float32(8) * (_EXPONENTS > 0)),
}
"""Numbers of scales that are bytes: halves of those in the OCP specifications, as ggml doubles the codes of fp4."""

FLOAT4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of fp4 e2m1: a sign, two bits of exponent and one of fraction (OCP Microscaling Formats)."""


def stored_scale_type(kind: ScaleKind) -> str:
    """Element type of scales as they are stored."""
    return "uint8" if kind == "int8" or kind in SCALES_OF_BYTES else kind


@dataclass(frozen=True)
class BlockFormat:
    """Storage of block-quantized weights."""

    name: str
    bits: int  # bits of a quant; 16 for plain numbers (``f16``, ``bf16``), without blocks
    # Smallest code. Without a table it is that of quant 0: codes are from `min_code` to ``min_code + 2 ** bits - 1``.
    min_code: int
    block: int  # number of weights that share a scale
    superblock_size: int  # number of weights of a superblock
    # Bytes of a superblock in a file; 0 for separate arrays of integers and scales (`integer_format`).
    superblock_bytes: int
    scale: ScaleKind
    minimum: ScaleKind = ""
    codes: tuple[int, ...] = ()  # code of each quant, if codes are not consecutive
    factor: float = 1.0  # factor of all scales and minimums, a power of two
    # Whether integer scales and minimums have 4 bits and share a byte, the scale in the lowest bits.
    shares_bytes: bool = False

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

        Raises EncodingError if the row is not a whole number of superblocks.
        """
        if depth % self.superblock_size:
            raise EncodingError(
                f"{self.name}: found rows of {depth} weights, expected a multiple of {self.superblock_size}"
            )
        return depth // self.superblock_size * self.superblock_bytes


def _signed(*magnitudes: int) -> tuple[int, ...]:
    """Codes of magnitudes, and then of their negatives."""
    return (*magnitudes, *(-magnitude for magnitude in magnitudes))


_IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The last magnitude does not occur. Those of IQ1_M are an eighth more or less than -1, 0 and 1.
_IQ2_CODES, _IQ1_M_CODES = _signed(8, 25, 43, 43), (-7, 1, 9, 9, -9, -1, 7, 7)

_FILE_FORMATS = (
    BlockFormat("q8_0", 8, -128, 32, 32, 34, "float16"),
    BlockFormat("q4_0", 4, -8, 32, 32, 18, "float16"),
    BlockFormat("q4_1", 4, 0, 32, 32, 20, "float16", "float16"),
    BlockFormat("q5_0", 5, -16, 32, 32, 22, "float16"),
    BlockFormat("q5_1", 5, 0, 32, 32, 24, "float16", "float16"),
    BlockFormat("q4_k", 4, 0, 32, 256, 144, "int8", "int8"),
    BlockFormat("q5_k", 5, 0, 32, 256, 176, "int8", "int8"),
    BlockFormat("q6_k", 6, -32, 16, 256, 210, "int8"),
    BlockFormat("q2_k", 2, 0, 16, 256, 84, "int8", "int8", shares_bytes=True),
    BlockFormat("q3_k", 3, -4, 16, 256, 110, "int8"),
    BlockFormat("iq4_nl", 4, -127, 32, 32, 18, "float16", codes=_IQ4_CODES),
    BlockFormat("iq4_xs", 4, -127, 32, 256, 136, "int8", codes=_IQ4_CODES),
    BlockFormat("iq3_s", 4, -15, 32, 256, 110, "int8", codes=_signed(1, 3, 5, 7, 9, 11, 13, 15)),
    BlockFormat("iq3_xxs", 4, -62, 32, 256, 98, "int8", codes=_signed(4, 12, 20, 28, 36, 44, 52, 62), factor=0.25),
    BlockFormat("iq2_s", 3, -43, 16, 256, 82, "int8", codes=_IQ2_CODES, factor=0.125),
    BlockFormat("iq2_xs", 3, -43, 16, 256, 74, "int8", codes=_IQ2_CODES, factor=0.125),
    BlockFormat("iq2_xxs", 3, -43, 32, 256, 66, "int8", codes=_IQ2_CODES, factor=0.125),
    BlockFormat("iq1_m", 3, -9, 16, 256, 56, "int8", codes=_IQ1_M_CODES, factor=0.125),
    BlockFormat("iq1_s", 2, -1, 32, 256, 50, "int8", "int8", factor=0.125),
    BlockFormat("tq2_0", 2, -1, 256, 256, 66, "float16"),
    BlockFormat("tq1_0", 2, -1, 256, 256, 54, "float16"),
    BlockFormat("q2_0", 2, -1, 64, 64, 18, "float16"),
    BlockFormat("q1_0", 1, -1, 128, 128, 18, "float16", codes=(-1, 1)),
    BlockFormat("mxfp4", 4, -12, 32, 32, 17, "e8m0", codes=FLOAT4_CODES),
    BlockFormat("nvfp4", 4, -12, 16, 64, 36, "e4m3", codes=FLOAT4_CODES),
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


def split_rows(raw: Any, form: BlockFormat, depth: int, ops: ArrayOps, rows: int) -> QuantizedRows:
    """Separate `rows` rows of a file's bytes, ``(rows, form.row_bytes(depth))``, into quants, scales and minimums."""
    superblocks = depth // form.superblock_size
    data = ops.reshape(raw, [rows, superblocks, form.superblock_bytes])
    return READERS[form.name](data, SuperblockReader(ops, rows, superblocks))


class _NumpyOps:
    """`ArrayOps` of numpy."""

    def slice(self, x: np.ndarray, begin: int, end: int) -> np.ndarray:
        return x[..., begin:end]

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(shape)

    def stack(self, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(arrays, axis)

    def concat(self, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.concatenate(arrays, axis)

    def bits(self, x: np.ndarray, first: int, count: int) -> np.ndarray:
        return x >> np.uint8(first) & np.uint8((1 << count) - 1)

    def or_shifted(self, x: np.ndarray, high: np.ndarray, shift: int) -> np.ndarray:
        return x | high << np.uint8(shift)

    def flip_bit(self, x: np.ndarray, bit: int) -> np.ndarray:
        return x ^ np.uint8(1 << bit)

    def joined(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return low | high.astype(np.int32) << 8

    def look_up(self, x: np.ndarray, table: np.ndarray) -> np.ndarray:
        if table.ndim == 1:
            return table[x]
        size = table.itemsize * table.shape[1]  # numpy gathers words much faster than rows
        rows = table.view(f"u{size}" if size in (4, 8) else f"V{size}")[:, 0]
        return rows[x][..., None].view(table.dtype)

    def f16(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view("<f2")[..., 0].astype(np.float32)

    def bf16(self, x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class BlockWeights:
    """Rows of weights ``scales * codes + minimums``, with the superblocks' factors multiplied in."""

    codes: np.ndarray  # int8 ``(n, depth)``; for plain formats the numbers themselves, float32
    # Scale and minimum of each block, float32 ``(n, blocks)``; None where the format lacks them.
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
    if form.scale in SCALES_OF_BYTES:
        scales = SCALES_OF_BYTES[form.scale][scales]
    if form.scale == "int8":
        scales = _times_superblock(scales, rows.superblock_scales * np.float32(form.factor))
    if form.minimum == "int8":
        minimums = -_times_superblock(minimums, rows.superblock_minimums * np.float32(form.factor))
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
