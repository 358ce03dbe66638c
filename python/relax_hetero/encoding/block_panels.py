"""Block-quantized weights in the form that kernels of CPUs read: panels of columns, with the file's quants.

A panel is one stretch of bytes, which a kernel reads sequentially: superblocks along k, each with the scales and
minimums of all columns of the panel, then the codes. Codes of 1, 2, 4, 5 and 6 bits are fields of 32-bit lanes: a
vector of lanes holds neighbours along k, one lane for each column. A lane holds as many fields as fit; for 5 and 6 bits
two bits are left over, and those of a group's lanes together are the group's last fields. Codes of 3 bits are lanes of
the two low bits of a group, and then lanes of 16 bits with the high ones. Codes of 8 bits and plain numbers are stored
as rows over the panel's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np

from ..target.cpu_cores import num_cores
from ..target.element_types import bytes_of
from .block_formats import BlockFormat, QuantizedRows, block_format, integer_format, split_numpy_rows, stored_scale_type

T = TypeVar("T")
Zeros = Callable[[Sequence[int], str], np.ndarray]
"""Function that allocates an array of a shape and an element type, filled with zeros."""

GROUPS = {1: 32, 2: 16, 3: 16, 4: 8, 5: 32, 6: 16, 8: 8, 16: 8}
"""Number of weights whose fields share a group of lanes, by the bits of a weight."""

HIGH_BITS = [4 * quad + i for quad in (0, 2, 1, 3) for i in range(4)]
"""Position of the high bit of each weight of a group of 3 bits: the second and the third four change places, so that
one shift brings each four to a byte of its own."""

_CHUNK_WEIGHTS = 1 << 19
"""Number of weights that a thread packs at a time: malloc keeps memory for numpy's temporaries of this size, a few
times a byte for each weight. It returns larger ones to Linux, and page faults then take longer than packing."""
_MAX_THREADS = 8


@dataclass(frozen=True)
class PanelPlan:
    """Layout of a panel in bytes, for a format, a depth and a number of columns."""

    form: BlockFormat
    depth: int
    columns: int

    @property
    def group(self) -> int:
        """Number of weights whose fields share a group of lanes."""
        return GROUPS[self.form.bits]

    @cached_property
    def block(self) -> int:
        """Number of weights that share a scale, at most the padded depth."""
        padded_depth = -(-self.depth // self.group) * self.group
        return padded_depth if self.form.is_plain else min(self.form.block, padded_depth)

    @cached_property
    def superblock_size(self) -> int:
        """Weights of a superblock."""
        return self.form.superblock_size if self.form.scale == "int8" else self.block

    @property
    def blocks(self) -> int:
        """Number of blocks of a superblock."""
        return self.superblock_size // self.block

    @property
    def superblocks(self) -> int:
        """Number of superblocks of a panel."""
        return -(-self.depth // self.superblock_size)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each part of a superblock, and its ``end``; parts that the format lacks are empty."""
        form, columns = self.form, self.columns
        sizes = {
            "superblock_scales": 2 * columns if form.scale == "int8" else 0,
            "superblock_minimums": 2 * columns if form.minimum == "int8" else 0,
            "scales": self.blocks * columns * _size(form.scale),
            "minimums": 0 if form.shares_bytes else self.blocks * columns * _size(form.minimum),
            "codes": self.superblock_size * form.bits // 8 * columns,
        }
        return dict(zip([*sizes, "end"], accumulate(sizes.values(), initial=0), strict=True))

    @property
    def panel_bytes(self) -> int:
        """Number of bytes of a panel."""
        return self.superblocks * self.offsets["end"]

    @property
    def words(self) -> int:
        """Number of lanes of 32 bits of a group, for codes that are fields of lanes."""
        return self.group * self.form.bits // 32

    @property
    def group_bytes(self) -> int:
        """Number of bytes of a group of all columns."""
        return self.group * self.form.bits // 8 * self.columns

    @property
    def fields(self) -> int:
        """Number of whole fields of a lane."""
        return 32 // self.form.bits

    def fits(self) -> bool:
        """Return whether groups do not straddle blocks."""
        return self.depth > 0 and (self.form.is_plain or self.block % self.group == 0)


def _size(kind: str) -> int:
    return bytes_of(stored_scale_type(kind)) if kind else 0


@dataclass(frozen=True)
class BlockSource:
    """Rows of weights as they are in a model."""

    # Operands of dequantize_blocks: rows of a file's bytes, or integers, scales and perhaps zero points.
    arrays: tuple[np.ndarray, ...]
    form: BlockFormat
    depth: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.arrays[0].shape[0])

    def quantized_rows(self, begin: int, end: int) -> QuantizedRows:
        """Quants, scales and minimums of some of the rows."""
        arrays = [array[begin:end] for array in self.arrays]
        if self.form.superblock_bytes:
            return split_numpy_rows(arrays[0], self.form, self.depth)
        return _integer_rows(arrays, self.form, self.depth)


def source_form(format_name: str, bits: int, block: int, has_zeros: bool) -> BlockFormat:
    """The format of the operands of a call to dequantize_blocks."""
    return block_format(format_name) if format_name else integer_format(bits, block, has_zeros)


def _integer_rows(arrays: list[np.ndarray], form: BlockFormat, depth: int) -> QuantizedRows:
    """Weights of 2, 4 or 8 bits, their scales, and zero points as minimums."""
    data, scales, bits = arrays[0], arrays[1], form.bits
    quants = data
    if bits < 8:
        mask = np.uint8((1 << bits) - 1)
        quants = np.stack([data >> np.uint8(bit) & mask for bit in range(0, 8, bits)], -1).reshape(len(data), -1)
    minimums = None
    if len(arrays) > 2:
        minimums = ((-form.min_code - arrays[2].astype(np.float64)) * scales).astype(np.float32)
    return QuantizedRows(quants[:, :depth], scales, minimums)


@dataclass(frozen=True)
class Panels:
    """Weights in panels of columns; one operand of bytes, ``(panels, bytes)``."""

    columns: int  # number of columns of a panel

    lhs_types = ("float32",)  # element types of the left operand
    index_map = ("panel", "byte")
    weight_type = "uint8"

    def fits(self, form: BlockFormat, depth: int) -> bool:
        """Return whether kernels multiply weights of a format."""
        return PanelPlan(form, depth, self.columns).fits()

    def multiplies(self, form: BlockFormat, dtype: str) -> bool:
        """Return whether kernels multiply a left operand of a type by weights that `fits` accepts."""
        return dtype in self.lhs_types

    def fits_matrices(self, n: int) -> bool:
        """Return whether kernels multiply each row by one of several matrices of n columns."""
        return n > 0

    def shapes(self, n: int, form: BlockFormat, depth: int, matrices: int = 1) -> list[list[int]]:
        """Shape of the only operand, for `matrices` matrices with n columns each."""
        return [[matrices * -(-n // self.columns), PanelPlan(form, depth, self.columns).panel_bytes]]

    def pack(self, source: BlockSource, matrices: int = 1, zeros: Zeros = np.zeros) -> list[np.ndarray]:
        """Pack weights of a model as kernels read them, in chunks, so that temporaries stay small.

        Each of `matrices` matrices of equal rows begins with a panel of its own. `zeros` allocates the result.
        """
        plan = PanelPlan(source.form, source.depth, self.columns)
        rows = source.rows // matrices
        panels = -(-rows // self.columns)
        packed = zeros((matrices, panels, plan.superblocks, plan.offsets["end"]), "uint8")

        def pack_panels(begin: int, end: int) -> None:
            for first, matrix in zip(range(0, source.rows, rows or 1), packed, strict=False):
                chunk = source.quantized_rows(first + begin * self.columns, first + min(end * self.columns, rows))
                _pack_rows(chunk, plan, matrix[begin:end])

        in_chunks(panels, self.columns * source.depth, pack_panels)
        return [packed.reshape(matrices * panels, plan.panel_bytes)]


def in_chunks(count: int, weights: int, pack: Callable[[int, int], T]) -> list[T]:
    """Call `pack` for ranges of `count` items of so many weights each, in threads; returns the results in order."""
    size = max(1, _CHUNK_WEIGHTS // max(weights, 1))
    begins = range(0, max(count, 1), size)
    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS)) as pool:  # numpy computes without Python's lock
        return list(pool.map(pack, begins, [min(begin + size, count) for begin in begins]))


def _pack_rows(rows: QuantizedRows, plan: PanelPlan, target: np.ndarray) -> None:
    """Write rows to their panels: ``(panels, superblocks, bytes of a superblock)``."""
    form, offsets = plan.form, plan.offsets
    rows = rows.joined_scales() if form.shares_bytes else rows
    ends = dict(zip(offsets, [*list(offsets.values())[1:], 0], strict=True))

    def write(name: str, values: np.ndarray | None, dtype: str, count: int) -> None:
        """Write the numbers of each row, `count` for each superblock."""
        if values is not None and dtype:
            padded = padded_to(values, target.shape[0] * plan.columns, plan.superblocks * count, dtype)
            lanes = padded.reshape(target.shape[0], plan.columns, plan.superblocks, count).transpose(0, 2, 3, 1)
            target[:, :, offsets[name] : ends[name]] = _bytes(lanes, target.shape[:2])

    write("superblock_scales", rows.superblock_scales, "float16", 1)
    write("superblock_minimums", rows.superblock_minimums, "float16", 1)
    write("scales", rows.scales, stored_scale_type(form.scale), plan.blocks)
    write("minimums", rows.minimums, stored_scale_type(form.minimum), plan.blocks)
    if form.is_plain:
        fields = rows.quants
        if form.name == "bf16":
            fields = (np.ascontiguousarray(fields).view(np.uint32) >> 16).astype(np.uint16)
        write("codes", fields, "uint16" if form.name == "bf16" else "float16", plan.superblock_size)
    elif form.bits == 8:
        write("codes", rows.quants + np.uint8(form.min_code & 255), "uint8", plan.superblock_size)
    else:
        target[:, :, offsets["codes"] :] = _bytes(_lanes(rows.quants, plan, target.shape[0]), target.shape[:2])


def padded_to(values: np.ndarray, rows: int, columns: int, dtype: str) -> np.ndarray:
    """Values converted to a type and padded with zeros."""
    values = values[:, :columns]
    if values.shape == (rows, columns) and values.dtype == dtype:
        return values
    padded = np.zeros((rows, columns), dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


def _bytes(lanes: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    little = np.ascontiguousarray(lanes).astype(lanes.dtype.newbyteorder("<"), copy=False)
    return little.reshape(*lead, -1).view(np.uint8)


def _joined_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Fields of 1, 2 or 4 bits, one in each byte, joined to lanes of 32 bits, pair by pair, eight at a time."""
    words = fields.view("<u8")
    for step in range(3):
        unit, width = 8 << step, bits << step  # each unit of bits begins with `width` bits of fields
        words = words | words >> np.uint64(unit - width)
        words &= np.uint64(((1 << 2 * width) - 1) * sum(1 << at for at in range(0, 64, 2 * unit)))
    return words.astype(f"<u{bits}").reshape(-1).view("<u4")


def _lanes(fields: np.ndarray, plan: PanelPlan, panels: int) -> np.ndarray:
    """Fields as lanes of 32 bits, ``(panels, superblocks, groups * words, columns)``; of 3 bits as bytes."""
    bits, words, lane_fields = plan.form.bits, plan.words, plan.fields
    columns, groups = plan.columns, plan.superblocks * plan.superblock_size // plan.group
    padded = padded_to(fields, panels * columns, groups * plan.group, "uint8").reshape(panels, columns, groups, -1)
    if bits in (1, 2, 4):  # a lane without bits left over
        return _joined_fields(padded, bits).reshape(panels, columns, plan.superblocks, -1).transpose(0, 2, 3, 1)
    if bits == 3:
        low = _joined_fields(padded & np.uint8(3), 2)
        high = np.packbits((padded >> np.uint8(2)).reshape(-1), bitorder="little").view("<u2")
        high = high & 0xF00F | (high & 0x00F0) << 4 | (high & 0x0F00) >> 4  # to the order of `HIGH_BITS`
        planes = [plane.reshape(panels, columns, groups).swapaxes(1, 2) for plane in (low, high)]
        return np.concatenate([_bytes(plane, (panels, groups)) for plane in planes], axis=-1)
    lanes = np.zeros((panels, columns, groups, words), np.uint32)
    complete = padded[..., : words * lane_fields].reshape(panels, columns, groups, words, lane_fields)
    for index in range(lane_fields):
        lanes |= complete[..., index].astype(np.uint32) << np.uint32(index * bits)
    left_over = np.zeros((panels, columns, groups), np.uint32)
    for field in range(words * lane_fields, plan.group):
        left_over |= padded[..., field].astype(np.uint32) << np.uint32((field - words * lane_fields) * bits)
    if plan.group > words * lane_fields:
        for word in range(words):
            lanes[..., word] |= (left_over >> np.uint32(2 * word) & np.uint32(3)) << np.uint32(30)
    return lanes.reshape(panels, columns, plan.superblocks, -1).transpose(0, 2, 3, 1)
