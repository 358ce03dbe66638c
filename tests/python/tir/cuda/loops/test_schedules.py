"""Schedules for kernels of GPUs: every rule on ragged shapes, run as CPU code, against numpy."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx, topi
from tvm_ffi import structural_walk

import relax_hetero as rh
from gpu_interpreter import run as interpreted
from relax_hetero.frontend.greedy_tokens import greedy_tokens
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.loops import launches_of, schedule
from relax_hetero.transform.dispatch.legalize import legalize

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_cpu import run

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def tensor(*shape, dtype="float32", name="x"):
    return te.placeholder([tirx.IntImm("int64", extent) for extent in shape], dtype, name)


def scheduled(*tensors):
    func = te.create_prim_func(list(tensors)).with_attr("target", TARGET)
    return schedule(func, gpu_target_of(TARGET))


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if "float" in dtype:
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


def check(reference, *tensors, launches=1, rtol=1e-5):
    """The last tensor is the result; its memory is poisoned before."""
    func = scheduled(*tensors)
    if launches == 1:
        assert is_one_launch(func)
    else:
        assert len(launches_of(func)) == launches
    shapes = [[int(extent) for extent in param.shape] for param in func.params]
    arrays = [values(shape, str(p.dtype), i) for i, (shape, p) in enumerate(zip(shapes, func.params, strict=True))]
    arrays[-1][...] = 77 if arrays[-1].dtype != bool else 1
    expected = reference(*(array.copy() for array in arrays[:-1]))
    run(func, *arrays)
    np.testing.assert_allclose(
        arrays[-1].astype("float64"), np.asarray(expected).astype("float64"), rtol=rtol, atol=rtol * 10
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1,), (333,), (1024,), (3, 5), (64, 1000), (2, 3, 7, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64"])
def test_maps_of_contiguous_tensors(shape, dtype):
    x = tensor(*shape, dtype=dtype)
    check(lambda a: a + a, x, topi.add(x, x), rtol=1e-3)


def test_maps_with_broadcast_operands():
    x, b, c = tensor(12, 40), tensor(40, name="b"), tensor(12, 1, name="c")
    check(lambda a, b, c: (a + b) * c, x, b, c, topi.multiply(topi.add(x, b), c))


def test_maps_between_types_of_other_sizes():
    x = tensor(5, 24)
    check(lambda a: a.astype("float16"), x, topi.cast(x, "float16"), rtol=1e-3)
    check(lambda a: a != 0, x, topi.cast(x, "bool"))
    i = tensor(7, 9, dtype="int64")
    check(lambda a: a.astype("int8"), i, topi.cast(i, "int8"))


def test_choices_read_nothing_outside():
    x, y = tensor(6, 16), tensor(6, 8, name="y")
    check(lambda a, b: np.concatenate([a, b], 1), x, y, topi.concatenate([x, y], 1))
    z = tensor(3, 16, name="z")
    check(lambda a, b: np.concatenate([a, b], 0), x, z, topi.concatenate([x, z], 0))
    check(lambda a: np.pad(a, ((1, 2), (3, 1))), x, topi.nn.pad(x, [1, 3], [2, 1]))


@pytest.mark.parametrize("shape, order", [((37, 53), (1, 0)), ((64, 96), (1, 0)), ((3, 20, 36), (0, 2, 1))])
def test_transposes(shape, order):
    x = tensor(*shape)
    check(lambda a: a.transpose(order), x, topi.transpose(x, order))


def test_tables_of_other_axes_do_not_narrow_vectors():
    x, rows, scale = tensor(6, 64, dtype="float16"), tensor(40, dtype="int64", name="rows"), tensor(40, name="scale")

    def element(i, j):
        return (x[rows[i] % 6, j].astype("float32") * scale[i]).astype("float16")

    result = te.compute((40, 64), element)
    check(lambda x, rows, scale: x[rows % 6].astype("float32") * scale[:, None], x, rows, scale, result, rtol=1e-3)
    words = []
    structural_walk(
        scheduled(x, rows, scale, result).body, (tirx.BufferStore, lambda s: words.append(s.value.ty.dtype))
    )
    assert any(str(dtype) == "uint32x4" for dtype in words)


def test_long_maps_compute_several_elements_a_thread():
    x = tensor((1 << 18) + 5)
    check(lambda a: a[::-1], x, topi.flip(x, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axis", [0, 1, 2, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 64, 48), (1, 1, 1), (2, 3, 1000)])
def test_sums(shape, axis):
    x = tensor(*shape)
    check(lambda a: a.sum(axis, dtype="float64"), x, topi.sum(x, axis), rtol=1e-4)


def test_sums_of_halves_lose_nothing():
    x = tensor(8, 4096, dtype="float16")
    check(lambda a: a.astype("float64").sum(1).astype("float16"), x, topi.sum(x, 1), rtol=2e-3)


@pytest.mark.parametrize("shape", [(37, 53), (8, 512), (2, 3)])
def test_indices_of_extremes(shape):
    x = tensor(*shape)
    check(lambda a: a.argmax(1), x, topi.argmax(x, 1))
    assert "shuffle" in str(scheduled(x, topi.argmax(x, 1))) or shape[1] < 32
    check(lambda a: a.argmin(0), x, topi.argmin(x, 0))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_indices_of_extremes_of_narrow_types(dtype):
    """Values that differ only in their fractions go from thread to thread unrounded."""
    x = tensor(3, 100, dtype=dtype)
    func = scheduled(x, topi.argmax(x, 1))
    assert "shuffle" in str(func)
    rng = np.random.default_rng(0)
    data = rng.random((3, 100)).astype(dtype) if dtype == "float16" else values((3, 100), dtype, 0)
    actual = np.full(3, 77, "int64")
    run(func, data, actual)
    np.testing.assert_array_equal(actual, data.argmax(1))


def legalized(build, *extents, dtype="float32", target=TARGET):
    """The scheduled kernels that `build` makes of a tensor on a GPU, by name."""
    gpu = rh.VDevice(target)
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(extents, dtype, gpu))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(build(builder, x)))
    functions = legalize(builder.get()).functions.items()
    return {
        gv.name_hint.removesuffix("_cuda"): schedule(func.with_attr("target", target), gpu_target_of(target))
        for gv, func in functions
        if isinstance(func, tirx.PrimFunc)
    }


def launched(func):
    """Extents of the launches of a kernel: blocks and threads."""
    extents = {}

    def on_loop(loop):
        if loop.thread_binding is not None:
            extents.setdefault(str(loop.thread_binding.thread_tag), []).append(int(loop.extent))

    structural_walk(func.body, (tirx.For, on_loop))
    return list(zip(extents["blockIdx.x"], extents["threadIdx.x"], strict=True))


EXTREMES = {
    "top_one": lambda _, x: relax.op.topk(x, 1, -1, "both", largest=True, dtype="int32"),
    "argmax": lambda _, x: relax.op.argmax(x, -1),
    "argmin": lambda _, x: relax.op.argmin(x, -1),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_threads_of_blocks_search_rows(name):
    """Some rows, or one, or a part of one for each block; vectors are of 16 bytes of the widest type, the indices'."""
    many, last = (512, 8) if name == "top_one" else (1024, 16)
    shapes = {(32, 64, 2004): [(many, 256)], (64, 2004): [(64, 256)], (1, 128256): [(48, 256), (1, last)]}
    assert {shape: launched(legalized(EXTREMES[name], *shape)[name]) for shape in shapes} == shapes
    assert "shuffle" in str(legalized(EXTREMES[name], 64, 2004)[name])


def test_blocks_share_the_logits_of_greedy_tokens():
    """A block for each part of a row, and 16 threads for the parts' candidates."""
    gpu = rh.VDevice(TARGET)

    def tokens(builder, x):
        return greedy_tokens(builder, x, lambda value, _: builder.emit(value), gpu)

    few, many = {"top_one": (64, 256), "greedy_tokens": (1, 16)}, {"top_one": (512, 256), "greedy_tokens": (2, 256)}
    for rows, expected in ((1, few), (32, many)):
        kernels = legalized(tokens, rows, 128256)
        for name, extents in expected.items():
            assert launched(kernels[name]) == [extents]


def test_all_and_products():
    x = tensor(5, 40, dtype="bool")
    check(lambda a: a.all(1), x, topi.all(x, 1))
    y = tensor(33, 7)
    check(lambda a: a.prod(0), y, topi.prod(y, 0), rtol=1e-4)


def test_windows():
    x = tensor(2, 8, 14, 14)
    w = tensor(16, 2, 3, 3, name="w")

    def grouped(a, b):
        padded = np.pad(a, ((0, 0), (0, 0), (1, 1), (1, 1)))
        out = np.zeros((2, 16, 14, 14))
        for o in range(16):
            for c in range(2):
                for i in range(3):
                    for j in range(3):
                        out[:, o] += padded[:, o // 4 * 2 + c, i : i + 14, j : j + 14] * b[o, c, i, j]
        return out

    check(grouped, x, w, topi.nn.group_conv2d_nchw(x, w, 1, 1, 1, 4), rtol=1e-4)
    pooled = topi.nn.pool2d(x, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), "max")
    check(lambda a: a.reshape(2, 8, 7, 2, 7, 2).max((3, 5)), x, pooled)


def test_products():
    a, b = tensor(33, 65), tensor(65, 47, name="b")
    check(lambda a, b: a @ b, a, b, topi.matmul(a, b), rtol=1e-4)


def test_results_handed_from_launch_to_launch():
    x = tensor(5, 70)

    def softmax(a):
        e = np.exp(a - a.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    func = scheduled(x, topi.nn.softmax(x))
    arrays = [values((5, 70), "float32", 0), np.full((5, 70), 77, "float32")]
    run(func, *arrays)
    np.testing.assert_allclose(arrays[1], softmax(arrays[0]), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_tensors_without_elements(shape):
    x = tensor(*shape)
    check(np.exp, x, topi.exp(x))
    check(lambda a: a.sum(1), x, topi.sum(x, 1))


def test_empty_tensors_are_neither_read_nor_written():
    x = tensor(0, 64, 64)
    empty, none = np.zeros((0, 64, 64), "float32"), np.zeros((0, 64), "float32")
    interpreted(scheduled(x, topi.transpose(x, (0, 2, 1))), empty, empty.copy())
    interpreted(scheduled(x, topi.sum(x, 2)), empty, none)
    interpreted(scheduled(x, topi.sum(x, 1)), empty, none.copy())


@pytest.mark.parametrize("shape, axis", [((1 << 17,), 0), ((64, 2, 1024), (0, 2)), ((3, 1 << 15), 1)])
def test_long_reductions_of_few_results_take_two_launches(shape, axis):
    x = tensor(*shape)
    check(lambda a: a.sum(axis, dtype="float64"), x, topi.sum(x, axis), launches=2, rtol=1e-4)
    h = tensor(*shape, dtype="float16")
    check(lambda a: a.max(axis), h, topi.max(h, axis), launches=2)


def test_indices_of_long_reductions():
    x = tensor(2, 1 << 15)
    check(lambda a: a.argmax(1), x, topi.argmax(x, 1), launches=2)


def test_parts_of_several_reductions_fit_shared_memory():
    """Two sums of halves in float32; a thread adds eight neighbours of each."""
    x, r = tensor(512, 4096, dtype="float16"), te.reduce_axis((0, 512), "r")
    zero = lambda dtype: tirx.const(0, dtype)  # noqa: E731
    add = te.comm_reducer(lambda a, b: (a[0] + b[0], a[1] + b[1]), lambda *types: tuple(map(zero, types)))
    func = scheduled(x, *te.compute((4096,), lambda j: add((x[r, j], x[r, j] * x[r, j]), axis=r)))
    sizes = []

    def on_allocation(allocation):
        if allocation.buffer.scope() == "shared":
            sizes.append(int(allocation.buffer.shape[0]) * 4)

    structural_walk(func.body, (tirx.AllocBuffer, on_allocation))
    assert len(sizes) == 2 and sum(sizes) <= 48 << 10
    a, sums, squares = values((512, 4096), "float16", 0) / 8, *np.zeros((2, 4096), "float16")
    run(func, a, sums, squares)
    np.testing.assert_allclose(sums, a.astype("float64").sum(0), atol=1e-2)
    np.testing.assert_allclose(squares, (a.astype("float64") ** 2).sum(0), rtol=1e-2)


@pytest.mark.parametrize(
    "shape, axes, dtype",
    [
        ((1, 8400), [0, 1], "float32"),
        ((200, 6), [0], "float16"),
        pytest.param((1, 50257), [0, 1], "float16", marks=pytest.mark.slow),
    ],
)
def test_extremes_of_floats_are_computed_in_parts(shape, axes, dtype):
    """Lowered `relax.max`, whose bit masks TVM widens."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.max(x, axes)))
    (func,) = [f for f in legalize(builder.get()).functions.values() if isinstance(f, tirx.PrimFunc)]
    func = schedule(func.with_attr("target", TARGET), gpu_target_of(TARGET))
    parts = launches_of(func) or [func]
    assert any("shared" in str(part) or "shuffle" in str(part) for part in parts)
    a = values(shape, dtype, 0)
    a.reshape(-1)[[3, 7]] = np.inf, -np.inf
    for position in (None, a.size - 1):
        if position is not None:
            a.reshape(-1)[position] = np.nan
        y = np.full(a.max(tuple(axes)).shape, 77, dtype)
        run(func, a, y)
        np.testing.assert_array_equal(y, a.max(tuple(axes)))


def test_shuffles_are_reached_by_whole_warps():
    """A choice by a number that another thread sends is a branch in CUDA, and in a branch some threads send nothing."""
    builder = relax.BlockBuilder()
    size = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((3, size), "float64"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.max(x, [1])))
    (func,) = [f for f in legalize(builder.get()).functions.values() if isinstance(f, tirx.PrimFunc)]
    func = schedule(func.with_attr("target", TARGET), gpu_target_of(TARGET))
    assert "shuffle" in str(func)
    a, y = values((3, 40), "float64", 0), np.zeros(3)
    interpreted(func, a, y)
    np.testing.assert_array_equal(y, a.max(1))


@pytest.mark.parametrize("count", [50257, pytest.param(99991, marks=pytest.mark.slow)])
def test_long_reductions_without_equal_parts(count):
    x = tensor(1, count)
    check(lambda a: a.argmax(1), x, topi.argmax(x, 1), launches=2)
    check(lambda a: a.astype("float64").sum(1), x, topi.sum(x, 1), launches=2, rtol=1e-4)


@pytest.mark.parametrize("dtype, ulp", [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_quick_functions_of_16_bits_are_right_to_the_last_bit(dtype, ulp):
    x = tensor(4096, dtype=dtype)
    signs = np.random.default_rng(0).choice([-1, 1], 4096)
    a = (signs * np.logspace(-7, 1.3, 4096)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    wide = a.astype("float64")
    for op, exact in (
        (topi.tanh, np.tanh(wide)),
        (topi.sigmoid, 1 / (1 + np.exp(-wide))),
        (topi.exp, np.exp(np.minimum(wide, 11))),
    ):
        func = scheduled(x, op(topi.minimum(x, tirx.const(11, dtype)) if op is topi.exp else x))
        assert "quick_" in str(func)
        y = np.zeros_like(a)
        interpreted(func, a, y)
        allowed = np.maximum(np.abs(exact) * ulp * 1.1, 2**-25 if dtype == "float16" else 0)
        assert (np.abs(y.astype("float64") - exact) <= allowed).all()


@pytest.mark.parametrize("dtype, allowed", [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_choices_by_data_hold_both_values(dtype, allowed):
    x, y = tensor(64, 128, dtype=dtype), tensor(64, 128, dtype=dtype)
    func = scheduled(x, y, topi.where(topi.greater(x, topi.full_like(x, 0)), topi.sigmoid(x), topi.tanh(y)))
    text = str(func)
    assert "quick_tanh" in text and "if_then_else" not in text
    assert all("quick_" not in line for line in text.splitlines() if "T.Select(" in line)
    a, b = (values((64, 128), "float32", seed).astype(getattr(ml_dtypes, dtype, None) or dtype) for seed in (0, 1))
    actual = np.zeros_like(a)
    interpreted(func, a, b, actual)
    wide = a.astype("float32")
    exact = np.where(wide > 0, 1 / (1 + np.exp(-wide)), np.tanh(b.astype("float32")))
    np.testing.assert_allclose(actual.astype("float32"), exact, atol=allowed)


def test_values_that_read_memory_stay_guarded_by_their_condition():
    x, index = tensor(512, dtype="float16"), tensor(64, dtype="int64")
    looked_up = te.compute(
        (64,),
        lambda i: tirx.if_then_else(
            tirx.all(index[i] >= 0, index[i] < 512), tirx.sigmoid(x[index[i]]), tirx.const(0, "float16")
        ),
    )
    func = scheduled(x, index, looked_up)
    places = np.arange(-32, 32, dtype="int64") * 20
    a, actual = values((512,), "float16", 0), np.ones(64, "float16")
    interpreted(func, a, places, actual)
    inside = (places >= 0) & (places < 512)
    exact = 1 / (1 + np.exp(-a[np.where(inside, places, 0)].astype("float32")))
    np.testing.assert_allclose(actual, np.where(inside, exact, 0), atol=1e-3)
