"""PTX instructions: calls of ``T.ptx`` are read as instruction text and operands, and found here by the text."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm.backend.cuda.codegen.utils import parse_str
from tvm.backend.cuda.ptx.table import TABLE

from .calls import HANDLERS, handles
from .expressions import both
from .faults import KernelFault
from .memory import View, pointed, shared_place
from .warps import WARP, _complete_warps, atomic

TYPES: dict[str, np.dtype] = {
    "b8": np.dtype(np.uint8), "u8": np.dtype(np.uint8), "s8": np.dtype(np.int8), "b16": np.dtype(np.uint16),
    "u16": np.dtype(np.uint16), "s16": np.dtype(np.int16), "b32": np.dtype(np.uint32), "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32), "b64": np.dtype(np.uint64), "u64": np.dtype(np.uint64), "s64": np.dtype(np.int64),
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
"""numpy's types for PTX's."""


@dataclass(frozen=True)
class Instruction:
    """An instruction: its text with all modifiers, its operands, the predicate under which it runs."""

    text: str
    operands: list[Any]
    predicate: Any

    @property
    def parts(self) -> list[str]:
        """The modifiers."""
        return self.text.split(".")


def instruction_of(call: Any) -> Instruction:
    """Read a call of ``T.ptx``."""
    entry = TABLE[str(call.op.name).removeprefix("tirx.ptx.")]
    arguments = list(call.args)
    count = len(entry.slots)
    flags = parse_str(arguments[-1]).split(",")
    tokens = [parse_str(a) for a in arguments[len(arguments) - count - 1 : -1]]
    operands = arguments[: len(arguments) - count - 1]
    if any(flag.startswith("s") and flag != "sink" for flag in flags):
        raise NotImplementedError(f"sunk operands: {call}")
    predicate = operands.pop() if "pred" in flags else None
    text = ".".join([entry.mnemonic or entry.family, *(token for token in tokens if token)])
    return Instruction(text, operands, predicate)


PTX: list[tuple[re.Pattern[str], Any]] = []
PTX_WAITS: list[tuple[re.Pattern[str], Any]] = []


def instruction(pattern: str, waits: bool = False) -> Callable[[Any], Any]:
    """Register a compiler of instructions whose text matches a pattern."""

    def register(handler: Any) -> Any:
        (PTX_WAITS if waits else PTX).append((re.compile(pattern), handler))
        return handler

    return register


def _handler_of(table: list[tuple[re.Pattern[str], Any]], text: str) -> Any:
    return next((handler for pattern, handler in table if pattern.fullmatch(text)), None)


def compiled(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    """The evaluator of an instruction in which nobody waits."""
    one = instruction_of(call)
    handler = _handler_of(PTX, one.text)
    if handler is None:
        raise NotImplementedError(f"the interpreter does not know the instruction {one.text}: {str(call)[:300]}")
    return _predicated(expressions, one, handler(expressions, one))


def waiting(call: Any) -> Any:
    """Compiler of an instruction in which threads may wait; None for others."""
    one = instruction_of(call)
    handler = _handler_of(PTX_WAITS, one.text)
    return None if handler is None else lambda expressions, _: handler(expressions, one)


def _predicated(expressions: Any, one: Instruction, run: Any) -> Any:
    if one.predicate is None:
        return run
    predicate = expressions.compiled(one.predicate)

    def evaluate(lanes: Any, mask: Any) -> Any:
        holds = predicate(lanes, mask) != 0
        if np.ndim(holds) == 0:
            return run(lanes, mask) if holds else None
        part = both(mask, holds)
        return run(lanes, part) if part.any() else None

    return evaluate


for _name in TABLE:
    HANDLERS[f"tirx.ptx.{_name}"] = compiled


@handles("tirx.ptx.addr")
def _address(expressions: Any, call: Any) -> Any:
    base, offset = expressions.compiled(call.args[0]), expressions.compiled(call.args[1])

    def evaluate(lanes: Any, mask: Any) -> Any:
        start = np.asarray(base(lanes, mask))
        return start + np.asarray(offset(lanes, mask)).astype(start.dtype)

    return evaluate


def pointer(expressions: Any, operand: Any) -> Callable[[Any, Any], Any]:
    """An address: the value of a register, or the beginning of a buffer."""
    if type(operand).__name__ == "Var" and expressions.names.is_buffer(operand):
        return expressions.address(operand)
    return expressions.compiled(operand)


def register_writer(expressions: Any, target: Any) -> Callable[[Any, Any, Any], None]:
    """The function that writes bits to a register: an element of a local buffer."""
    view, index = expressions.place(target)

    def write(lanes: Any, mask: Any, value: Any) -> None:
        place = view(lanes)
        bits = np.broadcast_to(np.asarray(value), (lanes.count,))
        if bits.dtype.itemsize < place.dtype.itemsize:
            bits = bits.astype(f"{'i' if bits.dtype.kind == 'i' else 'u'}{place.dtype.itemsize}")
        if bits.dtype.itemsize != place.dtype.itemsize:
            raise KernelFault(f"{bits.dtype.itemsize} bytes are written to a register of {place.dtype.itemsize}")
        place.memory.store(lanes, mask, place, index(lanes, mask), np.ascontiguousarray(bits).view(place.dtype))

    return write


def bits_of(lanes: Any, value: Any, dtype: np.dtype) -> np.ndarray:
    """A register's bits as another type of the same size; of a larger register the lower ones."""
    value = np.ascontiguousarray(np.broadcast_to(np.asarray(value), (lanes.count,)))
    if value.dtype.itemsize > dtype.itemsize:
        value = value.astype(f"u{dtype.itemsize}")
    if value.dtype.itemsize < dtype.itemsize:
        value = value.astype(f"u{dtype.itemsize}")
    return value.view(dtype)


def _memory_of(text: str) -> tuple[str, int, np.dtype]:
    """State space, number of elements and element type of a load or store."""
    parts = text.split(".")
    space = next((part for part in parts if part.split("::")[0] in ("shared", "global", "local")), "generic")
    count = next((int(part[1:]) for part in parts if re.fullmatch(r"v[248]", part)), 1)
    return space, count, TYPES[parts[-1]]


def place_of(lanes: Any, mask: Any, space: str, address: Any, dtype: np.dtype) -> tuple[View, Any, Any]:
    """View, index and (shared memory) block of addresses in a state space."""
    if not space.startswith("shared"):
        view, index = pointed(lanes, mask, address, dtype)
        return view, index, None
    active = lanes.active(mask)
    used = np.zeros(lanes.count, np.uint64)  # what lanes that do nothing have in a register may be anything
    used[active] = np.broadcast_to(np.asarray(address), (lanes.count,))[active]
    instance, offset = shared_place(lanes, used)
    if (offset[active] % dtype.itemsize).any():
        raise KernelFault(f"an address of shared memory is not a multiple of {dtype.itemsize} bytes")
    if space == "shared" and (instance[active] != lanes.instance[active]).any():
        raise KernelFault("shared memory of another block is accessed without .shared::cluster")
    for other in np.unique(instance[active]):
        if lanes.blocks.running[int(other)] == 0:
            raise KernelFault(f"shared memory of block {lanes.blocks.first + int(other)}, which may have ended")
    memory = lanes.blocks.shared
    return View(memory, 0, dtype, memory.size // dtype.itemsize, "shared memory"), offset // dtype.itemsize, instance


def _aligned(lanes: Any, mask: Any, address: Any, size: int) -> None:
    used = np.broadcast_to(np.asarray(address), (lanes.count,))[lanes.active(mask)]
    if (used.astype(np.int64) % size).any():
        raise KernelFault(f"an address of an access of {size} bytes is not a multiple of that")


@instruction(r"ld\..*")
def _load(expressions: Any, one: Instruction) -> Any:
    space, count, dtype = _memory_of(one.text)
    if space.startswith("shared"):
        expressions.names.accessed(dtype.itemsize * count)
    else:
        expressions.names.global_cell = min(expressions.names.global_cell, dtype.itemsize)
    targets = [register_writer(expressions, target) for target in one.operands[:count]]
    address = pointer(expressions, one.operands[count])

    def evaluate(lanes: Any, mask: Any) -> None:
        addresses = address(lanes, mask)
        _aligned(lanes, mask, addresses, count * dtype.itemsize)
        view, index, instance = place_of(lanes, mask, space, addresses, dtype)
        every = np.broadcast_to(index, (lanes.count,))[:, None] + np.arange(count)
        extra = {} if instance is None else {"instance": instance}
        values = np.broadcast_to(view.memory.load(lanes, mask, view, every, **extra), (lanes.count, count))
        for number, write in enumerate(targets):
            write(lanes, mask, values[:, number])

    return evaluate


@instruction(r"red\.(shared|global)\.add\.u32")
def _add(expressions: Any, one: Instruction) -> Any:
    space = one.text.split(".")[1]
    if space == "shared":
        expressions.names.accessed(4)
    else:
        expressions.names.global_cell = min(expressions.names.global_cell, 4)
    address, value = pointer(expressions, one.operands[0]), expressions.compiled(one.operands[1])

    def evaluate(lanes: Any, mask: Any) -> None:
        view, index, _ = place_of(lanes, mask, space, address(lanes, mask), TYPES["u32"])
        atomic(lanes, mask, view, index, value(lanes, mask), operator.add)

    return evaluate


@instruction(r"atom\.shared\.add\.u32")
def _fetch_add_shared(expressions: Any, one: Instruction) -> Any:
    expressions.names.accessed(4)
    write = register_writer(expressions, one.operands[0])
    address, value = pointer(expressions, one.operands[1]), expressions.compiled(one.operands[2])

    def evaluate(lanes: Any, mask: Any) -> None:
        view, index, _ = place_of(lanes, mask, "shared", address(lanes, mask), TYPES["u32"])
        write(lanes, mask, atomic(lanes, mask, view, index, value(lanes, mask), operator.add))

    return evaluate


@instruction(r"st\.(?!async).*")
def _store(expressions: Any, one: Instruction) -> Any:
    space, count, dtype = _memory_of(one.text)
    if space.startswith("shared"):
        expressions.names.accessed(dtype.itemsize * count)
    else:
        expressions.names.global_cell = min(expressions.names.global_cell, dtype.itemsize)
    address = pointer(expressions, one.operands[0])
    values = [expressions.compiled(value) for value in one.operands[1 : 1 + count]]

    def evaluate(lanes: Any, mask: Any) -> None:
        addresses = address(lanes, mask)
        _aligned(lanes, mask, addresses, count * dtype.itemsize)
        view, index, instance = place_of(lanes, mask, space, addresses, dtype)
        every = np.broadcast_to(index, (lanes.count,))[:, None] + np.arange(count)
        stored = np.stack([bits_of(lanes, value(lanes, mask), dtype) for value in values], axis=1)
        extra = {} if instance is None else {"instance": instance}
        view.memory.store(lanes, mask, view, every, stored, **extra)

    return evaluate


@instruction(r"cvt\.rn(\.relu)?\.(f16x2|bf16x2)\.f32")
def _convert_pair(expressions: Any, one: Instruction) -> Any:
    dtype, is_clamped = TYPES[one.parts[-2][:-2]], "relu" in one.parts
    write = register_writer(expressions, one.operands[0])
    high, low = (expressions.compiled(value) for value in one.operands[1:3])

    def evaluate(lanes: Any, mask: Any) -> None:
        pair = np.stack([bits_of(lanes, v(lanes, mask), TYPES["f32"]) for v in (low, high)], axis=1).astype(dtype)
        pair = np.where(pair < 0, np.zeros(1, dtype), pair) if is_clamped else pair
        write(lanes, mask, np.ascontiguousarray(pair).view(np.uint32)[:, 0])

    return evaluate


def _pairwise(function: Callable[..., Any]) -> Any:
    """Compiler of arithmetic on pairs of 16-bit floats, computed in float64 and rounded once."""

    def handler(expressions: Any, one: Instruction) -> Any:
        name = next(part for part in one.parts if part.endswith("x2"))
        dtype = TYPES[name[:-2]]
        write = register_writer(expressions, one.operands[0])
        values = [expressions.compiled(value) for value in one.operands[1:]]

        def evaluate(lanes: Any, mask: Any) -> None:
            pairs = [
                bits_of(lanes, value(lanes, mask), np.dtype(np.uint32)).reshape(-1, 1).view(dtype).astype(np.float64)
                for value in values
            ]
            write(lanes, mask, np.ascontiguousarray(function(*pairs).astype(dtype)).view(np.uint32)[:, 0])

        return evaluate

    return handler


@instruction(r"fma\.rn\.sat\.f32")
def _multiply_add_clipped(expressions: Any, one: Instruction) -> Any:
    write = register_writer(expressions, one.operands[0])
    values = [expressions.compiled(value) for value in one.operands[1:]]

    def evaluate(lanes: Any, mask: Any) -> None:
        a, b, c = (bits_of(lanes, value(lanes, mask), TYPES["f32"]).astype(np.float64) for value in values)
        exact = a * b + c
        write(lanes, mask, np.where(np.isnan(exact), 0, np.clip(exact, 0, 1)).astype(np.float32))

    return evaluate


PTX.append((re.compile(r"fma\.rn\.(ftz\.)?b?f16x2"), _pairwise(lambda a, b, c: a * b + c)))
PTX.append((re.compile(r"add\.(rn\.)?b?f16x2"), _pairwise(lambda a, b: a + b)))
PTX.append((re.compile(r"sub\.(rn\.)?b?f16x2"), _pairwise(lambda a, b: a - b)))
PTX.append((re.compile(r"mul\.(rn\.)?b?f16x2"), _pairwise(lambda a, b: a * b)))


@instruction(r"ex2\.approx\.ftz\.f32")
def _power_of_two(expressions: Any, one: Instruction) -> Any:
    write, value = register_writer(expressions, one.operands[0]), expressions.compiled(one.operands[1])

    def evaluate(lanes: Any, mask: Any) -> None:
        power = np.exp2(bits_of(lanes, value(lanes, mask), TYPES["f32"]))
        write(lanes, mask, np.where(power < 2.0**-126, np.float32(0), power).astype(np.float32))

    return evaluate


@instruction(r"redux\.sync\.(min|max)\.[us]32")
def _redux(expressions: Any, one: Instruction) -> Any:
    write, value = register_writer(expressions, one.operands[0]), expressions.compiled(one.operands[1])
    reduce, dtype = {"min": np.min, "max": np.max}[one.parts[2]], TYPES[one.parts[3]]

    def evaluate(lanes: Any, mask: Any) -> None:
        _complete_warps(lanes, mask, "redux.sync")
        values = bits_of(lanes, value(lanes, mask), dtype).reshape(-1, WARP)
        write(lanes, mask, np.repeat(reduce(values, axis=1), WARP))

    return evaluate


@instruction(r"lop3\.b32")
def _lop3(expressions: Any, one: Instruction) -> Any:
    write = register_writer(expressions, one.operands[0])
    values, table = [expressions.compiled(value) for value in one.operands[1:4]], int(one.operands[4])

    def evaluate(lanes: Any, mask: Any) -> None:
        a, b, c = (bits_of(lanes, value(lanes, mask), np.dtype(np.uint32)) for value in values)
        result = np.zeros(lanes.count, np.uint32)
        for case in range(8):
            if table >> case & 1:
                result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        write(lanes, mask, result)

    return evaluate


@instruction(r"prmt\.b32")
def _prmt(expressions: Any, one: Instruction) -> Any:
    write = register_writer(expressions, one.operands[0])
    values = [expressions.compiled(value) for value in one.operands[1:4]]

    def evaluate(lanes: Any, mask: Any) -> None:
        a, b, selector = (bits_of(lanes, value(lanes, mask), np.dtype(np.uint32)) for value in values)
        every = np.stack([a, b], axis=1).view(np.uint8)
        result = np.zeros((lanes.count, 4), np.uint8)
        for byte in range(4):
            choice = (selector >> np.uint32(4 * byte)) & np.uint32(0xF)
            picked = every[lanes.everyone, choice & 7]
            sign = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
            result[:, byte] = np.where(choice & 8, sign, picked)
        write(lanes, mask, result.view(np.uint32)[:, 0])

    return evaluate


@instruction(r"fence\.proxy\.async(\..*)?")
def _proxy_fence(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        for cluster, members in lanes.members(mask):
            lanes.clocks.fence(cluster, members)

    return evaluate


@instruction(r"(setmaxnreg|griddepcontrol|prefetch|cp\.async\.bulk\.prefetch|applypriority|discard|createpolicy)\b.*")
def _nothing(expressions: Any, one: Instruction) -> Any:
    arguments = [expressions.compiled(value) for value in one.operands if type(value).__name__ == "Call"]
    return lambda lanes, mask: [a(lanes, mask) for a in arguments] and None


@instruction(r"fence\.(acq_rel|sc|acquire|release).*|membar.*")
def _fence(expressions: Any, one: Instruction) -> Any:
    return lambda lanes, mask: None


@handles("tirx.cuda.thread_fence", "tirx.cuda.nano_sleep")
def _thread_fence(expressions: Any, call: Any) -> Any:
    return lambda lanes, mask: None


@handles("tirx.cuda.cvta_generic_to_shared")
def _to_shared(expressions: Any, call: Any) -> Any:
    pointer = expressions.address(call.args[0])

    def evaluate(lanes: Any, mask: Any) -> Any:
        address = np.asarray(pointer(lanes, mask), np.uint64)
        shared_place(lanes, address, mask)
        return (address & np.uint64(0xFFFFFFFF)).astype(np.uint32)[()]

    return evaluate


@handles("tirx.cuda.elect_sync")
def _elect(expressions: Any, call: Any) -> Any:
    def evaluate(lanes: Any, mask: Any) -> Any:
        chosen = np.zeros(lanes.count, np.uint32)
        active = lanes.active(mask)
        chosen[active[np.unique(active // 32, return_index=True)[1]]] = 1
        return chosen

    return evaluate


@handles("tirx.cuda.thread_rank")
def _thread_rank(expressions: Any, call: Any) -> Any:
    return lambda lanes, mask: lanes.thread
