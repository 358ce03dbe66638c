"""Weights in blocks as kernels of CPUs read them: panels of columns, in the bits of the file.

A panel is one stretch of bytes, which a kernel reads from its beginning to its end: records along k, each with the
scales and minimums of all columns of the panel, then the codes. Codes of 2, 4, 5 and 6 bits are fields of 32-bit lanes:
a vector of lanes holds neighbours along k of as many columns. As many fields as fit stand in a lane; of 5 and 6 bits
two bits are left over, and those of a group's lanes together are its last fields. Codes of 8 bits and plain numbers
are rows of a panel's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..target.element_types import bytes_of
from .block_formats import BlockFormat, Parts, block_format, of_integers, read_rows

GROUPS = {2: 16, 4: 8, 5: 32, 6: 16, 8: 8, 16: 8}
"""Weights whose fields stand together, by their bits."""

_CHUNK = 1 << 22
"""Weights that are packed at once: what numpy holds of them besides is a few times as much."""


@dataclass(frozen=True)
class RecordPlan:
    """Where the parts of records lie, for a format, a depth, and the columns of a panel; in bytes."""

    form: BlockFormat
    depth: int
    columns: int

    @property
    def group(self) -> int:
        """Weights whose fields stand together."""
        return GROUPS[self.form.bits]

    @cached_property
    def block(self) -> int:
        """Weights that share a scale; those of one block are no more than there are."""
        whole = -(-self.depth // self.group) * self.group
        return whole if self.form.is_plain else min(self.form.block, whole)

    @cached_property
    def span(self) -> int:
        """Weights of a record."""
        return self.form.span if self.form.scale == "int8" else self.block

    @property
    def blocks(self) -> int:
        """Number of blocks of a record."""
        return self.span // self.block

    @property
    def records(self) -> int:
        """Number of records of a panel."""
        return -(-self.depth // self.span)

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each part of a record begins, and its ``end``; parts that the format lacks are empty."""
        form, columns = self.form, self.columns
        sizes = {
            "outer_scales": 2 * columns if form.scale == "int8" else 0,
            "outer_minimums": 2 * columns if form.minimum == "int8" else 0,
            "scales": self.blocks * columns * _size(form.scale),
            "minimums": self.blocks * columns * _size(form.minimum),
            "codes": self.span * form.bits // 8 * columns,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += size
        return {**places, "end": at}

    @property
    def panel_bytes(self) -> int:
        """Number of bytes of a panel."""
        return self.records * self.places["end"]

    @property
    def words(self) -> int:
        """Lanes of a group, of codes that are fields of lanes."""
        return self.group * self.form.bits // 32

    @property
    def fields(self) -> int:
        """Whole fields of a lane."""
        return 32 // self.form.bits

    def fits(self) -> bool:
        """Return whether groups do not straddle blocks."""
        return self.depth > 0 and (self.form.is_plain or self.block % self.group == 0)


def _size(kind: str) -> int:
    return bytes_of(kind) if kind else 0


@dataclass(frozen=True)
class BlockSource:
    """Rows of weights as a model has them.

    Attributes
    ----------
    arrays : tuple of array
        Operands of dequantize_blocks: rows of a file's bytes, or integers, scales and perhaps zero points.
    form : BlockFormat
    depth : int
    """

    arrays: tuple[np.ndarray, ...]
    form: BlockFormat
    depth: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.arrays[0].shape[0])

    def parts(self, begin: int, end: int) -> Parts:
        """Some of the rows, taken apart."""
        some = [array[begin:end] for array in self.arrays]
        if self.form.record_bytes:
            return read_rows(some[0], self.form, self.depth)
        return _parts_of_integers(some, self.form, self.depth)


def source_form(format_name: str, bits: int, block: int, has_zeros: bool) -> BlockFormat:
    """The format of the operands of a call of dequantize_blocks."""
    return block_format(format_name) if format_name else of_integers(bits, block, has_zeros)


def _parts_of_integers(arrays: list[np.ndarray], form: BlockFormat, depth: int) -> Parts:
    """Weights of 2, 4 or 8 bits, their scales, and zero points as minimums."""
    data, scales, bits = arrays[0], arrays[1], form.bits
    fields = data
    if bits < 8:
        mask = np.uint8((1 << bits) - 1)
        fields = np.stack([data >> np.uint8(at) & mask for at in range(0, 8, bits)], -1).reshape(len(data), -1)
    minimums = None
    if len(arrays) > 2:
        minimums = ((-form.low - arrays[2].astype(np.float64)) * scales).astype(np.float32)
    return Parts(fields[:, :depth], scales, minimums)


@dataclass(frozen=True)
class Panels:
    """Weights in panels of columns; one operand of bytes, ``(panels, bytes)``.

    Attributes
    ----------
    columns : int
        Number of columns of a panel.
    """

    columns: int

    lhs_types = ("float32",)
    """Element types of the left operand."""
    index_map = ("panel", "byte")
    weight_type = "uint8"

    def fits(self, form: BlockFormat, depth: int) -> bool:
        """Return whether kernels multiply weights of a format."""
        return RecordPlan(form, depth, self.columns).fits()

    def shapes(self, n: int, form: BlockFormat, depth: int, matrices: int = 1) -> list[list[int]]:
        """Shape of the operand, the only one: of `matrices` with n columns each."""
        return [[matrices * -(-n // self.columns), RecordPlan(form, depth, self.columns).panel_bytes]]

    def pack(self, source: BlockSource, matrices: int = 1) -> list[np.ndarray]:
        """Weights of a model as kernels read them, in pieces, so that little memory is needed besides.

        Each of `matrices`, of as many rows each, begins with a panel of its own.
        """
        plan = RecordPlan(source.form, source.depth, self.columns)
        rows = source.rows // matrices
        panels = -(-rows // self.columns)
        packed = np.zeros((matrices, panels, plan.records, plan.places["end"]), np.uint8)
        for number, matrix in enumerate(packed):
            for begin, end in _pieces(panels, max(1, _CHUNK // (self.columns * source.depth))):
                first = number * rows
                parts = source.parts(first + begin * self.columns, first + min(end * self.columns, rows))
                _pack_parts(parts, plan, matrix[begin:end])
        return [packed.reshape(matrices * panels, plan.panel_bytes)]


def _pieces(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def _pack_parts(parts: Parts, plan: RecordPlan, target: np.ndarray) -> None:
    """Write rows, taken apart, to their panels: ``(panels, records, bytes of a record)``."""
    form, places = plan.form, plan.places
    ends = dict(zip(places, [*list(places.values())[1:], 0], strict=True))

    def write(name: str, values: np.ndarray | None, dtype: str, count: int) -> None:
        """Numbers of each row, `count` of a record."""
        if values is not None and dtype:
            rows = _padded(values, target.shape[0] * plan.columns, plan.records * count, dtype)
            lanes = rows.reshape(target.shape[0], plan.columns, plan.records, count).transpose(0, 2, 3, 1)
            target[:, :, places[name] : ends[name]] = _bytes(lanes, target.shape[:2])

    write("outer_scales", parts.superblock_scales, "float16", 1)
    write("outer_minimums", parts.outer_minimums, "float16", 1)
    write("scales", parts.scales, "uint8" if form.scale == "int8" else form.scale, plan.blocks)
    write("minimums", parts.minimums, "uint8" if form.minimum == "int8" else form.minimum, plan.blocks)
    if form.is_plain:
        fields = parts.fields
        if form.name == "bf16":
            fields = (np.ascontiguousarray(fields).view(np.uint32) >> 16).astype(np.uint16)
        write("codes", fields, "uint16" if form.name == "bf16" else "float16", plan.span)
    elif form.bits == 8:
        write("codes", parts.fields + np.uint8(form.low & 255), "uint8", plan.span)
    else:
        target[:, :, places["codes"] :] = _bytes(_lanes(parts.fields, plan, target.shape[0]), target.shape[:2])


def _padded(values: np.ndarray, rows: int, columns: int, dtype: str) -> np.ndarray:
    """Values of a type, zeros behind them."""
    values = values[:, :columns]
    if values.shape == (rows, columns) and values.dtype == dtype:
        return values
    padded = np.zeros((rows, columns), dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


def _bytes(lanes: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    little = np.ascontiguousarray(lanes).astype(lanes.dtype.newbyteorder("<"), copy=False)
    return little.reshape(*lead, -1).view(np.uint8)


def _lanes(fields: np.ndarray, plan: RecordPlan, panels: int) -> np.ndarray:
    """Fields as lanes of 32 bits, ``(panels, records, groups * words, columns)``."""
    bits, words, per = plan.form.bits, plan.words, plan.fields
    columns, groups = plan.columns, plan.records * plan.span // plan.group
    padded = _padded(fields, panels * columns, groups * plan.group, "uint8").reshape(panels, columns, groups, -1)
    lanes = np.zeros((panels, columns, groups, words), np.uint32)
    whole = padded[..., : words * per].reshape(panels, columns, groups, words, per)
    for slot in range(per):
        lanes |= whole[..., slot].astype(np.uint32) << np.uint32(slot * bits)
    left_over = np.zeros((panels, columns, groups), np.uint32)
    for number in range(words * per, plan.group):
        left_over |= padded[..., number].astype(np.uint32) << np.uint32((number - words * per) * bits)
    if plan.group > words * per:
        for word in range(words):
            lanes[..., word] |= (left_over >> np.uint32(2 * word) & np.uint32(3)) << np.uint32(30)
    return lanes.reshape(panels, columns, plan.records, -1).transpose(0, 2, 3, 1)
