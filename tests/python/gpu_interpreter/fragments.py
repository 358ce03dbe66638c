"""Instructions of warps on fragments: ``ldmatrix``, ``stmatrix`` and ``mma.sync``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .faults import KernelFault
from .ptx import TYPES, Instruction, bits_of, instruction, place_of, pointer, register_writer
from .warps import WARP, _complete_warps

_PAIR = np.dtype(np.uint16)


def _row_addresses(lanes: Any, address: Any, count: int) -> np.ndarray:
    """(warps, count * 8) addresses of the rows of matrices."""
    every = np.broadcast_to(np.asarray(address), (lanes.count,)).reshape(-1, WARP)
    used = every[:, : 8 * count]
    if (used.astype(np.int64) % 16).any():
        raise KernelFault("a row of a matrix of ldmatrix or stmatrix is not at a multiple of 16 bytes")
    return used


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16")
def _ldmatrix(expressions: Any, one: Instruction) -> Any:
    count = int(next(part for part in one.parts if re.fullmatch("x[124]", part))[1:])
    targets = [register_writer(expressions, target) for target in one.operands[:count]]
    address = pointer(expressions, one.operands[count])
    is_transposed = "trans" in one.parts

    def evaluate(lanes: Any, mask: Any) -> None:
        _complete_warps(lanes, mask, "ldmatrix")
        addresses = np.broadcast_to(np.asarray(address(lanes, mask)), (lanes.count,))
        _row_addresses(lanes, addresses, count)
        # Lanes whose addresses are not used read nothing.
        used = np.tile(np.arange(WARP) < 8 * count, lanes.count // WARP)
        part = used if mask is None else used & mask
        view, index, instance = place_of(lanes, part, "shared", addresses, _PAIR)
        every = np.broadcast_to(index, (lanes.count,))[:, None] + np.arange(8)
        rows = np.broadcast_to(view.memory.load(lanes, part, view, every, instance), (lanes.count, 8))
        matrices = rows.reshape(-1, WARP, 8)[:, : 8 * count].reshape(-1, count, 8, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(matrices).reshape(-1, count, WARP, 2).view(np.uint32)[..., 0]
        for number, write in enumerate(targets):
            write(lanes, mask, pairs[:, number].reshape(-1))

    return evaluate


@instruction(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16")
def _stmatrix(expressions: Any, one: Instruction) -> Any:
    count = int(next(part for part in one.parts if re.fullmatch("x[124]", part))[1:])
    address = pointer(expressions, one.operands[0])
    values = [expressions.compiled(value) for value in one.operands[1 : 1 + count]]
    is_transposed = "trans" in one.parts

    def evaluate(lanes: Any, mask: Any) -> None:
        _complete_warps(lanes, mask, "stmatrix")
        addresses = np.broadcast_to(np.asarray(address(lanes, mask)), (lanes.count,))
        _row_addresses(lanes, addresses, count)
        words = [bits_of(lanes, value(lanes, mask), np.dtype(np.uint32)).reshape(-1, WARP) for value in values]
        matrices = np.ascontiguousarray(np.stack(words, axis=1)).view(_PAIR).reshape(-1, count, 8, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        rows = np.zeros((lanes.count // WARP, WARP, 8), _PAIR)
        rows[:, : 8 * count] = matrices.reshape(-1, 8 * count, 8)
        used = np.tile(np.arange(WARP) < 8 * count, lanes.count // WARP)
        part = used if mask is None else used & mask
        view, index, instance = place_of(lanes, part, "shared", addresses, _PAIR)
        every = np.broadcast_to(index, (lanes.count,))[:, None] + np.arange(8)
        view.memory.store(lanes, part, view, every, rows.reshape(-1, 8), instance)

    return evaluate


@instruction(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\..*")
def _mma(expressions: Any, one: Instruction) -> Any:
    shape = re.search(r"m16n8k(\d+)", one.text)
    assert shape is not None
    depth = int(shape[1])
    names = [part for part in one.parts if part in TYPES or part == "tf32"]
    result, left_type, right_type, before_type = names
    is_tf32 = left_type == "tf32"
    types = [np.dtype(np.float32) if name == "tf32" else TYPES[name] for name in (left_type, right_type)]
    per = 4 // types[0].itemsize
    sums = 4 if result != "f16" else 2
    a_count, b_count = 16 * depth // WARP // per, 8 * depth // WARP // per
    targets = [register_writer(expressions, target) for target in one.operands[:sums]]
    values = [expressions.compiled(value) for value in one.operands[sums:]]

    def evaluate(lanes: Any, mask: Any) -> None:
        _complete_warps(lanes, mask, "mma.sync")
        word = np.dtype(np.uint32)
        words = [bits_of(lanes, v(lanes, mask), word) for v in values[: a_count + b_count + sums]]
        warps = lanes.count // WARP

        def fragment(part: list[np.ndarray], dtype: np.dtype, rows: int) -> np.ndarray:
            stacked = np.ascontiguousarray(np.stack(part, axis=1)).view(dtype)  # lanes, registers * per
            # Lane l: row l // 4 (and, of the left operand, + 8 in every second register), k from per * (l % 4).
            halves = rows // 8
            shaped = stacked.reshape(warps, 8, 4, -1, halves, per)
            return shaped.transpose(0, 4, 1, 3, 2, 5).reshape(warps, rows, depth)

        a = fragment(words[:a_count], types[0], 16)
        b = fragment(words[a_count : a_count + b_count], types[1], 8)
        exact = np.int64 if result == "s32" else np.float32
        if is_tf32:
            a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
        before = np.stack(words[a_count + b_count :], axis=1)
        kind = TYPES[before_type]
        c = np.ascontiguousarray(before).view(kind).reshape(warps, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
        c = c.reshape(warps, 16, 8).astype(exact)
        d = np.einsum("wmk,wnk->wmn", a.astype(exact), b.astype(exact)) + c
        out = d.astype(TYPES[result]).reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(lanes.count, 4)
        out = np.ascontiguousarray(out)
        registers = out.view(np.uint32)
        for number, write in enumerate(targets):
            write(lanes, mask, registers[:, number])

    return evaluate
