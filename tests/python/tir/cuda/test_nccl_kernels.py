"""Kernels around NCCL's collectives, compiled as C++ with threads of the host in place of a GPU's, against numpy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm_ffi import structural_walk

from relax_hetero.tir.cuda import nccl_kernels
from relax_hetero.tir.cuda.all_reduce import AllReduce, RankReduce, RowNorm
from relax_hetero.tir.cuda.nccl_kernels import (
    Exchange,
    Transfer,
    finish_kernel,
    receive_kernel,
    send_kernel,
    stage_kernel,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

AFTER = (1,), "float32"
SHORT, LONG, ODD = (6, 64), (2050, 64), (4 * 251,)  # two GPUs cannot share 251 fours equally
NORMS = {dtype: RowNorm(1e-5, dtype) for dtype in ("float32", "float16")}
LAYER_NORM = RowNorm(1e-5, "float32", is_centered=True)
MIXED = Exchange(
    3,
    (
        Transfer(0, 2, (5, 3), "float16"),
        Transfer(2, 0, (7,), "uint8"),
        Transfer(0, 1, (4096,), "float32"),
        Transfer(1, 0, (3,), "int32"),
        Transfer(0, 2, (40,), "int8"),
    ),
)
KERNELS = {
    "stage short": stage_kernel(RankReduce(AllReduce(SHORT, 2), 1, False), AFTER),
    "stage residual": stage_kernel(RankReduce(AllReduce(LONG, 2, None, True), 1, False), AFTER),
    "finish odd": finish_kernel(RankReduce(AllReduce(ODD, 2), 1, False), 0, (0, 1)),
    "finish long": finish_kernel(RankReduce(AllReduce(LONG, 2), 0, False), 0, (0, 1)),
    "finish short norm": finish_kernel(RankReduce(AllReduce(SHORT, 2, NORMS["float16"]), 1, True), 0, (0, 1)),
    "finish long norm": finish_kernel(RankReduce(AllReduce(LONG, 2, NORMS["float32"]), 1, True), 0, (0, 1)),
    "finish layer norm": finish_kernel(RankReduce(AllReduce(SHORT, 2, LAYER_NORM), 1, True), 0, (0, 1)),
    "send": send_kernel(MIXED, 0, AFTER),
    "receive": receive_kernel(MIXED, 0, 0, (0, 1, 2)),
}
SHIM = r"""
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
struct Dim { int x; };
thread_local Dim blockIdx, threadIdx;
Dim blockDim, gridDim;
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Pointer { void* p; template <class T> operator T*() const { return (T*)p; } };
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
float4 rh_add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
using std::min;
float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <class V> V __ldcg(const V* from) { return *from; }
template <class To> void store(void* out, long long i, float4 v) {
  To* to = (To*)out + 4 * i;
  to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
}
template <bool HALF> void rh_store(void* out, long long i, float4 v) {
  HALF ? store<_Float16>(out, i, v) : store<float>(out, i, v);
}
std::barrier<>* together;
float partial[1024];
template <bool MAX> float rh_reduce(float value, int) {
  partial[threadIdx.x] = value;
  together->arrive_and_wait();
  float sum = 0;
  for (int i = 0; i < blockDim.x; ++i) sum += partial[i];
  together->arrive_and_wait();
  return sum;
}
template <class Kernel> void launch(int blocks, int threads, bool waits, Kernel kernel) {
  gridDim.x = blocks; blockDim.x = threads;
  std::barrier<> barrier(threads);
  together = &barrier;
  for (int block = 0; block < blocks; ++block) {
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) {
      auto body = [=] { blockIdx.x = block; threadIdx.x = thread; kernel(); };
      if (waits) running.emplace_back(body); else body();
    }
    for (auto& each : running) each.join();
  }
}
"""


def _function(number: int, name: str) -> str:
    """A function of the addresses of a kernel's buffers, in C++."""
    kernel, calls, loops = KERNELS[name], [], {}
    names = [str(param.name) for param in kernel.params]

    def visit(call: tvm.ir.Call) -> None:
        if str(call.op.name) == "tirx.cuda.func_call":
            args = [
                f"Pointer{{buffers[{names.index(str(arg.args[0].source.name))}]}}"
                if isinstance(arg, tvm.ir.Call)
                else repr(arg.value)
                for arg in call.args[1:-1]
            ]
            calls.append(f"{call.args[0].value}({', '.join(args)});")

    structural_walk(kernel.body, (tvm.ir.Call, visit))
    structural_walk(
        kernel.body, (tirx.For, lambda loop: loops.update({loop.thread_binding.thread_tag: int(loop.extent)}))
    )
    size = f"{loops['blockIdx.x']}, {loops['threadIdx.x']}, {str('norm' in name).lower()}"
    return f'extern "C" void kernel_{number}(void** buffers) {{ launch({size}, [=] {{ {" ".join(calls)} }}); }}'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a kernel by its name on arrays, in the order of its parameters."""
    folder = tmp_path_factory.mktemp("kernels")
    code = "#if 1" + nccl_kernels._SOURCE.partition("#define RH_NCCL")[2]
    functions = [_function(number, name) for number, name in enumerate(KERNELS)]
    (folder / "kernels.cpp").write_text("\n".join([SHIM, code, *functions]))
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-fpermissive",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        "kernels.cpp",
        "-o",
        "kernels.so",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def run_on(name: str, *arrays: np.ndarray) -> None:
        assert len(arrays) == len(KERNELS[name].params)
        addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        library[f"kernel_{list(KERNELS).index(name)}"](addresses)

    return run_on


def buffers(count, nbytes):
    """Poisoned memory of GPUs with a margin, and the tensor of its addresses."""
    memory = [np.full(nbytes + 64, 0xCD, "uint8") for _ in range(count)]
    return memory, np.array([each.ctypes.data for each in memory], "int64")


def random(shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(("name", "shape", "has_residual"), [("stage short", SHORT, 0), ("stage residual", LONG, 1)])
def test_an_operand_is_copied_with_the_rows_of_its_residual(run, name, shape, has_residual):
    x, (memory, bases) = random(shape), buffers(2, 4 * int(np.prod(shape)))
    half, expected, after = shape[0] // 2, x.copy(), np.zeros(1, "float32")
    residual = [random((half, shape[1]))] * has_residual
    for rows in residual:
        expected[half:] += rows
    run(name, x, bases, after, *residual, np.zeros(1, "float32"))
    np.testing.assert_array_equal(memory[1][:-64].view("float32").reshape(shape), expected)
    assert (memory[1][-64:] == 0xCD).all() and (memory[0] == 0xCD).all()


@pytest.mark.parametrize(("name", "shape", "rank"), [("finish odd", ODD, 1), ("finish long", LONG, 0)])
def test_a_sum_is_copied(run, name, shape, rank):
    total, (memory, bases) = random(shape), buffers(2, 4 * int(np.prod(shape)))
    memory[rank][:-64] = total.view("uint8").ravel()
    out = np.full(total.size + 16, 7, "float32")
    run(name, bases, np.zeros(1, "float32"), out)
    np.testing.assert_array_equal(out[:-16].reshape(shape), total)
    assert (out[-16:] == 7).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "first"),
    [
        ("finish short norm", SHORT, "float16", 0),
        ("finish long norm", LONG, "float32", LONG[0] // 2),
        ("finish layer norm", SHORT, "float32", 0),
    ],
)
def test_a_norm_and_the_rows_that_a_gpu_keeps(run, name, shape, dtype, first):
    total, weight, (memory, bases) = 3 * random(shape) + 5, random(shape[-1:]), buffers(2, 4 * int(np.prod(shape)))
    bias = [weight[::-1].copy()] * ("layer" in name)
    memory[1][:-64] = total.view("uint8").ravel()
    out, kept = np.full(total.size + 16, 7, dtype), np.full(total[first:].size + 16, 7, "float32")
    run(name, bases, np.zeros(1, "float32"), weight, *bias, out, kept)
    wide = total.astype("float64")
    wide -= wide.mean(1, keepdims=True) if bias else 0
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight + sum(bias)
    np.testing.assert_allclose(
        out[:-16].reshape(shape), expected, rtol={"float16": 1e-3, "float32": 1e-5}[dtype], atol=1e-5
    )
    np.testing.assert_array_equal(kept[:-16].reshape(-1, shape[1]), total[first:])
    assert (out[-16:] == 7).all() and (kept[-16:] == 7).all()


def test_tensors_have_places_in_the_buffers(run):
    (memory, bases), generator = buffers(3, 1 << 15), np.random.default_rng(0)
    sent, received = MIXED.of(0, sends=True), MIXED.of(0, sends=False)
    values = [generator.integers(0, 100, each.shape).astype(each.dtype) for each, _ in sent]
    run("send", *values, bases, np.zeros(1, "float32"), np.zeros(1, "float32"))
    expected = np.full_like(memory[0], 0xCD)
    for value, (each, offset) in zip(values, sent, strict=True):
        expected[offset : offset + each.bytes] = value.view("uint8").ravel()
    np.testing.assert_array_equal(memory[0], expected)
    assert len({offset for _, offset in sent + received}) == len(MIXED.transfers)
    values = [generator.integers(0, 100, each.shape).astype(each.dtype) for each, _ in received]
    for value, (each, offset) in zip(values, received, strict=True):
        memory[0][offset : offset + each.bytes] = value.view("uint8").ravel()
    results = [np.full(each.bytes + 16, 0xCD, "uint8") for each, _ in received]
    run("receive", bases, np.zeros(1, "float32"), *results)
    for value, result in zip(values, results, strict=True):
        np.testing.assert_array_equal(result[:-16], value.view("uint8").ravel())
        assert (result[-16:] == 0xCD).all()
