"""PTX instructions as functions; only this file knows their spelling in TVM.

Every function emits a statement into the PrimFunc under construction, unless it is documented to return an expression.
Addresses of shared and global memory are pointers (``T.address_of(buffer[index])``); distributed shared memory of other
blocks of a cluster has 32-bit addresses (`remote_address`). Registers that an instruction writes are elements of local
buffers.

Barriers of a block and accesses of four-byte values are plain code in other languages than CUDA (`core.dialect`).

Shared memory accessed by these functions must not be accessed as a buffer: TVM would insert block barriers, which
specialized warps do not all reach.

Source: PTX ISA 9.0; section names in the docstrings are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as _instructions
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import ALL_LANES
from ...core.builder import Expr, lane_indices
from .dialect import has_ptx

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


# Barriers of a block, of some of its warps, and of a warp.


def block_barrier() -> None:
    """Synchronize the threads of the block and their shared and global writes."""
    T.evaluate(_CUDA.cta_sync() if has_ptx() else T.tvm_storage_sync("shared"))


def warp_barrier() -> None:
    """Synchronize the threads of a warp and their writes."""
    T.evaluate(_CUDA.warp_sync())


def named_barrier(number: Expr, threads: int) -> None:
    """Synchronize `threads` threads, a multiple of 32, at barrier `number` (1 to 15; 0 is the block's)."""
    T.evaluate(_PTX["barrier.cta.sync.aligned"](_u32(number), T.uint32(threads)))


def warpgroup_barrier(number: Expr) -> None:
    """Synchronize the 128 threads of a warpgroup at barrier `number` (1 to 15)."""
    T.evaluate(_CUDA.warpgroup_sync(number))


def set_max_registers(count: int, grows: bool) -> None:
    """Set the registers per thread of a warpgroup, a multiple of 8; all its warps execute it.

    The compiler ignores it unless the kernel has a launch bound for blocks per multiprocessor (`launch.launch`).
    """
    _emit(f"setmaxnreg.{'inc' if grows else 'dec'}.sync.aligned.u32", count)


# Asynchronous barriers in shared memory (mbarrier): they count arrivals and transaction bytes.


def barrier_init(barrier: Expr, arrivals: int) -> None:
    """Initialize an mbarrier, by one thread: a phase completes after `arrivals` arrivals and all expected bytes."""
    _emit("mbarrier.init.shared.b64", barrier, T.uint32(arrivals))


def barrier_init_fence() -> None:
    """Make initialized barriers visible to copies and to the cluster; a `block_barrier` must follow."""
    _emit("fence.mbarrier_init.release.cluster")


def barrier_arrive(barrier: Expr) -> None:
    """Arrive; earlier writes of the thread are visible to waiting threads."""
    _emit("mbarrier.arrive.shared.b64", barrier, T.uint32(1))


def barrier_expect(barrier: Expr, size: Expr) -> None:
    """Arrive, and add `size` bytes that copies must complete before the phase does."""
    _emit("mbarrier.arrive.expect_tx.shared.b64", barrier, _u32(size))


def barrier_arrive_after_copies(barrier: Expr) -> None:
    """Arrive when all `copy_async` that this thread has issued are complete, without blocking.

    It counts as one of the barrier's expected arrivals (``.noinc``).
    """
    _emit("cp.async.mbarrier.arrive.noinc.shared.b64", barrier)


def barrier_wait(barrier: Expr, parity: Expr) -> None:
    """Wait for completion of the phase with a parity: 0 for the first, 1 for the second, 0 for the third, ...

    A wait for parity 1 of a new barrier returns at once.
    """
    T.evaluate(_CUDA.mbarrier_wait(barrier, parity))


def reduce_warp(register: Expr, value: Expr, operation: str) -> None:
    """Reduce a value over the lanes of a warp, from compute capability 8.0 on; every lane gets the result.

    `operation`: "min" or "max".
    """
    kind = "s32" if value.ty.dtype == "int32" else "u32"
    _emit(f"redux_sync.{operation}.{kind}", register, value, T.uint32(ALL_LANES))


# Copies.


def copy_async(target: Expr, source: Expr, size: int, valid: Expr | None = None) -> None:
    """Copy `size` bytes (4, 8 or 16, the addresses' alignment) from global to shared memory, without registers.

    `valid`: bytes that are read, 0 to `size`; the others become zeros. The address must be valid even for 0.
    """
    form = "cg" if size == 16 else "ca"
    extra = [] if valid is None else [_u32(valid)]
    _emit(f"cp.async.{form}.shared.global", target, source, size, *extra)


def copy_commit() -> None:
    """Commit the thread's copies since the last commit as a group."""
    _emit("cp.async.commit_group")


def copy_wait(groups: int) -> None:
    """Wait until at most `groups` of the thread's newest groups of `copy_async` are pending."""
    _emit("cp.async.wait_group", groups)


_EVICT_FIRST = 0x12F0000000000000  # cache policy of ``createpolicy.fractional.L2::evict_first.b64`` for all addresses


def bulk_load(target: Expr, source: Expr, size: Expr, barrier: Expr, evicts_first: bool = False) -> None:
    """Copy `size` bytes, a multiple of 16, from global to shared memory by one thread; they complete at `barrier`.

    `evicts_first`: whether their L2 cache lines are evicted first.
    """
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    policy = [T.uint64(_EVICT_FIRST)] if evicts_first else []
    _emit(name + ".L2::cache_hint" * evicts_first, target, source, _u32(size), barrier, *policy)


def prefetch_bulk(source: Expr, size: Expr) -> None:
    """Prefetch `size` bytes, a multiple of 16, of global memory into L2, by one thread."""
    _emit("cp.async.bulk.prefetch.L2.global", source, _u32(size))


def async_proxy_fence() -> None:
    """Make plain stores and `copy_async` of this thread to shared memory visible to wgmma and to bulk stores."""
    _emit("fence.proxy.async.shared::cta")


def load_shared(registers: Sequence[Expr], address: Expr, dtype: str = "u32") -> None:
    """Load one, two or four neighbouring values of 32 bits (or one of 8 or 16: "u8", "u16")."""
    if not has_ptx():
        _load(registers, address)
        return
    _emit(f"ld.shared.{_vector(len(registers))}{dtype}", *registers, address)


def store_shared(address: Expr, values: Sequence[Expr], dtype: str = "u32") -> None:
    """Store one, two or four neighbouring values of 32 bits (or one of 8 or 16)."""
    if not has_ptx():
        (element,) = address.args
        T.buffer_store(element.source, _vector_of(values), [lane_indices(element.indices[0], len(values))])
        return
    _emit(f"st.shared.{_vector(len(values))}{dtype}", address, *values)


def add_shared(address: Expr, value: Expr) -> None:
    """Add to a uint32 that other threads may add to, too."""
    _emit("red.shared.add.u32", address, value)


def add_global(address: Expr, value: Expr) -> None:
    """Add to a uint32, or an int32, that other threads may add to, too."""
    if not has_ptx():
        T.evaluate(tirx.call_extern("uint32", "atomic_add", address, value))
        return
    _emit("red.global.add.u32", address, value)


def fetch_add_shared(register: Expr, address: Expr, value: Expr) -> None:
    """Add to a uint32 that other threads may add to, too; the register gets the value before."""
    _emit("atom.shared.add.u32", register, address, value)


def load_global(registers: Sequence[Expr], address: Expr, dtype: str = "u32", is_constant: bool = True) -> None:
    """Load one, two or four neighbouring values of 32 bits, or one of 16.

    `is_constant`: whether nothing writes them while this kernel, or the previous launch, may still run: the compiler
    may move such a load before `griddepcontrol_wait`.
    """
    if not has_ptx():
        _load(registers, address)
        return
    _emit(f"ld.global.{'nc.' if is_constant else ''}{_vector(len(registers))}{dtype}", *registers, address)


def store_global(address: Expr, values: Sequence[Expr], dtype: str = "u32") -> None:
    """Store one, two or four neighbouring values of 32 bits."""
    _emit(f"st.global.{_vector(len(values))}{dtype}", address, *values)


def store_for_host(address: Expr, value: Expr) -> None:
    """Store a 32-bit value to pinned memory; the host that reads it also sees all earlier writes of the block."""
    _emit("st.release.sys.global.u32", address, value)


def _load(registers: Sequence[Expr], address: Expr) -> None:
    """Load neighbouring elements of a buffer, whose type is that of the registers."""
    (element,) = address.args
    value = tirx.BufferLoad(element.source, [lane_indices(element.indices[0], len(registers))])
    T.buffer_store(registers[0].source, value, [lane_indices(registers[0].indices[0], len(registers))])


def _vector_of(values: Sequence[Expr]) -> Expr:
    """Neighbouring registers as one vector."""
    first = values[0]
    return first if len(values) == 1 else tirx.BufferLoad(first.source, [lane_indices(first.indices[0], len(values))])


def _vector(count: int) -> str:
    return "" if count == 1 else f"v{count}."


def store_matrices(address: Expr, registers: Sequence[Expr], transposed: bool = False) -> None:
    """Store 8x8 matrices of 16-bit values, one per register, from fragments of a warp to shared memory (``stmatrix``).

    It needs compute capability 9.0. Lane l has the address of row ``l % 8`` of matrix ``l // 8``; its register i holds
    row ``l // 4``, columns ``2 * (l % 4)`` and one more, of matrix i; `transposed` transposes each matrix.
    """
    trans = ".trans" if transposed else ""
    _emit(f"stmatrix.sync.aligned.m8n8.x{len(registers)}{trans}.shared.b16", address, *registers)


def load_matrices(registers: Sequence[Expr], address: Expr, transposed: bool = False) -> None:
    """Load 8x8 matrices of 16-bit values, one per register, from shared memory to fragments of a warp (``ldmatrix``).

    Lane l has the address of row ``l % 8`` of matrix ``l // 8``, a multiple of 16. A register of lane l has row
    ``l // 4``, columns ``2 * (l % 4)`` and one more; `transposed` transposes each matrix.
    """
    trans = ".trans" if transposed else ""
    _emit(f"ldmatrix.sync.aligned.m8n8.x{len(registers)}{trans}.shared.b16", *registers, address)


def power_of_two(register: Expr, value: Expr) -> None:
    """``2 ** value`` of a float32, within 2 ulp; 0 for -inf and for results below 2 ** -126."""
    _emit("ex2.approx.ftz.f32", register, value)


def force_evaluation(value: Expr) -> None:
    """Force a non-negative float32 to be computed before all that follows.

    The compiler hoists waits above arithmetic, which then does not overlap with the work that is waited for. It moves
    nothing across a branch; this one is never taken, but needs the value.
    """
    with T.If(value < T.float32(0)), T.Then():
        T.evaluate(_CUDA.nano_sleep(0))


def pack_pair(register: Expr, low: Expr, high: Expr, dtype: str, is_clamped: bool = False) -> None:
    """Round two float32 to a register of float16 or bfloat16; `is_clamped` applies relu, which keeps NaN."""
    _emit(f"cvt.rn.{'relu.' * is_clamped}{PTX_TYPES[dtype]}x2.f32", register, high, low)


# Clusters and distributed shared memory.


def cluster_arrive() -> None:
    """Arrive at the cluster barrier; the thread's writes are visible after `cluster_wait`."""
    _emit("barrier.cluster.arrive.release.aligned")


def cluster_begin() -> None:
    """Arrive at the cluster barrier without making writes visible, which takes longer: the block has begun."""
    _emit("barrier.cluster.arrive.relaxed.aligned")


def cluster_wait() -> None:
    """Wait until all threads of all blocks of the cluster have arrived."""
    _emit("barrier.cluster.wait.acquire.aligned")


def cluster_barrier() -> None:
    """Synchronize all threads of the cluster and their writes."""
    cluster_arrive()
    cluster_wait()


def shared_address(pointer: Expr) -> Expr:
    """Return the 32-bit address of a pointer to this block's shared memory."""
    return _CUDA.cvta_generic_to_shared(pointer)


def remote_address(register: Expr, address: Expr, block: Expr) -> None:
    """Map a 32-bit shared address of this block to that of block `block` of the cluster."""
    _emit("mapa.shared::cluster.u32", register, address, _u32(block))


def load_remote(registers: Sequence[Expr], address: Expr, dtype: str = "u32") -> None:
    """Load one, two or four values of 32 bits from shared memory of another block, at a `remote_address`."""
    _emit(f"ld.shared::cluster.{_vector(len(registers))}{dtype}", *registers, address)


def store_remote(address: Expr, values: Sequence[Expr]) -> None:
    """Store one, two or four values of 32 bits to shared memory of another block, at a `remote_address`."""
    _emit(f"st.shared::cluster.{_vector(len(values))}u32", address, *values)


def store_async(address: Expr, value: Expr, barrier: Expr) -> None:
    """Store 32 bits to shared memory of a block, at a `remote_address`, and count them at a barrier of that block."""
    _emit("st_async.shared::cluster.mbarrier::complete_tx::bytes.u32", address, value, barrier)


# Hopper's tensor cores: a warpgroup multiplies tiles in shared memory.

CONTRACTION_BYTES = 32  # bytes of k that one wgmma multiplies: 16 values of 16 bits


def matrix_descriptor(
    register: Expr,  # the descriptor; adding ``bytes / 16`` to it moves the tile
    address: Expr,
    # Leading dimension offset in 16-byte units: between stripes of 64 columns of transposed tiles; without swizzle
    # between 16 bytes of k.
    leading: int = 1,
    stride: int = 64,  # stride dimension offset in 16-byte units: between groups of 8 rows
    is_swizzled: bool = True,
) -> None:
    """Encode the matrix descriptor of a tile for wgmma.

    A swizzled tile has rows of 128 bytes and begins at a multiple of 1,024 bytes; a tile without swizzle consists of
    core matrices of 8 rows of 16 bytes of k.
    """
    pointer = T.address_of(register)
    T.evaluate(_CUDA.wgmma.encode_matrix_descriptor(pointer, address, leading, stride, 3 if is_swizzled else 0))


def wgmma_fence() -> None:
    """Order writes to registers and shared memory before the following `wgmma`."""
    _emit("wgmma.fence.sync.aligned")


def wgmma_commit() -> None:
    """Commit all `wgmma` since the last commit as a group."""
    _emit("wgmma.commit_group.sync.aligned")


def wgmma_wait(groups: int) -> None:
    """Wait until at most `groups` of the newest groups are pending."""
    _emit("wgmma.wait_group.sync.aligned", groups)


def wgmma(
    sums: Sequence[Expr],
    left: Expr | list[Expr],
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
    left : PrimExpr or list of PrimExpr
        Matrix descriptor of 64 rows of 32 bytes of k; or four uint32 registers, which must not change until the product
        is complete: the fragment of `multiply_fragments` for the 16 rows of the warp.
    right : PrimExpr
        Matrix descriptor of ``2 * len(sums)`` rows of 32 bytes of k.
    types : tuple of str
        Element types of both.
    adds : PrimExpr
        uint32: 0 overwrites the accumulators.
    transposed : tuple of bool
        Whether the rows of a tile are those of k, for 16-bit types.
    """
    in_registers = isinstance(left, list)
    a, b = (PTX_TYPES[dtype] for dtype in types)
    depth = CONTRACTION_BYTES * 8 // {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    is_integer = a in ("s8", "u8")
    signs = [] if is_integer else [1, 1]
    orders = [int(t) for t in transposed[in_registers:]] if a in ("f16", "bf16") else []
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k{depth}.{'s32' if is_integer else 'f32'}.{a}.{b}"
    _emit(name, *sums, *(left if in_registers else [left]), right, _PTX.pred(adds), *signs, *orders)


# Tensor cores from Ampere on: a warp multiplies fragments in registers.


def multiply_fragments(
    sums: Sequence[Expr], left: Sequence[Expr], right: Sequence[Expr], types: tuple[str, str], adds: bool = True
) -> None:
    """``sums = left * right (+ sums where adds)`` for 16 rows, 8 columns and 32 bytes of k (``mma.sync``).

    Parameters
    ----------
    sums : sequence of four registers
        float32, or uint32 that hold int32. Lane l has row ``l // 4``, columns ``2 * (l % 4)`` and one more; then the
        same of row + 8.
    left, right : sequence of registers
        Four and two of 32 bits, as `load_matrices` leaves them. For 16-bit types, lane l has two values of the left
        operand from row ``l // 4``, k ``2 * (l % 4)``; from row + 8; then both with k + 8. Of the right operand it has
        those of column ``l // 4``; then with k + 8.
    types : tuple of str
        Element types of both.
    """
    a, b = (PTX_TYPES[dtype] for dtype in types)
    depth = CONTRACTION_BYTES * 8 // {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    result = "s32" if a in ("s8", "u8") else "f32"
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.{result}.{a}.{b}.{result}"
    before = list(sums) if adds else [T.float32(0) if result == "f32" else T.uint32(0)] * 4
    _emit(name, *sums, *left, *right, *before)


# Programmatic dependent launch.


def griddepcontrol_wait() -> None:
    """Wait until previous launches are complete and their writes visible; a no-op without dependent launch."""
    _emit("griddepcontrol.wait")


def is_griddepcontrol_wait(statement: tirx.Stmt) -> bool:
    """Return whether a statement is a `griddepcontrol_wait`."""
    return _is_evaluated(statement, "griddepcontrol.wait")


def is_launch_dependents(statement: tirx.Stmt) -> bool:
    """Return whether a statement is a `launch_dependents`."""
    return _is_evaluated(statement, "griddepcontrol.launch_dependents")


def _is_evaluated(statement: tirx.Stmt, instruction: str) -> bool:
    is_known = isinstance(statement, tirx.Evaluate)
    return is_known and tvm_ffi.structural_equal(statement.value, _PTX[instruction]())


def waiting_statements() -> list[tirx.Stmt]:
    """Statements `griddepcontrol_wait` and `launch_dependents`, for insertion into a complete kernel."""
    return [tirx.Evaluate(_PTX[f"griddepcontrol.{name}"]()) for name in ("wait", "launch_dependents")]


def launch_dependents() -> None:
    """Let the next launch begin, up to its `griddepcontrol_wait`, once all blocks have executed this."""
    _emit("griddepcontrol.launch_dependents")


# Arithmetic.


def multiply_add_clipped(register: Expr, a: Expr, b: Expr, c: Expr) -> None:
    """``a * b + c`` in float32, clamped to [0, 1]; 0 for NaN."""
    _emit("fma.rn.sat.f32", register, a, b, c)


def multiply_add_pair(register: Expr, a: Expr, b: Expr, c: Expr, dtype: str) -> None:
    """``a * b + c`` of two float16 or bfloat16 in registers of 32 bits, rounded once."""
    _emit(f"fma.rn.{PTX_TYPES[dtype]}x2", register, a, b, c)


def add_pair(register: Expr, a: Expr, b: Expr) -> None:
    """``a + b`` of two float16 in registers of 32 bits."""
    _emit("add.f16x2", register, a, b)


def and_or(register: Expr, a: Expr, mask: int, bits: int) -> None:
    """``(a & mask) | bits`` in one instruction, which the compiler misses if both are constants."""
    _emit("lop3.b32", register, a, T.uint32(mask), T.uint32(bits), 0xEA)


def permute_bytes(register: Expr, a: Expr, b: Expr, selector: int | Expr) -> None:
    """Permute bytes (``prmt``): each of four selector digits, lowest first, is a byte of a (0-3) or b (4-7)."""
    _emit("prmt.b32", register, a, b, T.uint32(selector) if isinstance(selector, int) else selector)


def load_global_streaming(registers: Sequence[Expr], address: Expr) -> None:
    """Load one, two or four neighbouring values of 32 bits of a constant that is read once, without L1 allocation.

    Not by ``.nc``: ptxas moves such loads behind `griddepcontrol_wait`, and to the products that read them.
    """
    _emit(f"ld.global.L1::no_allocate.{_vector(len(registers))}u32", *registers, address)


# Approximate functions of float32 (expressions) for 16-bit results: branchless, denormals flushed to zero.


def quick_exp(x: Expr) -> Expr:
    """``exp(x)`` of float32, within 2 ulp for small `x`; 0 for results below 2 ** -126."""
    return _quick("exp", x, "return power;", "1.4426950408889634f")


def quick_sigmoid(x: Expr) -> Expr:
    """``1 / (1 + exp(-x))`` of float32, with a relative error of about 1e-6."""
    return _quick("sigmoid", x, f"{_RECIPROCAL}return part;", "-1.4426950408889634f")


def quick_tanh(x: Expr) -> Expr:
    """``tanh(x)`` of float32, with a relative error of about 4e-5; `x` below 0.01, to avoid cancellation."""
    text = f"{_RECIPROCAL}float most = fmaf(-2.0f, part, 1.0f); return fabsf(x) < 0.01f ? x : most;"
    return _quick("tanh", x, text, "2.8853900817779268f")


_RECIPROCAL = 'float part; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + power)); '


def _quick(name: str, x: Expr, text: str, factor: str) -> Expr:
    power = f'float power; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * {factor})); '
    source = f"__forceinline__ __device__ float quick_{name}(float x) {{ {power}{text} }}\n"
    return _CUDA.func_call(f"quick_{name}", x, source_code=source, return_type="float32")
