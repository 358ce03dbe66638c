"""A simulated accelerator as a back end of relax_hetero, in a package of its own.

The accelerator has memory of its own, a DMA queue that copies between it and the host, a matrix unit of 16 × 16 bytes,
and a scalar core for everything else. The simulator plays all of it in this process: the scalar core's code is machine
code of this CPU, which sees no other memory than the accelerator's. The kind of its targets is TVM's ``ext_dev``.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections import Counter
from functools import cache

import numpy as np
import tvm
import tvm_ffi
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.backends import DeviceMemory, Location, ManagedBackend
from relax_hetero.encoding import EncodingResolver, MatmulProblem, PackedLayout, resolver_for

NUM_DEVICES = 2
MEMORY_BYTES = 256 << 20
UNIT = 16
"""Rows, columns and depth of one step of the matrix unit, in bytes."""
CPU = "llvm"
ORDERS = (("m", "k"), ("n", "k"), ("m", "n"))
"""Dimensions of left, right and result in memory, for the matrix unit."""

counts: Counter[str] = Counter()
"""Copies by DMA, bytes copied, and steps of matrix units, of all devices."""


class DmaQueue:
    """A thread that copies in order."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[int, int, int, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="NPU DMA", daemon=True).start()

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy, and wait for the end."""
        done = threading.Event()
        self._requests.put((source, target, nbytes, done))
        done.wait()

    def _work(self) -> None:
        while True:
            source, target, nbytes, done = self._requests.get()
            ctypes.memmove(target, source, nbytes)
            counts.update(copies=1, bytes=nbytes)
            done.set()


class NpuDevice:
    """Memory of one device, allocated first fit."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MEMORY_BYTES)  # pages exist when they are first written
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._blocks: dict[int, int] = {}  # bytes by offset
        self._lock = threading.Lock()
        self.dma = DmaQueue()

    def allocate(self, nbytes: int, alignment: int) -> int:
        """The address of a free block."""
        with self._lock:
            begin = 0
            for offset, size in (*sorted(self._blocks.items()), (MEMORY_BYTES, 0)):
                if begin + nbytes <= offset:
                    self._blocks[begin] = nbytes
                    return self.base + begin
                begin = -(-(offset + size) // alignment) * alignment
        raise rh.MemoryLimitError(f"the NPU has no {nbytes:,} bytes left of {MEMORY_BYTES:,}")

    def free(self, address: int) -> None:
        """Free a block."""
        with self._lock:
            del self._blocks[address - self.base]


class NpuMemory(DeviceMemory):
    """Memory of all devices."""

    def __init__(self) -> None:
        self.devices = [NpuDevice() for _ in range(NUM_DEVICES)]

    def count(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def memory_bytes(self, index: int) -> int:
        """Bytes of a device's memory."""
        return MEMORY_BYTES

    def allocate(self, index: int, nbytes: int, alignment: int) -> int:
        """Allocate memory of a device."""
        return self.devices[index].allocate(nbytes, alignment)

    def free(self, index: int, address: int) -> None:
        """Free memory of a device."""
        self.devices[index].free(address)

    def copy(self, source: Location, target: Location, nbytes: int) -> None:
        """Copy by the DMA queue of the device that reads, or that writes if the host reads."""
        index = target.device if source.device is None else source.device
        self.devices[index].dma.copy(source.address, target.address, nbytes)

    def synchronize(self, index: int) -> None:
        """Do nothing: the simulator waits for each piece of work."""


@cache
def _memory() -> NpuMemory:
    return NpuMemory()


class NpuResolver(EncodingResolver):
    """Products of bytes on the matrix unit, which reads 16 columns of a weight, 16 bytes of each."""

    name = "npu"
    cache_key = "backend_npu 2"
    fuses_elementwise = False  # the matrix unit stores sums

    def resolve(self, encoding, target):
        """Layouts for products of bytes of static sizes; None for others, which the scalar core computes."""
        is_product = encoding.op_type == "matmul" and set(encoding.element_types[:2]) <= {"int8", "uint8"}
        if not is_product or any(size < 0 for size in encoding.sizes.values()):
            return None
        order = ORDERS[encoding.operand_index]
        if encoding.index_map == order:
            return PackedLayout.identity(2)
        return PackedLayout(outer_perm=(1, 0)) if encoding.index_map == order[::-1] else None

    def kernel(self, problem, target):
        """The matrix unit's kernel for products; the scalar core computes those with an initial value, and all else."""
        if isinstance(problem, MatmulProblem) and problem.init is None:
            return matrix_unit_kernel(problem)
        return resolver_for(CPU).kernel(problem, tvm.target.Target(CPU))


def matrix_unit_kernel(problem):
    """A kernel that starts the matrix unit."""
    m, k, n = problem.lhs.size("m"), problem.lhs.size("k"), problem.rhs.size("n")
    left, right = problem.lhs.dtype, problem.rhs.dtype

    @T.prim_func(s_tir=True)
    def matmul(x: T.Buffer((m, k), left), w: T.Buffer((n, k), right), out: T.Buffer((m, n), "int32")):
        T.evaluate(T.call_packed("backend_npu.multiply", x.data, w.data, out.data, m, n, k, left, right))

    return matmul


@tvm_ffi.register_global_func("backend_npu.multiply", override=True)
def multiply(x, w, out, m, n, k, left, right):
    """The matrix unit: result [m, n] of rows [m, k] and columns [n, k], in steps of 16 × 16 × 16 bytes."""
    rows, columns = _array(x, (m, k), left), _array(w, (n, k), right)
    result = _array(out, (m, n), "int32")
    for i in range(0, m, UNIT):
        for j in range(0, n, UNIT):
            sums = np.zeros((min(UNIT, m - i), min(UNIT, n - j)), "int32")
            for p in range(0, k, UNIT):
                step = slice(p, p + UNIT)
                sums += rows[i : i + UNIT, step].astype("int32") @ columns[j : j + UNIT, step].astype("int32").T
                counts["steps"] += 1
            result[i : i + UNIT, j : j + UNIT] = sums


def _array(pointer, shape, dtype):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer.value), dtype).reshape(shape)


class NpuBackend(ManagedBackend):
    """The back end, which the entry point names."""

    def __init__(self) -> None:
        super().__init__("ext_dev", 12, description="the NPU", words="npu")

    def memory(self):
        """Memory of the devices, one for the process."""
        return _memory()

    def resolvers(self):
        """The resolver of the matrix unit."""
        return ((NpuResolver(), ()),)

    def peaks(self, target):
        """Float32 flop/s and bytes/s of the scalar core, for automatic placement."""
        return 1e9, 10e9, 1.0
