"""Kernels around NCCL's collectives as their CUDA source computes them (`gpu_threads.hpp`), against numpy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

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
from seeds import fresh_seed
from tir.cuda.test_all_reduce import compiled, launch_of, needs_compiler

pytestmark = needs_compiler

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
    "stage short": lambda: stage_kernel(RankReduce(AllReduce(SHORT, 2), 1, False), AFTER),
    "stage residual": lambda: stage_kernel(RankReduce(AllReduce(LONG, 2, None, True), 1, False), AFTER),
    "stage whole residual": lambda: stage_kernel(RankReduce(AllReduce(LONG, 2, None, True, True), 1, False), AFTER),
    "finish odd": lambda: finish_kernel(RankReduce(AllReduce(ODD, 2), 1, False), 0, (0, 1)),
    "finish long": lambda: finish_kernel(RankReduce(AllReduce(LONG, 2), 0, False), 0, (0, 1)),
    "finish short norm": lambda: finish_kernel(RankReduce(AllReduce(SHORT, 2, NORMS["float16"]), 1, True), 0, (0, 1)),
    "finish long norm": lambda: finish_kernel(RankReduce(AllReduce(LONG, 2, NORMS["float32"]), 1, True), 0, (0, 1)),
    "finish layer norm": lambda: finish_kernel(RankReduce(AllReduce(SHORT, 2, LAYER_NORM), 1, True), 0, (0, 1)),
    "send": lambda: send_kernel(MIXED, 0, AFTER),
    "receive": lambda: receive_kernel(MIXED, 0, 0, (0, 1, 2)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a kernel by its name on arrays, in the order of its parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_kernels, "_THREADS", 64)
        patch.setattr(nccl_kernels, "_MAX_BLOCKS", 3)
        kernels = {name: make() for name, make in KERNELS.items()}
    lines = [
        'extern "C" int run_kernel(int number, void** p, unsigned seed) {',
        "std::vector<std::vector<Launch>> gpus(1);",
    ]
    for number, kernel in enumerate(kernels.values()):
        pointers = {each.name: f"Pointer{{p[{i}]}}" for i, each in enumerate(kernel.params)}
        lines.append(f"if (number == {number}) gpus[0] = {{{launch_of(kernel, pointers)}}};")
    functions = "\n".join([*lines, "return run(gpus, seed); }"])
    library = compiled(tmp_path_factory.mktemp("kernels"), nccl_kernels._SOURCE, functions)

    def run_on(name, *arrays):
        assert len(arrays) == len(kernels[name].params)
        addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        assert library.run_kernel(list(kernels).index(name), addresses, fresh_seed()) == 0

    return run_on


def buffers(count, nbytes):
    """Poisoned memory of GPUs with a margin, and the tensor of its addresses."""
    memory = [np.full(nbytes + 64, 0xCD, "uint8") for _ in range(count)]
    return memory, np.array([each.ctypes.data for each in memory], "int64")


def random(shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(
    ("name", "shape", "has_residual", "is_whole"),
    [("stage short", SHORT, 0, 0), ("stage residual", LONG, 1, 0), ("stage whole residual", LONG, 1, 1)],
)
def test_an_operand_is_copied_with_the_rows_of_its_residual(run, name, shape, has_residual, is_whole):
    x, (memory, bases) = random(shape), buffers(2, 4 * int(np.prod(shape)))
    half, expected, after = shape[0] // 2, x.copy(), np.zeros(1, "float32")
    residual = [random((half * (1 + is_whole), shape[1]))] * has_residual
    for rows in residual:
        expected[half:] += rows[-half:]
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
