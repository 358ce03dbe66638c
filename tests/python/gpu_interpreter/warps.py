"""Operations of warps: shuffles, votes, and atomic operations on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .calls import EXTERNS, HANDLERS, handles, result_type
from .faults import KernelFault
from .memory import pointed

WARP = 32


def _complete_warps(lanes: Any, mask: Any, what: str) -> None:
    """Check that the whole warp executes an operation of the warp."""
    if mask is None and lanes.count % WARP == 0:
        return
    active = np.ones(lanes.count, bool) if mask is None else mask
    padded = np.zeros(-(-lanes.count // WARP) * WARP, bool)
    padded[: lanes.count] = active
    present = np.zeros(len(padded), bool)
    present[: lanes.count] = True
    by_warp, there = padded.reshape(-1, WARP), present.reshape(-1, WARP)
    partial = by_warp.any(axis=1) & (by_warp != there).any(axis=1)
    if partial.any():
        first = int(np.flatnonzero(partial)[0]) * WARP
        raise KernelFault(f"{what} is not reached by all threads of the warp of {lanes.name(first)}")


def _over_lanes(lanes: Any, value: Any) -> np.ndarray:
    value = np.asarray(value)
    if value.ndim == 2:
        return np.broadcast_to(value, (lanes.count, value.shape[1]))
    return np.broadcast_to(value, (lanes.count,))


def _shuffle(source_of: Callable[[np.ndarray, Any, Any], np.ndarray], first: int) -> Any:
    """The handler of a shuffle: `source_of` (lane in its part of the warp, operand, width) gives the part's lane."""

    def handler(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
        arguments = list(call.args)[first:]
        value, operand, width = (expressions.compiled(a) for a in arguments[1:4])
        mask_argument = expressions.compiled(arguments[0])

        def evaluate(lanes: Any, mask: Any) -> Any:
            mask_argument(lanes, mask)
            _complete_warps(lanes, mask, "a shuffle")
            values, part = _over_lanes(lanes, value(lanes, mask)), int(np.max(width(lanes, mask)))
            start = lanes.everyone // part * part
            source = source_of(lanes.everyone - start, np.asarray(operand(lanes, mask), np.int64), part)
            inside = (source >= 0) & (source < part)
            lane = np.where(inside, start + source, lanes.everyone)
            return values[np.minimum(lane, lanes.count - 1)]

        return evaluate

    return handler


_KINDS: dict[str, Callable[[np.ndarray, Any, Any], np.ndarray]] = {
    "": lambda lane, operand, width: operand % width + 0 * lane,
    "_up": lambda lane, operand, width: lane - operand,
    "_down": lambda lane, operand, width: lane + operand,
    "_xor": lambda lane, operand, width: lane ^ operand,
}
for _kind, _source in _KINDS.items():
    HANDLERS[f"tirx.tvm_warp_shuffle{_kind}"] = _shuffle(_source, 0)
    HANDLERS[f"tirx.cuda.__shfl{_kind}_sync"] = _shuffle(_source, 0)


@handles("tirx.tvm_warp_activemask", "tirx.cuda.__activemask")
def _activemask(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    dtype = result_type(call)
    return lambda lanes, mask: np.asarray(0xFFFFFFFF, np.uint32).view(dtype if dtype.itemsize == 4 else np.uint32)[()]


def _ballots(lanes: Any, mask: Any, predicate: Any) -> np.ndarray:
    bits = np.zeros(-(-lanes.count // WARP) * WARP, np.uint64)
    bits[: lanes.count] = _over_lanes(lanes, predicate) != 0
    if mask is not None:
        bits[: lanes.count] *= mask
    words = (bits.reshape(-1, WARP) << np.arange(WARP, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    return np.repeat(words, WARP)[: lanes.count]


@handles("tirx.cuda.ballot_sync", "tirx.cuda.any_sync")
def _ballot(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    predicate, dtype = expressions.compiled(call.args[-1]), result_type(call)
    anyone = str(call.op.name).endswith("any_sync")

    def evaluate(lanes: Any, mask: Any) -> Any:
        _complete_warps(lanes, mask, "a vote")
        words = _ballots(lanes, mask, predicate(lanes, mask))
        return (words != 0).astype(dtype) if anyone else words.astype(dtype)

    return evaluate


@handles("tirx.cuda.warp_reduce")
def _warp_reduce(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    value, kind, width = expressions.compiled(call.args[0]), str(call.args[1].value), int(call.args[2])
    reduce = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kind]

    def evaluate(lanes: Any, mask: Any) -> Any:
        _complete_warps(lanes, mask, "a reduction of a warp")
        values, step = _over_lanes(lanes, value(lanes, mask)), width // 2
        while step:
            values = reduce(values, values[lanes.everyone ^ step])
            step //= 2
        return values

    return evaluate


@handles("tirx.cuda.warp_sync")
def _warp_sync(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    def evaluate(lanes: Any, mask: Any) -> None:
        _complete_warps(lanes, mask, "__syncwarp")
        for first in lanes.active(mask)[::WARP]:
            start = int(first) // WARP * WARP
            members = lanes.member[start : start + WARP]
            lanes.clocks.join(int(lanes.instance[start]) // lanes.blocks.cluster, members)

    return evaluate


def atomic(lanes: Any, mask: Any, view: Any, index: Any, value: Any, function: Any) -> Any:
    """Read, combine and write elements, one thread after another; returns the old values."""
    memory = view.memory
    elements = _over_lanes(lanes, index)
    values = _over_lanes(lanes, value)
    memory.note_atomic(lanes, mask, view, elements)
    before = np.zeros(lanes.count, view.dtype)
    data = memory.bytes.view(view.dtype)
    base = view.offset // view.dtype.itemsize
    for lane in lanes.active(mask):
        cell = (int(lanes.instance[lane]) if memory.shared else 0, base + int(elements[lane]))
        before[lane] = data[cell]
        data[cell] = function(data[cell], values[lane])
    return before


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda old, new: old + new,
    "Max": max,
    "Min": min,
    "Exch": lambda old, new: new,
    "And": lambda old, new: old & new,
    "Or": lambda old, new: old | new,
    "Xor": lambda old, new: old ^ new,
}


def _atomic(function: Callable[[Any, Any], Any], first: int) -> Any:
    def handler(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
        address, value = expressions.address(call.args[first]), expressions.compiled(call.args[first + 1])
        expressions.names.accessed(4)

        def evaluate(lanes: Any, mask: Any) -> Any:
            added = np.asarray(value(lanes, mask))
            view, index = pointed(lanes, mask, address(lanes, mask), added.dtype)
            return atomic(lanes, mask, view, index, added, function)

        return evaluate

    return handler


for _name, _function in _ATOMIC.items():
    EXTERNS[f"atomic{_name}"] = _atomic(_function, 1)
HANDLERS["tirx.cuda.atomic_add"] = _atomic(_ATOMIC["Add"], 0)
