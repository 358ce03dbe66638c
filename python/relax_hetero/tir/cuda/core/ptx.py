"""The instructions of NVIDIA GPUs that kernels use, a function each: the one file that knows how TVM spells them.

Every function writes a statement into the PrimFunc under construction, or returns an expression where it says so.
Addresses of shared and global memory are pointers (``T.address_of(buffer[index])``); shared memory of other blocks of
a cluster is found by 32-bit addresses (`remote_address`). Registers that an instruction writes are elements of local
buffers.

Shared memory that instructions of this file read or write is never read or written as a buffer: TVM would see the
accesses, and put barriers of all threads between them that warps with different work do not all reach.

Source: PTX ISA 9.0; section names in the docstrings are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as _instructions
from tvm.script.ir_builder import tirx as T

from ...core.builder import Expr

_PTX = _instructions.ptx
_CUDA = _instructions.cuda

PTX_TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}
"""Names of element types of operands in wgmma and mma.sync; float32 is read as tf32, its lowest 13 bits ignored."""


def _emit(instruction: str, *operands: Expr) -> None:
    T.evaluate(_PTX[instruction](*operands))


def _u32(value: Expr) -> Expr:
    return T.uint32(value) if isinstance(value, int) else T.Cast("uint32", value)


# Threads: barriers of a block, of some of its warps, of a warp.


def block_barrier() -> None:
    """All threads of the block wait for each other; their shared and global writes are visible to each other."""
    T.evaluate(_CUDA.cta_sync())


def warp_barrier() -> None:
    """The 32 threads of a warp wait for each other, and see each other's writes."""
    T.evaluate(_CUDA.warp_sync())


def named_barrier(number: Expr, threads: int) -> None:
    """`threads` threads, a multiple of 32, wait for each other at barrier `number` (1 to 15; 0 is the block's)."""
    T.evaluate(_PTX["barrier.cta.sync.aligned"](_u32(number), T.uint32(threads)))


def warpgroup_barrier(number: Expr) -> None:
    """The 128 threads of a warpgroup wait for each other at barrier `number` (1 to 15)."""
    T.evaluate(_CUDA.warpgroup_sync(number))


def set_max_registers(count: int, grows: bool) -> None:
    """All warps of a warpgroup take `count` registers a thread (a multiple of 8), more or fewer than at the launch.

    Dropped by the compiler unless the kernel says how many blocks a multiprocessor holds (`launch.launch`).
    """
    _emit(f"setmaxnreg.{'inc' if grows else 'dec'}.sync.aligned.u32", count)


# Asynchronous barriers in shared memory ("mbarrier"): arrivals and bytes that are waited for.


def barrier_init(barrier: Expr, arrivals: int) -> None:
    """A barrier whose phase ends with so many arrivals and all expected bytes; one thread does it."""
    _emit("mbarrier.init.shared.b64", barrier, T.uint32(arrivals))


def barrier_init_fence() -> None:
    """Barriers that this thread has initialized are seen by copies and by the cluster; a `block_barrier` follows."""
    _emit("fence.mbarrier_init.release.cluster")


def barrier_arrive(barrier: Expr) -> None:
    """One arrival; what the thread wrote before is seen by those that wait."""
    _emit("mbarrier.arrive.shared.b64", barrier, T.uint32(1))


def barrier_expect(barrier: Expr, size: Expr) -> None:
    """One arrival, and `size` bytes more that copies have to bring before the phase ends."""
    _emit("mbarrier.arrive.expect_tx.shared.b64", barrier, _u32(size))


def barrier_arrive_after_copies(barrier: Expr) -> None:
    """One arrival as soon as all `copy_async` that this thread has issued are complete; the thread goes on at once.

    Counts as one of the barrier's expected arrivals (``.noinc``).
    """
    _emit("cp.async.mbarrier.arrive.noinc.shared.b64", barrier)


def barrier_wait(barrier: Expr, parity: Expr) -> None:
    """Wait for the end of the phase of this parity: 0 for the first, 1 for the second, 0 for the third, ...

    A wait for parity 1 of a new barrier returns at once.
    """
    T.evaluate(_CUDA.mbarrier_wait(barrier, parity))


# Copies.


def copy_async(target: Expr, source: Expr, size: int, valid: Expr | None = None) -> None:
    """Copy `size` bytes (4, 8 or 16, the addresses' alignment) from global to shared memory, without registers.

    Parameters
    ----------
    valid : PrimExpr, optional
        How many bytes are read, 0 to `size`; the others become zeros. The address has to be a valid one even for 0.
    """
    form = "cg" if size == 16 else "ca"
    extra = [] if valid is None else [_u32(valid)]
    _emit(f"cp.async.{form}.shared.global", target, source, size, *extra)


def copy_commit() -> None:
    """The thread's copies since the last commit become a group."""
    _emit("cp.async.commit_group")


def copy_wait(groups: int) -> None:
    """Wait until at most so many of the thread's newest groups of `copy_async` are pending."""
    _emit("cp.async.wait_group", groups)


_EVICT_FIRST = 0x12F0000000000000
"""The cache policy that ``createpolicy.fractional.L2::evict_first.b64`` makes for all addresses."""


def bulk_load(target: Expr, source: Expr, size: Expr, barrier: Expr, evicts_first: bool = False) -> None:
    """Copy `size` bytes, a multiple of 16, from global to shared memory by one thread; they count at `barrier`.

    Parameters
    ----------
    evicts_first : bool
        Whether they are the first that make room for others in the second-level cache, where that is full.
    """
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    policy = [T.uint64(_EVICT_FIRST)] if evicts_first else []
    _emit(name + ".L2::cache_hint" * evicts_first, target, source, _u32(size), barrier, *policy)


def prefetch_bulk(source: Expr, size: Expr) -> None:
    """Bring `size` bytes, a multiple of 16, of global memory to the second-level cache; one thread does it."""
    _emit("cp.async.bulk.prefetch.L2.global", source, _u32(size))


def async_proxy_fence() -> None:
    """Make plain stores and `copy_async` of this thread to shared memory visible to wgmma and to bulk stores."""
    _emit("fence.proxy.async.shared::cta")


def load_shared(registers: Sequence[Expr], address: Expr, dtype: str = "u32") -> None:
    """One, two or four neighbouring values of 32 bits (or one of 8 or 16: "u8", "u16") to registers."""
    _emit(f"ld.shared.{_vector(len(registers))}{dtype}", *registers, address)


def store_shared(address: Expr, values: Sequence[Expr], dtype: str = "u32") -> None:
    """One, two or four neighbouring values of 32 bits (or one of 8 or 16)."""
    _emit(f"st.shared.{_vector(len(values))}{dtype}", address, *values)


def load_global(registers: Sequence[Expr], address: Expr, dtype: str = "u32", is_constant: bool = True) -> None:
    """One, two or four neighbouring values of 32 bits, or one of 16.

    Parameters
    ----------
    is_constant : bool
        Whether nothing writes them while the kernel runs, nor did the launch before it where that may still run: the
        compiler may move such a load ahead of `griddepcontrol_wait`.
    """
    _emit(f"ld.global.{'nc.' if is_constant else ''}{_vector(len(registers))}{dtype}", *registers, address)


def store_global(address: Expr, values: Sequence[Expr], dtype: str = "u32") -> None:
    """One, two or four neighbouring values of 32 bits."""
    _emit(f"st.global.{_vector(len(values))}{dtype}", address, *values)


def _vector(count: int) -> str:
    return "" if count == 1 else f"v{count}."


def store_matrices(address: Expr, registers: Sequence[Expr], transposed: bool = False) -> None:
    """8x8 matrices of 16-bit values, one a register, from the fragments of a warp to shared memory (``stmatrix``).

    From compute capability 9.0. Lane l gives the address of row ``l % 8`` of matrix ``l // 8``; register i holds of
    matrix i the pair of columns ``2 * (l % 4)`` of row ``l // 4``; `transposed` exchanges rows and columns of each.
    """
    trans = ".trans" if transposed else ""
    _emit(f"stmatrix.sync.aligned.m8n8.x{len(registers)}{trans}.shared.b16", address, *registers)


def load_matrices(registers: Sequence[Expr], address: Expr, transposed: bool = False) -> None:
    """8x8 matrices of 16-bit values, one a register, from shared memory to the fragments of a warp (``ldmatrix``).

    Lane l gives the address of row ``l % 8`` of matrix ``l // 8``, a multiple of 16. A register of lane l has row
    ``l // 4``, columns ``2 * (l % 4)`` and one more; `transposed` exchanges rows and columns of each.
    """
    trans = ".trans" if transposed else ""
    _emit(f"ldmatrix.sync.aligned.m8n8.x{len(registers)}{trans}.shared.b16", *registers, address)


def power_of_two(register: Expr, value: Expr) -> None:
    """``2 ** value`` of a float32, within 2 units in the last place; 0 of -inf, and of results below 2 ** -126."""
    _emit("ex2.approx.ftz.f32", register, value)


def compute_first(value: Expr) -> None:
    """A float32 that is never negative is computed before anything that follows.

    The compiler moves waits ahead of arithmetic, which then does not run beside the work that is waited for. It moves
    nothing past a branch, and this one, which is never taken, needs the value.
    """
    with T.If(value < T.float32(0)), T.Then():
        T.evaluate(_CUDA.nano_sleep(0))


def pack_pair(register: Expr, low: Expr, high: Expr, dtype: str, is_clamped: bool = False) -> None:
    """Two float32 rounded to float16 or bfloat16, in one register; `is_clamped`: zeros of negative ones, NaN of NaN."""
    _emit(f"cvt.rn.{'relu.' * is_clamped}{PTX_TYPES[dtype]}x2.f32", register, high, low)


# Clusters: blocks that run at the same time and read each other's shared memory.


def cluster_arrive() -> None:
    """Arrive at the cluster's barrier; what this thread wrote is seen by those that `cluster_wait`."""
    _emit("barrier.cluster.arrive.release.aligned")


def cluster_wait() -> None:
    """Wait until all threads of all blocks of the cluster have arrived."""
    _emit("barrier.cluster.wait.acquire.aligned")


def cluster_barrier() -> None:
    """All threads of the cluster wait for each other, and see what others wrote."""
    cluster_arrive()
    cluster_wait()


def shared_address(pointer: Expr) -> Expr:
    """The 32-bit address of something in this block's shared memory (an expression)."""
    return _CUDA.cvta_generic_to_shared(pointer)


def remote_address(register: Expr, address: Expr, block: Expr) -> None:
    """Where block `block` of the cluster has what lies at a 32-bit shared address here."""
    _emit("mapa.shared::cluster.u32", register, address, _u32(block))


def load_remote(registers: Sequence[Expr], address: Expr, dtype: str = "u32") -> None:
    """One, two or four values of 32 bits from shared memory of another block, at a `remote_address`."""
    _emit(f"ld.shared::cluster.{_vector(len(registers))}{dtype}", *registers, address)


def store_remote(address: Expr, values: Sequence[Expr], dtype: str = "u32") -> None:
    """One, two or four values of 32 bits to shared memory of another block, at a `remote_address`."""
    _emit(f"st.shared::cluster.{_vector(len(values))}{dtype}", address, *values)


# Tensor cores of Hopper: one warpgroup multiplies tiles that lie in shared memory.

CONTRACTION_BYTES = 32
"""Bytes of a row of k that one wgmma multiplies: 16 values of 16 bits."""


def matrix_descriptor(
    register: Expr, address: Expr, leading: int = 1, stride: int = 64, is_swizzled: bool = True
) -> None:
    """How wgmma finds a tile of rows of 128 bytes, swizzled, at a multiple of 1,024 bytes.

    Or one that is not swizzled: 8 rows of 16 bytes of k lie after each other.

    Parameters
    ----------
    register : element of a uint64 buffer
        Adding ``bytes / 16`` to it moves the tile.
    leading : int
        16-byte units between stripes of 64 columns, where rows are those of k (read transposed); without swizzle from
        16 bytes of k to the next.
    stride : int
        16-byte units between groups of 8 rows.
    """
    pointer = T.address_of(register)
    T.evaluate(_CUDA.wgmma.encode_matrix_descriptor(pointer, address, leading, stride, 3 if is_swizzled else 0))


def wgmma_fence() -> None:
    """Before the first `wgmma` that uses registers, or shared memory, that were written otherwise."""
    _emit("wgmma.fence.sync.aligned")


def wgmma_commit() -> None:
    """Every `wgmma` since the last commit becomes a group."""
    _emit("wgmma.commit_group.sync.aligned")


def wgmma_wait(groups: int) -> None:
    """Wait until at most so many of the newest groups are pending."""
    _emit("wgmma.wait_group.sync.aligned", groups)


def wgmma(
    sums: Sequence[Expr],
    left: Expr,
    right: Expr,
    types: tuple[str, str],
    adds: Expr,
    transposed: tuple[bool, bool] = (False, False),
) -> None:
    """``sums = left * right (+ sums where adds)`` for 64 rows and ``2 * len(sums)`` columns.

    Parameters
    ----------
    sums : sequence of registers
        float32, or uint32 that hold int32. Register ``4 * j + 2 * h + c`` of lane l of warp w is row
        ``16 * w + l // 4 + 8 * h``, column ``8 * j + 2 * (l % 4) + c``.
    left, right : PrimExpr
        Descriptors of 64 and of ``2 * len(sums)`` rows of 32 bytes of k.
    types : tuple of str
        Element types of both.
    adds : PrimExpr
        uint32: 0 begins a sum.
    transposed : tuple of bool
        Whether a tile's rows are those of k, for types of 16 bits.
    """
    _wgmma(sums, [left], right, types, adds, transposed)


def wgmma_of_registers(
    sums: Sequence[Expr], left: Sequence[Expr], right: Expr, types: tuple[str, str], adds: Expr, transposed: bool
) -> None:
    """As `wgmma`, with the left operand in registers: they do not change until the product is complete.

    Parameters
    ----------
    left : sequence of registers
        Four of uint32, of each thread: as of `mma_sync`, for the 16 rows of its warp.
    transposed : bool
        Whether the right tile's rows are those of k.
    """
    _wgmma(sums, left, right, types, adds, (transposed,))


def _wgmma(
    sums: Sequence[Expr],
    left: Sequence[Expr],
    right: Expr,
    types: tuple[str, str],
    adds: Expr,
    transposed: Sequence[bool],
) -> None:
    a, b = (PTX_TYPES[dtype] for dtype in types)
    depth = CONTRACTION_BYTES * 8 // {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    is_integer = a in ("s8", "u8")
    signs = [] if is_integer else [1, 1]
    orders = [int(t) for t in transposed] if a in ("f16", "bf16") else []
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k{depth}.{'s32' if is_integer else 'f32'}.{a}.{b}"
    _emit(name, *sums, *left, right, _PTX.pred(adds), *signs, *orders)


# Tensor cores of Ampere and later: one warp multiplies fragments in registers.


def multiply_fragments(
    sums: Sequence[Expr], left: Sequence[Expr], right: Sequence[Expr], types: tuple[str, str], adds: bool = True
) -> None:
    """``sums = left * right (+ sums where adds)`` for 16 rows, 8 columns and 32 bytes of k (``mma.sync``).

    Parameters
    ----------
    sums : sequence of four registers
        float32, or uint32 that hold int32. Of lane l row ``l // 4``, columns ``2 * (l % 4)`` and one more; then the
        same of row + 8.
    left, right : sequence of registers
        Four and two of 32 bits, as `load_matrices` leaves them. Of 16-bit types, lane l has of the left operand two
        values of row ``l // 4`` and k from ``2 * (l % 4)``; of row + 8; then both with k + 8. Of the right one those of
        column ``l // 4``; then with k + 8.
    types : tuple of str
        Element types of both.
    """
    a, b = (PTX_TYPES[dtype] for dtype in types)
    depth = CONTRACTION_BYTES * 8 // {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    result = "s32" if a in ("s8", "u8") else "f32"
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.{result}.{a}.{b}.{result}"
    before = list(sums) if adds else [T.float32(0) if result == "f32" else T.uint32(0)] * 4
    _emit(name, *sums, *left, *right, *before)


# Launches that follow each other.


def griddepcontrol_wait() -> None:
    """Wait until the launches before this one are complete and their writes visible.

    Nothing where this launch does not begin before they end.
    """
    _emit("griddepcontrol.wait")


def is_griddepcontrol_wait(statement: tirx.Stmt) -> bool:
    """Return whether a statement is that of `griddepcontrol_wait`."""
    return _is_evaluated(statement, "griddepcontrol.wait")


def is_launch_dependents(statement: tirx.Stmt) -> bool:
    """Return whether a statement is that of `launch_dependents`."""
    return _is_evaluated(statement, "griddepcontrol.launch_dependents")


def _is_evaluated(statement: tirx.Stmt, instruction: str) -> bool:
    is_known = isinstance(statement, tirx.Evaluate)
    return is_known and tvm_ffi.structural_equal(statement.value, _PTX[instruction]())


def waiting_statements() -> list[tirx.Stmt]:
    """Those of `griddepcontrol_wait` and `launch_dependents`, for a kernel that is written already."""
    return [tirx.Evaluate(_PTX[f"griddepcontrol.{name}"]()) for name in ("wait", "launch_dependents")]


def launch_dependents() -> None:
    """The launch after this one may begin, up to its `griddepcontrol_wait`, once all blocks of this one say so."""
    _emit("griddepcontrol.launch_dependents")


# Arithmetic.


def multiply_add_clipped(register: Expr, a: Expr, b: Expr, c: Expr) -> None:
    """``a * b + c`` in float32, at least 0 and at most 1; of NaN 0."""
    _emit("fma.rn.sat.f32", register, a, b, c)


def multiply_add_pair(register: Expr, a: Expr, b: Expr, c: Expr, dtype: str) -> None:
    """``a * b + c`` of two float16 or bfloat16 in registers of 32 bits, rounded once."""
    _emit(f"fma.rn.{PTX_TYPES[dtype]}x2", register, a, b, c)


def add_pair(register: Expr, a: Expr, b: Expr) -> None:
    """``a + b`` of two float16 in registers of 32 bits."""
    _emit("add.f16x2", register, a, b)


def and_or(register: Expr, a: Expr, mask: int, bits: int) -> None:
    """``(a & mask) | bits`` in one instruction, which the compiler does not find where both are constants."""
    _emit("lop3.b32", register, a, T.uint32(mask), T.uint32(bits), 0xEA)


def pick_bytes(register: Expr, a: Expr, b: Expr, selector: int) -> None:
    """Four bytes of eight (``prmt``): each digit of the selector, from the lowest, is one of a's (0-3) or b's (4-7)."""
    _emit("prmt.b32", register, a, b, T.uint32(selector))


def stream_global(registers: Sequence[Expr], address: Expr) -> None:
    """Four neighbouring values of 32 bits of a constant that is read once: the first-level cache does not keep them."""
    _emit("ld.global.nc.L1::no_allocate.v4.u32", *registers, address)


# Functions of float32 as expressions, for results of 16 bits: no branches, and no care for numbers below 2**-126.


def quick_exp(x: Expr) -> Expr:
    """``exp(x)`` of float32, within 2 units in the last place for small `x`; 0 where it is below 2 ** -126."""
    return _quick("exp", x, "return power;", "1.4426950408889634f")


def quick_sigmoid(x: Expr) -> Expr:
    """``1 / (1 + exp(-x))`` of float32, within some 1e-6 of itself."""
    return _quick("sigmoid", x, f"{_RECIPROCAL}return part;", "-1.4426950408889634f")


def quick_tanh(x: Expr) -> Expr:
    """``tanh(x)`` of float32, within some 4e-5 of itself: below 0.01, where a difference has no digits, it is `x`."""
    text = f"{_RECIPROCAL}float most = fmaf(-2.0f, part, 1.0f); return fabsf(x) < 0.01f ? x : most;"
    return _quick("tanh", x, text, "2.8853900817779268f")


_RECIPROCAL = 'float part; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + power)); '


def _quick(name: str, x: Expr, text: str, factor: str) -> Expr:
    power = f'float power; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * {factor})); '
    source = f"__forceinline__ __device__ float quick_{name}(float x) {{ {power}{text} }}\n"
    return _CUDA.func_call(f"quick_{name}", x, source_code=source, return_type="float32")
