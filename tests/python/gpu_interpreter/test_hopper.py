"""The interpreter on Hopper's instructions: a pipelined product and a cluster's sum, right and with kinds of faults."""

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as instructions
from tvm.script.ir_builder import tirx as T

from gpu_interpreter import KernelFault, run
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.tir.core.builder import Function, when
from relax_hetero.tir.cuda.core import ptx
from relax_hetero.tir.cuda.core.launch import SharedMemory, launch, local

DEPTH, STAGES = 192, 2
TILE = 64 * 128
PACKED = PackedLayout((1, 0), (1, 0), (64, 64), swizzle=True)


def pipelined_product(fault: str = "") -> tirx.PrimFunc:
    """64 rows by 64 columns: a producer warpgroup copies rows, one of its threads bulks of weights; one consumes."""
    function = Function("product", registers="local")
    with function:
        a = function.argument("a", (64, DEPTH), "float16")
        b = function.argument("b", (1, DEPTH // 64, 64, 64), "float16")
        c = function.argument("c", (64, 64), "float32")
        with function.body():
            shared = SharedMemory()
            left, right = shared.reserve(STAGES * TILE, 1024), shared.reserve(STAGES * TILE, 1024)
            full, empty = shared.reserve(8 * STAGES, 8), shared.reserve(8 * STAGES, 8)
            with launch(1, 256) as place:
                shared.open()
                thread = place.thread
                with when(thread == 0):
                    for stage in range(STAGES):
                        ptx.barrier_init(shared.at(full + 8 * stage), 129 + (fault == "an arrival too few"))
                        ptx.barrier_init(shared.at(empty + 8 * stage), 1)
                    if fault != "no fence of barriers":
                        ptx.barrier_init_fence()
                if fault != "no barrier behind barriers":
                    ptx.block_barrier()
                with T.If(thread < 128):
                    with T.Then(), T.serial(DEPTH // 64) as k:
                        stage = T.bind(k % STAGES)
                        if fault != "producer does not wait":
                            ptx.barrier_wait(shared.at(empty + stage * 8), (k // STAGES) % 2 ^ 1)
                        with when(thread == 0):
                            size = TILE + 16 * (fault == "bytes that do not come")
                            ptx.barrier_expect(shared.at(full + stage * 8), size)
                            source = T.address_of(b[0, k, 0, 0])
                            ptx.bulk_load(shared.at(right + stage * TILE), source, TILE, shared.at(full + stage * 8))
                        with T.unroll(4) as i:
                            row, chunk = i * 16 + thread // 8, thread % 8
                            target = left + stage * TILE + row * 128 + T.bitwise_xor(chunk, row % 8) * 16
                            ptx.copy_async(shared.at(target), T.address_of(a[row, k * 64 + chunk * 8]), 16)
                        if fault == "copies are not waited for":
                            ptx.barrier_arrive(shared.at(full + stage * 8))
                        else:
                            ptx.barrier_arrive_after_copies(shared.at(full + stage * 8))
                    with T.Else():
                        _consume(shared, (left, right, full, empty), thread - 128, c, fault)
    return function.result


def _consume(shared: SharedMemory, offsets: tuple[int, ...], thread: tirx.Expr, c: tirx.Buffer, fault: str) -> None:
    left, right, full, empty = offsets
    sums, base = local(32, "float32"), local(2, "uint64")
    ptx.matrix_descriptor(base[0], shared.at(left))
    ptx.matrix_descriptor(base[1], shared.at(right))
    with T.serial(DEPTH // 64) as k:
        stage = T.bind(k % STAGES)
        if fault != "consumer does not wait":
            ptx.barrier_wait(shared.at(full + stage * 8), (k // STAGES) % 2)
        if fault != "no proxy fence":
            ptx.async_proxy_fence()
        if fault == "registers are written in between":
            T.buffer_store(sums, T.float32(0), [3])
        else:
            ptx.wgmma_fence()
        step = T.Cast("uint64", stage) * T.uint64(TILE // 16)
        for i in range(4):
            first = 0 if fault != "adds to nothing" else -1
            adds = T.uint32(1) if i else T.if_then_else(k > first, T.uint32(1), T.uint32(0))
            operands = [base[j] + step + T.uint64(2 * i) for j in range(2)]
            ptx.wgmma([sums[j] for j in range(32)], *operands, ("float16", "float16"), adds)
        ptx.wgmma_commit()
        if fault != "released too early":
            ptx.wgmma_wait(0)
        with when(thread == 0):
            ptx.barrier_arrive(shared.at(empty + stage * 8))
    if fault == "released too early":
        ptx.wgmma_wait(0)
    warp, lane = thread // 32, thread % 32
    with T.unroll(32) as j:
        row, column = warp * 16 + lane // 4 + j // 2 % 2 * 8, j // 4 * 8 + lane % 4 * 2 + j % 2
        T.buffer_store(c, sums[j], [row, column])


def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-3, 4, shape).astype("float16") for shape in ((64, DEPTH), (DEPTH, 64)))
    return left, right, np.full((64, 64), np.nan, "float32")


def test_pipelined_product() -> None:
    left, right, result = operands()
    run(pipelined_product(), left, PACKED.pack(right), result)
    np.testing.assert_array_equal(result, left.astype("float32") @ right.astype("float32"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("an arrival too few", "hangs: .*thread 128 of block 0 waits for parity 0 .* 129 of 130 arrivals are missing"),
        ("bytes that do not come", "hangs: .*8208 bytes are expected, 8192 are copied"),
        ("no fence of barriers", "used by a copy without fence.mbarrier_init"),
        ("no barrier behind barriers", "no barrier was initialized|does not see its initialization"),
        (
            "producer does not wait",
            "race: thread 0 of block 0 writes shared memory|arrive where|never written, or not yet",
        ),
        ("copies are not waited for", "is read by wgmma and was never written, or not yet"),
        ("consumer does not wait", "is read by wgmma and was never written, or not yet"),
        ("no proxy fence", "missing fence.proxy.async: .* written by thread 0 of block 0"),
        ("registers are written in between", "missing wgmma.fence"),
        ("adds to nothing", "wgmma adds to register 0 .* never written"),
        ("released too early", "written again before a tensor-core product that reads it was complete"),
    ],
)
def test_faults_of_pipelines(fault: str, text: str) -> None:
    left, right, result = operands()
    with pytest.raises(KernelFault, match=text):
        run(pipelined_product(fault), left, PACKED.pack(right), result)


def emit(instruction: str, *operands: tirx.Expr) -> None:
    """Write an instruction that no kernel of the library uses."""
    T.evaluate(instructions.ptx[instruction](*operands))


def cluster_sum(fault: str = "") -> tirx.PrimFunc:
    """Sums of what two blocks of a cluster have in shared memory, stored by a bulk copy."""
    function = Function("sums", registers="local")
    with function:
        a = function.argument("a", (2, 128), "float32")
        b = function.argument("b", (2, 128), "float32")
        with function.body():
            shared = SharedMemory()
            own, out = shared.reserve(512), shared.reserve(512)
            with launch(2, 128, cluster=2) as place:
                shared.open()
                thread = place.thread
                value, address = local(2, "float32"), local(1, "uint32")
                ptx.load_global([value[0]], T.address_of(a[place.block, thread]), "f32")
                ptx.store_shared(shared.at(own + thread * 4), [value[0]], "f32")
                if fault != "no barrier":
                    ptx.cluster_arrive()
                    ptx.cluster_wait()
                ptx.remote_address(address[0], ptx.shared_address(shared.at(own + thread * 4)), 1 - place.rank)
                ptx.load_remote([value[1]], address[0], "f32")
                ptx.store_shared(shared.at(out + thread * 4), [value[0] + value[1]], "f32")
                if fault != "no proxy fence":
                    ptx.async_proxy_fence()
                if fault == "some threads":
                    with when(thread < 64):
                        ptx.block_barrier()
                elif fault != "no block barrier":
                    ptx.block_barrier()
                with when(thread == 0):
                    target, source = T.address_of(b[place.block, 0]), shared.at(out)
                    emit("cp.async.bulk.global.shared::cta.bulk_group", target, source, T.uint32(512))
                    emit("cp.async.bulk.commit_group")
                    if fault != "not read":
                        emit("cp.async.bulk.wait_group.read", 0)
                if fault != "no end":
                    ptx.cluster_arrive()
                    ptx.cluster_wait()
    return function.result


def test_sum_in_a_cluster() -> None:
    values = np.random.default_rng(1).random((2, 128), np.float32)
    result = np.full((2, 128), np.nan, np.float32)
    run(cluster_sum(), values, result)
    np.testing.assert_array_equal(result, np.stack([values.sum(axis=0)] * 2))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no barrier", "was never written|race"),
        ("no proxy fence", "missing fence.proxy.async"),
        ("no block barrier", "race: thread 0 of block [01] reads shared memory"),
        ("some threads", "hangs: __syncthreads of block 0 is not reached by all threads: 64 of 128"),
        ("not read", "ends before its bulk stores have read"),
    ],
)
def test_faults_of_clusters(fault: str, text: str) -> None:
    with pytest.raises(KernelFault, match=text):
        run(cluster_sum(fault), np.ones((2, 128), np.float32), np.zeros((2, 128), np.float32))


def exchange(fault: str = "") -> tirx.PrimFunc:
    """Values of two blocks of a cluster, exchanged by stores that a barrier counts."""
    function = Function("exchange", registers="local")
    with function:
        a = function.argument("a", (2, 128), "float32")
        b = function.argument("b", (2, 128), "float32")
        with function.body():
            shared = SharedMemory()
            words, barrier = shared.reserve(512), shared.reserve(8, 8)
            with launch(2, 128, cluster=2) as place:
                shared.open()
                thread = place.thread
                value, addresses = local(1, "float32"), local(2, "uint32")
                with when(thread == 0):
                    ptx.barrier_init(shared.at(barrier), 1)
                    ptx.barrier_init_fence()
                    ptx.barrier_expect(shared.at(barrier), 256 if fault == "fewer bytes" else 512)
                ptx.block_barrier()
                ptx.cluster_begin()
                ptx.cluster_wait()
                other = place.rank if fault == "two blocks" else 1 - place.rank
                ptx.remote_address(addresses[0], ptx.shared_address(shared.at(words + thread * 4)), 1 - place.rank)
                ptx.remote_address(addresses[1], ptx.shared_address(shared.at(barrier)), other)
                ptx.store_async(addresses[0], tirx.reinterpret("uint32", a[place.block, thread]), addresses[1])
                if fault != "no wait":
                    ptx.barrier_wait(shared.at(barrier), tirx.const(0, "int32"))
                ptx.load_shared([value[0]], shared.at(words + thread * 4), "f32")
                T.buffer_store(b, value[0], [place.block, thread])
    return function.result


def test_exchange_in_a_cluster() -> None:
    values, result = np.random.default_rng(1).random((2, 128), np.float32), np.full((2, 128), np.nan, np.float32)
    run(exchange(), values, result)
    np.testing.assert_array_equal(result, values[::-1])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no wait", "was never written|race"),
        ("two blocks", "counts bytes that are stored in shared memory of another block"),
        ("fewer bytes", "256 bytes are expected, 512 are copied"),
    ],
)
def test_faults_of_an_exchange(fault: str, text: str) -> None:
    with pytest.raises(KernelFault, match=text):
        run(exchange(fault), np.ones((2, 128), np.float32), np.zeros((2, 128), np.float32))
