"""Meshes of two GPUs against numpy and against one GPU: sums by kernels and by NCCL, exchanges by copies, a model."""

import gc
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from models.test_meshes import from_bench
from modules import ir_module
from relax_hetero.artifact.commands import GRAPH, Dispatch
from relax_hetero.artifact.graph_layout import SUBMITTED
from relax_hetero.encoding.token_masks import pack_mask
from relax_hetero.frontend import LinkCost, PagedCache
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.llm.calibrate import calibrate
from relax_hetero.tools.scale import fleet_of
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS
from relax_hetero.vm.device.nccl import load_nccl
from seeds import fresh_rng
from transform.interpreting import run
from transform.shard.test_partition_by_mesh import RandomGraph

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [
    pytest.mark.usefixtures("free_exchanges"),
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs"),
]
TOKENS = np.random.default_rng(1).integers(0, 320, 40)
NO_NCCL = load_nccl() if GPUS else ""
with_nccl = pytest.mark.skipif(isinstance(NO_NCCL, str), reason=f"no NCCL: {NO_NCCL}")
STRATEGIES = ["custom", pytest.param("nccl", marks=with_nccl)]


def sums(count, strategy="custom"):
    """Twice the sum of the rows of ``(2, count)``, of which each GPU has one; both GPUs use the first sum."""
    ones, shape = np.ones((1, count), "float32"), (2, count)

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            rows = R.hetero.shard(x, "S[0]")
            total = R.sum(rows, [0], keepdims=True)
            again = R.hetero.shard(R.concat((total, R.multiply(total, R.const(ones))), axis=0), "S[0]")
            result = R.sum(again, [0], keepdims=True)
            y = R.hetero.shard(R.add(result, R.const(ones)), "R")
            R.output(y)
        return y

    return rh.vm.VirtualMachine(rh.compile(mod, allreduce_strategy=strategy))


# The last three are at the border of the two protocols, and beyond.
@pytest.mark.parametrize("count", [3, 4, 1000, 4096, 131072, 131076, 3_000_004])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums(count, strategy):
    vm, generator = sums(count, strategy), fresh_rng()
    for _ in range(5):
        x = generator.integers(-1000, 1000, (2, count)).astype("float32")
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), 2 * x.sum(0, keepdims=True) + 1)
    np.testing.assert_array_equal(np.asarray(vm.submit("main", x).result()), 2 * x.sum(0, keepdims=True) + 1)


def norm_of_sums(shape, ups, downs, scale, shift, kind, dtype):
    """Two sums with a norm of each, of which the second one adds the first."""

    def norm_op(a):
        if kind == "layer":
            return relax.op.nn.layer_norm(a, relax.const(scale), relax.const(shift), axes=[-1], epsilon=1e-5)
        return relax.op.nn.rms_norm(a, relax.const(scale), axes=[-1], epsilon=1e-5)

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(ups[0])), R.const(downs[0])))
            b = R.astype(norm_op(a), dtype)
            c = R.add(a, R.matmul(R.matmul(R.astype(b, "float32"), R.const(ups[1])), R.const(downs[1])))
            y = R.matmul(R.multiply(c, R.const(1e-6, "float32")), R.const(ups[2]))
            R.output(y)
        return y

    return mod


NORMS = [(kind, dtype) for kind in ("rms", "layer") for dtype in ("float32", "float16")]


# Short; long; rows that GPUs cannot share; rows of more than 512 threads, short and long.
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (96, 2048), (97, 2048), (2, 12288), (40, 16384)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_of_sums(rows, width, strategy):
    generator = np.random.default_rng(2)
    scale = generator.uniform(0.5, 2, width).astype("float32")
    ups = [generator.standard_normal((width, 64)).astype("float32") / width**0.5 for _ in range(3)]
    downs = [(generator.standard_normal((64, width)) * size).astype("float32") for size in (1, 1e6)]
    shape, shift = (rows, width), generator.standard_normal(width).astype("float32")
    mod = norm_of_sums(shape, ups, downs, scale, shift, *NORMS[0])
    for kind, dtype in NORMS:
        name = f"{kind}_{dtype}"
        other = norm_of_sums(shape, ups, downs, scale, shift, kind, dtype)["main"]
        mod[name] = other.with_attr("global_symbol", name)
    del mod["main"]

    def norm(a, kind):
        centered = a - a.mean(1, keepdims=True) if kind == "layer" else a
        normal = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * scale
        return normal + shift if kind == "layer" else normal

    vm = rh.vm.VirtualMachine(rh.compile(mod, allreduce_strategy=strategy))
    for _ in range(3):
        for kind, dtype in NORMS:
            x = fresh_rng().standard_normal(shape).astype("float32") * np.float32(1e6)  # beyond float16
            a = x + x.astype("float64") @ ups[0] @ downs[0]
            c = a + norm(a, kind) @ ups[1] @ downs[1]
            expected = 1e-6 * c @ ups[2]
            atol = {"float32": 1e-5, "float16": 2e-3}[dtype] * np.abs(expected).max()
            np.testing.assert_allclose(np.asarray(vm[f"{kind}_{dtype}"](x)), expected, atol=atol, rtol=1e-4)


@pytest.mark.skipif(GPUS < 4, reason="fewer than four NVIDIA GPUs")
@pytest.mark.parametrize("rows", [8, 4096])
def test_sums_within_the_groups_of_two_axes(rows):
    """Pairs of GPUs share a half of a batch; then others share the columns of what each pair has."""
    generator, shape = np.random.default_rng(4), (rows, 256)
    ups = [generator.standard_normal((256, 64)).astype("float32") / 16 for _ in range(2)]
    downs = [generator.standard_normal((64, 256)).astype("float32") / 8 for _ in range(2)]

    @ir_module("cuda", "cuda:1", "cuda:2", "cuda:3")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:4](2, 2)")):
        with R.dataflow():
            a = R.hetero.shard(x, "S[0], R")
            b = R.add(a, R.matmul(R.nn.relu(R.matmul(a, R.const(ups[0]))), R.const(downs[0])))
            c = R.hetero.shard(R.nn.softmax(b), "S[1], S[0]")
            d = R.matmul(c, R.const(ups[1]))
            e = R.nn.softmax(R.hetero.shard(d, "R, S[0]"))
            y = R.matmul(e, R.const(downs[1]))
            R.output(y)
        return y

    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(3):
        x = fresh_rng().standard_normal(shape).astype("float32")
        b = x + np.maximum(x.astype("float64") @ ups[0], 0) @ downs[0]
        d = softmax(b) @ ups[1]
        expected = softmax(d) @ downs[1]
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, rtol=1e-4, atol=1e-4)


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_a_new_size_that_concerns_one_gpu():
    ones = [np.ones(shape, "float32") for shape in ((64, 8), (8, 64))]

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((4, 64), "float32", "cuda[0:2]"), y: R.Tensor(("n", 8), "float32", "cuda:0")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(R.matmul(x, R.const(ones[0])), R.const(ones[1])))
            b = R.matmul(a, R.const(ones[0]))
            z = R.nn.relu(y)
            R.output(b, z)
        return b, z

    vm, x = rh.vm.VirtualMachine(rh.compile(mod)), fresh_rng().standard_normal((4, 64)).astype("float32")
    for size in (3, 5, 3, 7):
        y = fresh_rng().standard_normal((size, 8)).astype("float32")
        b, z = vm["main"](x, y)
        np.testing.assert_allclose(b.numpy(), np.ones((4, 8)), rtol=1e-5)
        np.testing.assert_array_equal(z.numpy(), np.maximum(y, 0))


def test_products_send_what_other_gpus_add():
    """Products of several tiles for each block, between sums with norms, of which each adds the last one."""
    rows, width, depth = 2048, 4096, 1024
    generator = np.random.default_rng(3)
    scale = generator.uniform(0.5, 2, width).astype("float32")
    ups = [(generator.standard_normal((width, depth)) / width**0.5).astype("float16") for _ in range(4)]
    downs = [(generator.standard_normal((depth, width)) / depth**0.5).astype("float16") for _ in range(3)]

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((rows, width), "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.astype(x, "float16")
            a = R.add(x, R.matmul(R.matmul(h, R.const(ups[0])), R.const(downs[0]), out_dtype="float32"))
            b = R.astype(R.nn.rms_norm(a, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            c = R.add(a, R.matmul(R.matmul(b, R.const(ups[1])), R.const(downs[1]), out_dtype="float32"))
            d = R.astype(R.nn.rms_norm(c, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            e = R.add(c, R.matmul(R.matmul(d, R.const(ups[2])), R.const(downs[2]), out_dtype="float32"))
            f = R.astype(R.nn.rms_norm(e, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            y = R.matmul(f, R.const(ups[3]), out_dtype="float32")
            R.output(y)
        return y

    executable = rh.compile(mod)
    sums_of_tiles = [name for name in executable.metadata.kernels if name.startswith("all_reduce") and "_sent" in name]
    assert len(sums_of_tiles) == 6  # the first sum, too, on both GPUs
    vm = rh.vm.VirtualMachine(executable)
    cases = []
    for _ in range(2):
        total = fresh_rng().standard_normal((rows, width)).astype("float32")
        normal, x = total, total
        for up, down in zip(ups[:3], downs, strict=True):
            hidden = (normal.astype("float16").astype("float32") @ up.astype("float32")).astype("float16")
            total = total + hidden.astype("float32") @ down.astype("float32")
            normal = total / np.sqrt((total * total).mean(1, keepdims=True) + 1e-5) * scale
        cases.append((x, normal.astype("float16").astype("float32") @ ups[3].astype("float32")))
    for x, expected in cases * 3:  # in turn, so that what a call before has left is wrong
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_products_send_short_sums(rows):
    """Sums of several widths in the same places, of rows of numbers, of zeros and of NaN."""
    generator, widths = np.random.default_rng(5), (1024, 4096, 260, 2048)
    ups = [(generator.standard_normal((width, 512)) / width**0.5).astype("float16") for width in widths]
    downs = [(generator.standard_normal((512, width)) / 512**0.5).astype("float16") for width in widths]
    scales = [generator.uniform(0.5, 2, width).astype("float32") for width in widths]
    shape = (rows, widths[0])

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.astype(x, "float16")
            a = R.add(x, R.matmul(R.matmul(h, R.const(ups[0])), R.const(downs[0]), out_dtype="float32"))
            b = R.astype(R.nn.rms_norm(a, R.const(scales[0]), axes=[-1], epsilon=1e-5), "float16")
            c = R.matmul(R.matmul(b, R.const(ups[0])), R.const(downs[1]), out_dtype="float32")
            d = R.astype(R.nn.rms_norm(c, R.const(scales[1]), axes=[-1], epsilon=1e-5), "float16")
            e = R.matmul(R.matmul(d, R.const(ups[1])), R.const(downs[2]), out_dtype="float32")
            f = R.astype(R.nn.relu(e), "float16")
            g = R.matmul(R.matmul(f, R.const(ups[2])), R.const(downs[3]), out_dtype="float32")
            i = R.astype(R.nn.rms_norm(g, R.const(scales[3]), axes=[-1], epsilon=1e-5), "float16")
            y = R.add(R.matmul(R.matmul(i, R.const(ups[3])), R.const(downs[0]), out_dtype="float32"), a)
            R.output(y)
        return y

    def product(x, up, down):
        hidden = (x.astype("float16").astype("float32") @ up.astype("float32")).astype("float16")
        return hidden.astype("float32") @ down.astype("float32")

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * scale

    executable = rh.compile(mod)
    num_sent = sum("_sent" in name for name in executable.metadata.kernels)
    assert num_sent >= 12  # products and sums of both GPUs
    vm = rh.vm.VirtualMachine(executable)
    for _ in range(20):
        x = fresh_rng().standard_normal(shape).astype("float32")
        x[4:5], x[3:4, 7] = 0, np.nan
        a = x + product(x, ups[0], downs[0])
        c = product(norm(a, scales[0]), ups[0], downs[1])
        e = product(norm(c, scales[1]), ups[1], downs[2])
        g = product(np.maximum(e, 0), ups[2], downs[3])
        expected = a + product(norm(g, scales[3]), ups[3], downs[0])
        atol = 1e-2 * np.nanmax(np.abs(expected))
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, rtol=0, atol=atol)


def test_a_product_before_the_only_sum_of_a_function():
    """The sum is computed twice, from one product, which is long enough to send it."""
    generator, rows, width = np.random.default_rng(6), 16, 2048
    up = (generator.standard_normal((width, 512)) / width**0.5).astype("float16")
    down = (generator.standard_normal((512, width)) / 512**0.5).astype("float16")
    shape = (rows, width)

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.matmul(R.astype(x, "float16"), R.const(up))
            a = R.nn.relu(R.add(x, R.matmul(h, R.const(down), out_dtype="float32")))
            y = R.matmul(R.astype(a, "float16"), R.const(up), out_dtype="float32")
            R.output(y)
        return y

    vm = rh.vm.VirtualMachine(rh.compile(rh.transform.PartitionByMesh(by_cost=False)(mod)))
    for _ in range(20):
        x = fresh_rng().standard_normal(shape).astype("float32")
        h = (x.astype("float16").astype("float32") @ up.astype("float32")).astype("float16")
        a = np.maximum(x + h.astype("float32") @ down.astype("float32"), 0).astype("float16")
        expected = a.astype("float32") @ up.astype("float32")
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, rtol=0, atol=1e-2 * np.abs(expected).max())


@with_nccl
def test_graphs_have_nccls_sums():
    """Each GPU's work is one graph, launched once for each call, with NCCL's sums as child graphs."""
    vm, x = sums(4096, "nccl"), np.ones((2, 4096), "float32")
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), np.full((1, 4096), 5, "float32"))
    metadata = vm.executable.metadata
    counts = {
        (region.device, region.runs): sum("all_reduce" in command.kernel for command in region.commands)
        for region in metadata.regions
        if any("all_reduce" in command.kernel for command in region.commands)
    }
    assert counts == {(0, GRAPH): 1, (1, GRAPH): 1} and len(metadata.collectives) == 1
    launches = [int(graph._words[SUBMITTED]) for graph in vm.graphs]
    assert launches.count(3) >= 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [4096, 262144])
def test_many_sums(count, strategy):
    """As many in each graph as a language model of 32 layers has; calls begin before the last ones have ended."""
    module = from_bench("collectives", "chain_module")(2, count, 64)
    vm = rh.vm.VirtualMachine(rh.compile(module, allreduce_strategy=strategy), collective_timeout=20)
    arrays = [np.arange(count, dtype="float32")[None] % 7 + rank for rank in range(2)]
    tensors = [tvm.runtime.tensor(array, tvm.cuda(rank)) for rank, array in enumerate(arrays)]
    calls = [vm["main"](*tensors) for _ in range(12)]
    for result in (result for results in calls for result in results):
        np.testing.assert_array_equal(np.asarray(result), sum(arrays) * np.float32(2) ** 63)


@with_nccl
def test_machines_in_turn_and_from_threads_share_gpus():
    """Two machines, each with communicators of its own, and a third one that takes those of the first."""
    x = np.ones((2, 1024), "float32")
    machines = [sums(1024, "nccl"), sums(1024, "nccl")]
    expected = np.full((1, 1024), 5, "float32")
    for vm in machines * 2:
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), expected)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda number: np.asarray(machines[number % 2]["main"](x)), range(40)):
            np.testing.assert_array_equal(result, expected)
    del machines[0], vm
    gc.collect()
    np.testing.assert_array_equal(np.asarray(sums(1024, "nccl")["main"](x)), expected)


def gathers(count, dtype):
    """Four times each row of ``(2, count)``, doubled twice: by halves, and by both GPUs after a gather; and a sum."""
    ones = np.ones((1, count), "float32")

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((2, count), "float32", "cuda[0:2]"), z: R.Tensor((2, count), dtype, "cuda[0:2]")):
        with R.dataflow():
            total = R.sum(R.hetero.shard(x, "S[0]"), [0], keepdims=True)
            again = R.hetero.shard(R.concat((total, R.multiply(total, R.const(ones))), axis=0), "S[0]")
            y = R.hetero.shard(R.sum(again, [0], keepdims=True), "R")
            rows = R.hetero.shard(z, "S[0]")
            whole = R.hetero.shard(R.add(rows, rows), "R")
            twice = R.hetero.shard(R.add(whole, whole), "S[0]")
            w = R.hetero.shard(twice, "R")
            R.output(y, w)
        return y, w

    return rh.compile(mod, allreduce_strategy="nccl")


@with_nccl
@pytest.mark.parametrize(("count", "dtype"), [(1004, "float16"), (4, "uint8"), (4096, "int32"), (1 << 20, "float32")])
def test_gathers(count, dtype):
    exe = gathers(count, dtype)
    assert [each.op for each in exe.metadata.collectives].count("exchange") == 1
    vm, generator = rh.vm.VirtualMachine(exe), fresh_rng()
    for _ in range(4):
        x = generator.integers(-1000, 1000, (2, count)).astype("float32")
        z = generator.integers(0, 60, (2, count)).astype(dtype)
        y, w = vm["main"](x, z)
        np.testing.assert_array_equal(np.asarray(y), 2 * x.sum(0, keepdims=True))
        np.testing.assert_array_equal(np.asarray(w), 4 * z)


# Graphs with sums that both GPUs use, two of them with gathers.
@pytest.mark.parametrize("seed", [17, 58, 79])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_graphs(seed, strategy):
    generator = np.random.default_rng(seed)
    mod = RandomGraph(generator, (2,), 12, "cuda").module()
    exe = rh.compile(mod, allreduce_strategy=strategy)
    assert {each.op for each in exe.metadata.collectives} >= {"all-reduce"}
    vm = rh.vm.VirtualMachine(exe)
    for _ in range(3):
        arguments = [generator.standard_normal((4, 8, 12)).astype("float32") for _ in range(2)]
        for actual, expected in zip(vm["main"](*arguments), run(mod, *arguments), strict=True):
            np.testing.assert_allclose(
                np.asarray(actual), expected, rtol=2e-4, atol=2e-4 * max(1, np.abs(expected).max())
            )


def check_times(profile, metadata):
    """Require a time of each kernel of a function's command buffers, on both GPUs."""
    regions = [region for region in metadata.regions if region.function == profile.function]
    kernels = [
        (region.name, each.kernel) for region in regions for each in region.commands if isinstance(each, Dispatch)
    ]
    assert sorted((each.region, each.kernel) for each in profile.commands) == sorted(kernels)
    assert {"cuda:0", "cuda:1"} <= {row.device for row in profile.rows}
    assert all(0 < row.microseconds <= profile.microseconds for row in profile.rows if row.device != "host")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_profiles_have_the_kernels_of_both_gpus(strategy):
    vm, generator = sums(1024, strategy), fresh_rng()
    for _ in range(3):
        x = generator.integers(-1000, 1000, (2, 1024)).astype("float32")
        check_times(vm.profile("main", x), vm.executable.metadata)
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), 2 * x.sum(0, keepdims=True) + 1)


LOST = """
import gc, os, time
import numpy as np
from gpu.test_meshes import rh, sums
from relax_hetero.vm.device import nccl_memory
from relax_hetero.vm.device.cuda_library import cuda_library
from relax_hetero.vm.device.cuda_streams import Stream

vm, x = sums(1024, "nccl"), np.ones((2, 1024), "float32")
lost = rh.vm.VirtualMachine(vm.executable, collective_timeout=2)
lost["main"](x).numpy()
(memory,) = nccl_memory._memories.values()
nccl, address = memory._nccl, memory._buffers[0].data_ptr()
cuda_library().use(0)
memory.communicators.each[0].allReduce(address, address, 1024, nccl.float32, nccl.sum, 0)  # without the other GPU
try:
    error = lost.submit("main", x).exception(30)
except rh.HeteroError as at_once:  # the copy of an argument waits for the GPU
    error = at_once
print(type(error).__name__, error, flush=True)
try:
    lost["main"](x)
except rh.HeteroError as again:
    print(again, flush=True)
begin = time.monotonic()
while not all(Stream(cuda_library(), gpu, 0).done() for gpu in (0, 1)) and time.monotonic() < begin + 20:
    time.sleep(0.1)
print("aborted", time.monotonic() < begin + 20, flush=True)
error = None  # whose frames refer to the machine
del lost, memory
gc.collect()
print(vm["main"](x).numpy().tolist() == [[5] * 1024], flush=True)
os._exit(0)
"""


@with_nccl
def test_a_call_of_a_lost_gpu_ends():
    """A sum that one GPU alone begins: the call after it waits for ever, until NCCL is aborted."""
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", LOST]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == 4, result.stdout + result.stderr
    assert lines[0].startswith("HeteroError NCCL's exchange between cuda:0, cuda:1 failed: it has not ended after 2 s")
    assert [lines[0].removeprefix("HeteroError "), "aborted True", "True"] == lines[1:]


# The second one gathers rows, as heads are no whole superblocks.
@pytest.mark.parametrize(
    ("name", "types"), [("llama", "F16"), ("qwen2", "Q4_K"), ("qwen3moe", {"*exps*": "Q4_K", "*": "Q8_0"})]
)
def test_a_language_model_has_the_tokens_of_one_gpu(name, types, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    texts = []
    for count, strategy in (1, "auto"), (2, "custom"), *[(2, "nccl")] * (not isinstance(NO_NCCL, str)):
        model, _ = rh.llm.load(
            path, "cuda", tensor_parallel=count, batches=(2,), chunks=(32,), context=128, background=False,
            allreduce_strategy=strategy,
        )  # fmt: skip
        slots = [model.cache.add(), model.cache.add()]
        rows = [[int(model.prefill(slot, TOKENS[: 21 + slot]).argmax())] for slot in slots]
        step = model.begin_decode(slots, [row[-1] for row in rows])
        for _ in range(8):  # each begins before the tokens of the last one are read
            ahead = model.begin_decode(slots, step)
            for token, row in zip(step.tokens(), rows, strict=True):
                row.append(token)
            step = ahead
        if name != "qwen2":  # whose rows one GPU receives
            regions = model.executable.metadata.regions
            # A step is one CUDA graph for each GPU.
            assert [region.device for region in regions if region.function == "decode_2"] == [*range(count)]
        logits = model.decode(slots, step.tokens()).copy()
        assert logits.shape == (2, 320) and np.isfinite(logits).all()
        for row, values in zip(rows, logits, strict=True):
            row.append(int(values.argmax()))
        allowed = np.arange(320) % 7 == 3
        step = model.begin_decode(slots, [row[-1] for row in rows])
        masked = step.masked_tokens(np.stack([pack_mask(allowed)] * 2))
        assert allowed[masked].all()
        for row, token in zip(rows, masked, strict=True):
            row.append(token)
        texts.append(rows)
        if count == 2:
            model.cache.free(slots[0])
            for profile in model.profile(cached=8, rounds=1):
                check_times(profile, model.executable.metadata)
    assert all(rows == texts[0] for rows in texts)


def test_calls_of_stages_follow_each_other(tmp_path):
    """A step of four texts in two calls of two, each from stage to stage, has the tokens of one GPU."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16")
    options = {"batches": (2,), "chunks": (16,), "slots": 4, "context": 64, "background": False}
    stages = {"blk.1.*": "cuda:1", "output*": "cuda:1", "*": "cuda:0"}
    texts = []
    for devices, placement in ("cuda", None), (["cuda:0", "cuda:1"], stages):
        model, _ = rh.llm.load(path, devices, placement, **options)
        slots = [model.cache.add() for _ in range(4)]
        for slot in slots:
            model.prefill(slot, TOKENS[slot : slot + 9])
        step = model.begin_decode(slots, TOKENS[9:13].tolist())
        assert len(step.calls) == 2
        rows = [step.tokens()]
        for _ in range(4):
            step = model.begin_decode(slots, step)
            rows.append(step.tokens())
        texts.append(rows)
    assert texts[0] == texts[1]


def test_layers_are_measured(tmp_path):
    """On one GPU, for each number of texts, with rates that were measured; and the host's time for two."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16")
    vdevices, costs, _ = fleet_of("cuda", 1, 2, LinkCost(1e9, 1e-3), measure=True)
    measured = calibrate(read_gguf(path), PagedCache((4,), (32,), 4, 64), vdevices, costs, 4)
    assert set(measured.decode) == {1, 2, 4} and measured.prefill > 0 and costs.figures != "tables"
    assert 0 < measured.host.call < measured.host.seconds(4, 1, 2)


def test_both_gpus_gather_a_small_value():
    copies = {"b": {"placement": "R", "names": ["b", "b@1"], "mesh": [0, 1]}}

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((4, 6), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.hetero.shard(x, "S[1]")
            b = R.multiply(a, R.const(2.0, "float32"))
            R.output(b)
        return b

    function = mod["main"].with_attrs({SPLIT_PARAMETERS: json.dumps(copies), "output_names": ["b"]})
    mod.update_func(mod.get_global_var("main"), function)
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(3):
        x = fresh_rng().standard_normal((4, 6)).astype("float32")
        x[1, 4], x[2, 1] = np.nan, np.inf
        for whole in vm["main"](x):
            np.testing.assert_array_equal(np.asarray(whole), 2 * x)
