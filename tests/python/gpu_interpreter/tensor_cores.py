"""Tensor cores of Hopper: ``wgmma`` of a warpgroup, executed when it is waited for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .calls import handles
from .faults import KernelFault
from .memory import Local, pointed, shared_place
from .ptx import TYPES, Instruction, instruction, pointer

_SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}
"""A descriptor's layout field for TVM's number of a swizzle (3: 128 bytes)."""


@handles("tirx.cuda.wgmma.encode_matrix_descriptor", "tirx.cuda.wgmma_encode_matrix_descriptor")
def _encode(expressions: Any, call: Any) -> Any:
    target, address = pointer(expressions, call.args[0]), pointer(expressions, call.args[1])
    leading, stride, swizzle = (expressions.compiled(a) for a in call.args[2:5])

    def evaluate(lanes: Any, mask: Any) -> None:
        _, offset = shared_place(lanes, address(lanes, mask))
        if (offset[lanes.active(mask)] % 16).any():
            raise KernelFault("a matrix descriptor of an address that is not a multiple of 16")
        value = (offset >> 4).astype(np.uint64)
        value |= np.uint64(int(np.max(leading(lanes, mask))) & 0x3FFF) << np.uint64(16)
        value |= np.uint64(int(np.max(stride(lanes, mask))) & 0x3FFF) << np.uint64(32)
        value |= np.uint64(_SWIZZLES[int(np.max(swizzle(lanes, mask)))]) << np.uint64(62)
        view, index = pointed(lanes, mask, target(lanes, mask), np.dtype(np.uint64))
        view.memory.store(lanes, mask, view, index, value)

    return evaluate


class Tile:
    """A tile that a descriptor describes: byte offsets in shared memory of its elements.

    Attributes
    ----------
    offsets : (rows, depth) int64
    """

    def __init__(self, descriptor: int, rows: int, depth: int, dtype: np.dtype, is_transposed: bool) -> None:
        self.dtype = dtype
        size = dtype.itemsize
        start = (descriptor & 0x3FFF) * 16
        leading, stride = (descriptor >> 16 & 0x3FFF) * 16, (descriptor >> 32 & 0x3FFF) * 16
        if descriptor >> 49 & 7:
            raise NotImplementedError("matrix descriptors with a base offset")
        mode = descriptor >> 62
        row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
        if mode == 0:
            if is_transposed:
                # Eight neighbouring rows of the tile are 16 bytes, and eight k lie after each other.
                self.offsets = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * size
                return
            byte = k * size
            self.offsets = start + row // 8 * stride + byte // 16 * leading + row % 8 * 16 + byte % 16
            return
        width = {1: 128, 2: 64, 3: 32}[mode]
        if is_transposed:
            # Rows of memory are those of k; a row holds `width` bytes of neighbouring rows of the tile.
            per = width // size
            logical = start + row // per * leading + k // 8 * stride + k % 8 * width + row % per * size
        else:
            logical = start + row // 8 * stride + row % 8 * width + k * size
        bits = {128: 7, 64: 3, 32: 1}[width]
        self.offsets = logical ^ ((logical >> 7 & bits) << 4)

    def cells(self, memory: Any, instance: int) -> np.ndarray:
        """Cells of the tile.

        Raises
        ------
        KernelFault
            It reaches beyond shared memory.
        """
        if self.offsets.max() + self.dtype.itemsize > memory.size:
            raise KernelFault(f"out of range: wgmma reads byte {int(self.offsets.max())} of {memory.name}")
        return np.unique(self.offsets // memory.cell + instance * memory.cells)

    def values(self, memory: Any, instance: int) -> np.ndarray:
        """The elements."""
        return memory.bytes[instance].view(self.dtype)[self.offsets // self.dtype.itemsize]

    def check(self, memory: Any, instance: int) -> None:
        """Raise a fault if some elements were never written."""
        offsets = self.offsets.reshape(-1)
        bad = memory.written[instance, offsets] == 0
        if bad.any():
            byte = int(offsets[np.flatnonzero(bad)[0]])
            raise KernelFault(f"{memory.name}, byte {byte}, is read by wgmma and was never written, or not yet")


class Product:
    """One ``wgmma.mma_async`` that was issued."""

    def __init__(self, lanes: Any, sums: Any, registers: list[int], left: Any, right: Tile, adds: bool) -> None:
        self.lanes, self.sums, self.registers, self.left, self.right = lanes, sums, registers, left, right
        self.adds = adds
        self.scales = (1, 1)
        self.is_tf32 = False
        memory, instance = lanes.blocks.shared, int(lanes.instance[0])
        tiles = [one for one in (left, right) if isinstance(one, Tile)]
        self._before = [
            (cells, memory.accesses.versions(cells)) for t in tiles for cells in [t.cells(memory, instance)]
        ]

    def execute(self) -> None:
        """Multiply now."""
        lanes, memory = self.lanes, self.lanes.blocks.shared
        instance = int(lanes.instance[0])
        clocks, uid = lanes.clocks, lanes.uid[0]
        for cells, before in self._before:
            if (memory.accesses.versions(cells) != before).any():
                raise KernelFault(
                    "shared memory was written again before a tensor-core product that reads it was complete"
                )
        operands = []
        for one in (self.left, self.right):
            if isinstance(one, Tile):
                one.check(memory, instance)
                cells = one.cells(memory, instance)
                memory.accesses.read(clocks, np.full(len(cells), uid), cells, asynchronous=True)
                operands.append(one.values(memory, instance))
            else:
                operands.append(one)
        kind = self.sums.dtype
        exact = np.int64 if kind.kind in "iu" else np.float32
        a, b = (_tf32(x) if self.is_tf32 else x.astype(exact) for x in operands)
        columns = np.asarray(self.registers)
        data = self.sums.memory.bytes.view(self.sums.dtype)
        product = (a * self.scales[0]) @ (b * self.scales[1]).T
        if self.adds:
            before = _as_matrix(data[:, columns])
            before = before.view(np.int32).astype(np.int64) if exact is np.int64 else before.astype(np.float32)
            product = product + before
        if exact is np.int64:
            product = product.astype(np.int64).astype(np.uint32 if kind.kind == "u" else np.int32)
        data[:, columns] = _as_registers(product.astype(kind))


def _tf32(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _as_matrix(registers: np.ndarray) -> np.ndarray:
    """(128 lanes, registers) to (64 rows, columns)."""
    parts = registers.reshape(4, 8, 4, -1, 2, 2)  # warp, row, lane's column, block of columns, half, column
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)


def _as_registers(matrix: np.ndarray) -> np.ndarray:
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(128, -1)


def _left_fragment(registers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """(128 lanes, 4 registers of 32 bits) of a left operand to (64 rows, k)."""
    per = 4 // dtype.itemsize
    values = registers.view(dtype).reshape(4, 8, 4, 2, 2, per)  # warp, row, lane, half of k, half of rows, element
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)


def _queue(lanes: Any) -> dict[str, Any]:
    return lanes.state.setdefault("wgmma", {"open": [], "groups": []})


def _require_whole_warpgroup(lanes: Any, mask: Any, what: str) -> None:
    if mask is not None or lanes.count != 128 or int(lanes.thread[0]) % 128:
        raise KernelFault(f"{what} is not executed by all threads of one warpgroup")


@instruction(r"wgmma\.fence\.sync\.aligned")
def _wgmma_fence(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        _require_whole_warpgroup(lanes, mask, one.text)
        for local in lanes.locals.values():
            local.touched[:] = False

    return evaluate


@instruction(r"wgmma\.commit_group\.sync\.aligned")
def _wgmma_commit(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        _require_whole_warpgroup(lanes, mask, one.text)
        queue = _queue(lanes)
        queue["groups"].append(queue["open"])
        queue["open"] = []

    return evaluate


@instruction(r"wgmma\.wait_group\.sync\.aligned")
def _wgmma_wait(expressions: Any, one: Instruction) -> Any:
    newest = int(one.operands[0])

    def evaluate(lanes: Any, mask: Any) -> None:
        _require_whole_warpgroup(lanes, mask, one.text)
        queue = _queue(lanes)
        done = []
        while len(queue["groups"]) > newest:
            done += queue["groups"].pop(0)
        for product in done:
            product.execute()
        pending = [product for group in (*queue["groups"], queue["open"]) for product in group]
        in_flight = {(id(p.sums.memory), r) for p in pending for r in p.registers}
        for product in done:
            size = product.sums.dtype.itemsize
            for register in product.registers:
                if (id(product.sums.memory), register) not in in_flight:
                    product.sums.memory.written[:, register * size : (register + 1) * size] = 1

    return evaluate


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\..*")
def _wgmma(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    shape = re.search(r"m64n(\d+)k(\d+)", one.text)
    assert shape is not None
    columns, depth = int(shape[1]), int(shape[2])
    result, left_type, right_type = (part for part in one.parts[5:8])
    is_tf32 = left_type == "tf32"
    types = [np.dtype(np.float32) if name == "tf32" else TYPES[name] for name in (left_type, right_type)]
    count = columns // 2 if result != "f16" else columns // 4
    if result == "f16":
        raise NotImplementedError("wgmma with sums of float16")
    sums = [expressions.place(target) for target in one.operands[:count]]
    rest = one.operands[count:]
    # Behind the operands: the predicate, then signs of both (floats), then transpositions of those in shared memory.
    tail = {"s32": 1}.get(result, 5 if left_type in ("f16", "bf16") else 3)
    from_registers = len(rest) - tail >= 5 or (len(rest) - tail == 4)
    if from_registers:
        tail = len(rest) - 5
    split = 4 if from_registers else 1
    left = [expressions.compiled(value) for value in rest[:split]]
    right = expressions.compiled(rest[split])
    adds = expressions.compiled(rest[split + 1])
    immediates = [int(value) for value in rest[split + 2 :]]
    scales = tuple(immediates[:2]) if immediates else (1, 1)
    orders = immediates[2:]
    transposed = ([0, *orders] if from_registers else orders) if orders else [0, 0]

    def evaluate(lanes: Any, mask: Any) -> None:
        _require_whole_warpgroup(lanes, mask, "wgmma")
        views = [view(lanes) for view, _ in sums]
        registers = [
            place.offset // place.dtype.itemsize + int(index(lanes, mask))
            for place, (_, index) in zip(views, sums, strict=True)
        ]
        place = views[0]
        local: Local = place.memory
        size = place.dtype.itemsize
        if any(other.memory is not local for other in views):
            raise NotImplementedError("sums of one wgmma in several buffers")
        if any(index < 0 or (index + 1) * size > local.size for index in registers):
            raise KernelFault("out of range: registers of wgmma")
        spread = np.concatenate([np.arange(index * size, (index + 1) * size) for index in registers])
        if local.touched[spread].any():
            raise KernelFault(f"missing wgmma.fence: registers of {place.name} were written since the last")
        adding = np.unique(np.broadcast_to(np.asarray(adds(lanes, mask)) != 0, (lanes.count,)))
        if len(adding) > 1:
            raise KernelFault("wgmma: threads differ in whether sums are added to")
        queue = _queue(lanes)
        pending = [product for group in (*queue["groups"], queue["open"]) for product in group]
        in_flight = {(id(p.sums.memory), r) for p in pending for r in p.registers}
        if adding[0]:
            for index in registers:
                defined = local.written[:, index * size : (index + 1) * size].all()
                if not defined and (id(local), index) not in in_flight:
                    raise KernelFault(f"wgmma adds to register {index} of {place.name}, which was never written")
        memory, instance = lanes.blocks.shared, int(lanes.instance[0])
        if from_registers:
            words = np.stack(
                [np.ascontiguousarray(np.broadcast_to(v(lanes, mask), (128,))).view(np.uint32) for v in left], axis=1
            )
            first: Any = _left_fragment(np.ascontiguousarray(words), types[0])
        else:
            first = Tile(_same(left[0](lanes, mask)), 64, depth, types[0], bool(transposed[0]))
        second = Tile(_same(right(lanes, mask)), columns, depth, types[1], bool(transposed[1]))
        for tile in (first, second):
            if isinstance(tile, Tile):
                cells = tile.cells(memory, instance)
                for lane in (0, 127):
                    uids = np.full(len(cells), lanes.uid[lane])
                    memory.accesses.read(lanes.clocks, uids, cells, asynchronous=True, begins=True)
                tile.check(memory, instance)
        product = Product(lanes, place, registers, first, second, bool(adding[0]))
        product.scales, product.is_tf32 = (int(scales[0]), int(scales[1])), is_tf32
        queue["open"].append(product)
        local.written[:, spread] = 0

    return evaluate


def _same(descriptor: Any) -> int:
    values = np.unique(np.asarray(descriptor))
    if len(values) != 1:
        raise KernelFault("wgmma: threads have different matrix descriptors")
    return int(values[0])


def check_end(lanes: Any) -> None:
    """Raise a fault if threads end with products that they did not wait for."""
    queue = _queue(lanes)
    if queue["open"] or any(queue["groups"]):
        raise KernelFault(f"{lanes.name(0)} ends before its tensor-core products are complete")
