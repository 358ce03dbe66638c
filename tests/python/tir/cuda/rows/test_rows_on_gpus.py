"""Kernels of rows on GPUs, run by the interpreter, against numpy in float64: any length, any operands."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.target import Target
from tvm_ffi import structural_walk

from cuda_reports import compile_source, reports_of, sources_of
from gpu_interpreter import run
from machine_code import disassembled, nvdisasm
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import MAX_BLOCK_THREADS, gpu_target_of
from relax_hetero.tir.commands.graph_functions import launched_early, waiting_in_place
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.core.ties import ties_of
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.rows.cuda_rows import rows_kernel
from relax_hetero.tir.cuda.rows.row_shape import RowShape, lanes_for, looped_shape, register_shape
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.rows.test_rows import NORM, SOFTMAX, expressions, norm, problem, softmax

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)


def solved(case, arrays, shape=None, how=None) -> np.ndarray:
    """Result of a problem's kernel for these arrays."""
    kernel = rows_kernel(case, GPU, how)
    assert is_one_launch(kernel)
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(case.result.dtype, case.result.dtype)
    size = int(np.prod(shape or case.result.shape)) * np.dtype(dtype).itemsize
    out = np.full(size, 0xAB, np.uint8).view(dtype).reshape(shape or case.result.shape)
    run(kernel, *arrays, out)
    return out


@pytest.mark.parametrize("n", [1, 3, 17, 100, 768, 1027, 4096])
def test_softmax_and_norm_of_any_length(n):
    rng = fresh_rng()
    x = rng.standard_normal((2, 3, n)).astype("float32") * 5
    scale, shift = rng.standard_normal((2, n)).astype("float32")
    maps = [("d0", "d1", "n"), ("n",), ("n",)]
    actual = solved(problem(SOFTMAX, [x], maps[:1], x.shape, maps[0], "float32"), [x])
    np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=2e-6, atol=2e-7)
    actual = solved(problem(NORM, [x, scale, shift], maps, x.shape, maps[0], "float32"), [x, scale, shift])
    np.testing.assert_allclose(actual, norm(*(a.astype("float64") for a in (x, scale, shift))), rtol=2e-5, atol=2e-5)


def test_rows_too_long_for_registers():
    x = fresh_rng().standard_normal((2, 40000)).astype("float32")
    actual = solved(problem(SOFTMAX, [x], [("d0", "n")], x.shape, ("d0", "n"), "float32"), [x])
    np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 1), "float16"), ((2, 64), "float32"), ((1, 5001), "float16"), ((5, 1000), "float16"), ((0, 8), "float32")],
)
def test_symbolic_rows_and_columns(shape, dtype):
    x = fresh_rng().standard_normal(shape).astype(dtype)
    text = SOFTMAX.replace("x0", "cast(x0, 'float32')")
    head, last = text.rsplit("; ", 1)
    case = problem(
        f"{head}; cast({last}, '{dtype}')", [x], [("d0", "n")], shape, ("d0", "n"), dtype, {"d0": "s0", "n": "s1"}
    )
    actual = solved(case, [x], shape)
    if x.size:
        rtol, atol = (2e-6, 1e-7) if dtype == "float32" else (1e-3, 1e-4)
        np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
def test_reductions_of_every_kind(kind, dtype):
    rng = fresh_rng()
    for n in (1, 61, 2048):
        x = (
            rng.uniform(0.99, 1.01, (5, n)).astype(dtype)
            if "float" in dtype
            else rng.integers(-3, 4, (5, n)).astype(dtype)
        )
        if "int" in dtype and kind == "mean":
            continue
        actual = solved(problem(f"r0 = {kind}(x0); r0", [x], [("d0", "n")], (5, 1), ("d0", "1"), dtype), [x])
        expected = getattr(np, kind)(x, -1, keepdims=True, **({"dtype": dtype} if kind in ("sum", "prod") else {}))
        np.testing.assert_allclose(actual, expected.astype(dtype), rtol=1e-12 if dtype == "float64" else 1e-5)


def test_rows_of_infinities_and_nan():
    """Masked scores vanish, a row of nothing but masks is NaN, and NaN stays: in a sum, a maximum and a minimum."""
    x = fresh_rng().standard_normal((7, 70)).astype("float32")
    x[0, 3:] = -np.inf
    x[1] = -np.inf
    x[2, 69] = np.nan
    x[3, 5] = np.inf
    x[4] = -3e38
    x[5, 1:] = -200.0
    with np.errstate(invalid="ignore", over="ignore"):
        actual = solved(problem(SOFTMAX, [x], [("d0", "n")], x.shape, ("d0", "n"), "float32"), [x])
        np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=2e-6, atol=1e-37)
        for kind in ("max", "min"):
            actual = solved(problem(f"r0 = {kind}(x0); r0", [x], [("d0", "n")], (7, 1), ("d0", "1"), "float32"), [x])
            np.testing.assert_array_equal(actual, getattr(x, kind)(-1, keepdims=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [96, 77])
def test_half_precision(dtype, n):
    """Computed in single precision: the difference is the rounding of operands and result."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    x = (fresh_rng().standard_normal((33, n)) * 4).astype(kind)
    scale, shift = (fresh_rng().standard_normal(n).astype("float32") for _ in range(2))
    text = NORM.replace("x0", "cast(x0, 'float32')")
    head, last = text.rsplit("; ", 1)
    case = problem(
        f"{head}; cast({last.strip()}, '{dtype}')",
        [x, scale, shift],
        [("d0", "n"), ("n",), ("n",)],
        x.shape,
        ("d0", "n"),
        dtype,
    )
    expected = norm(x.astype("float64"), scale.astype("float64"), shift.astype("float64"))
    actual = solved(case, [x, scale, shift]).astype("float64")
    np.testing.assert_allclose(actual, expected, rtol=2**-8 if dtype == "bfloat16" else 2**-10, atol=1e-3)


def test_conditions_and_operands_that_lack_dimensions():
    """Masked scores of heads: a condition of the batch, a bias of the head, one number for all."""
    rng = fresh_rng()
    x = rng.standard_normal((2, 3, 5, 24)).astype("float32")
    mask = rng.random((2, 1, 1, 24)) < 0.7
    bias = rng.standard_normal((3, 1, 1)).astype("float32")
    factor = np.float32(0.3).reshape(1)
    scores = "where(x1, add(multiply(x0, x3), x2), -1e30)"
    text = f"r0 = max({scores}); r1 = sum(exp(subtract({scores}, r0))); divide(exp(subtract({scores}, r0)), r1)"
    maps = [("d0", "d1", "d2", "n"), ("d0", "1", "1", "n"), ("d1", "1", "1"), ("1",)]
    actual = solved(problem(text, [x, mask, bias, factor], maps, x.shape, maps[0], "float32"), [x, mask, bias, factor])
    expected = softmax(np.where(mask, x.astype("float64") * factor + bias, -1e30))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_no_rows():
    x, names = np.zeros((0, 16), "float32"), ("d0", "n")
    assert solved(problem(SOFTMAX, [x], [names], x.shape, names, "float32"), [x]).size == 0
    shape = RowShape(64, 1, 4, 1, 2)  # a launch of clusters has whole ones
    unknown = problem(SOFTMAX, [x], [names], x.shape, names, "float32", {"d0": "s0"})
    assert solved(unknown, [x], x.shape, shape).size == 0


def test_a_result_may_lie_over_its_operand():
    x = np.zeros((4, 16), "float32")
    other = np.zeros((16,), "float32")
    case = problem(
        "r0 = sum(x0); add(multiply(x0, r0), x1)", [x, other], [("d0", "n"), ("n",)], x.shape, ("d0", "n"), "float32"
    )
    assert ties_of(rows_kernel(case, GPU)) == [(0, 2)]


def test_vectors_are_as_wide_as_rows_allow():
    assert lanes_for(4096, ["float16"]) == 8
    assert lanes_for(4096, ["float16", "float32"]) == 8  # of float32 two accesses
    assert lanes_for(1001, ["float16"]) == 1
    assert lanes_for(12, ["float32"]) == 4
    x, names = np.zeros((9, 1024), "float16"), ("d0", "n")
    kernel = rows_kernel(problem(SOFTMAX, [x], [names], x.shape, names, "float16"), GPU)
    assert set(_stored_words(kernel)) == {4}


def _stored_words(func: tirx.PrimFunc) -> list[int]:
    """Lanes of every store of words."""
    lanes: list[int] = []

    def on_store(store: tirx.BufferStore) -> None:
        if str(store.buffer.dtype) == "uint32":
            lanes.append(store.value.ty.dtype.lanes)

    structural_walk(func.body, (tirx.BufferStore, on_store))
    return lanes


@pytest.mark.parametrize("n", [1, 7, 64, 768, 1000, 4096, 30000, 32768])
@pytest.mark.parametrize("total", [1, 100, 100000])
def test_threads_of_a_row(n, total):
    shape = register_shape(n, lanes_for(n, ["float32"]), total, 2, GPU)
    assert shape is not None
    assert shape.threads & (shape.threads - 1) == 0 and 32 <= shape.block <= MAX_BLOCK_THREADS
    assert shape.rows == 1 or shape.threads <= 64
    assert shape.vectors * shape.threads * shape.lanes >= n > (shape.vectors - 1) * shape.threads * shape.lanes


def test_longer_rows_have_several_blocks_or_are_read_again():
    assert register_shape(32768, 4, 1000, 2, GPU).cluster == 1
    assert register_shape(50257, 1, 1000, 2, GPU).cluster == 8
    assert register_shape(50257, 1, 1000, 2, GPU).block == 256
    assert register_shape(50257, 1, 1000, 2, gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"}))) is None
    assert register_shape(8 * 32768, 4, 1000, 2, GPU).cluster == 8
    assert register_shape(8 * 32768 + 1, 1, 1000, 2, GPU) is None
    assert looped_shape(1 << 24, 4, 1, GPU).cluster == 8
    assert looped_shape(1 << 24, 4, 1000, GPU).cluster == 1
    assert (
        register_shape(30000, 4, 32, 2, GPU).cluster == 2
    )  # few rows: 32 blocks would leave most multiprocessors idle


def test_blocks_of_several_rows_of_several_warps():
    """Every row of a block has its own place for the numbers of its warps."""
    x, names = fresh_rng().standard_normal((301, 260)).astype("float32"), ("d0", "n")
    actual = solved(problem(SOFTMAX, [x], [names], x.shape, names, "float32"), [x], how=RowShape(64, 2, 4, 2))
    np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("vectors", [3, 0])
def test_blocks_that_share_a_row(vectors):
    """Sums over the blocks of a cluster, of rows in registers and of rows that are read again."""
    rng, names, shape = fresh_rng(), ("d0", "n"), RowShape(128, 1, 4, vectors, 2)
    x = rng.standard_normal((3, 1100)).astype("float32")
    actual = solved(problem(SOFTMAX, [x], [names], x.shape, names, "float32"), [x], how=shape)
    np.testing.assert_allclose(actual, softmax(x.astype("float64")), rtol=2e-6, atol=1e-8)
    for dtype, kind in (("float64", "sum"), ("int8", "max"), ("int32", "sum")):
        y = (x * 30).astype(dtype)
        text = f"r0 = {kind}(x0); r0"
        actual = solved(problem(text, [y], [names], (3, 1), ("d0", "1"), dtype), [y], how=shape)
        np.testing.assert_allclose(actual, getattr(y, kind)(-1, keepdims=True), rtol=1e-12)


def test_packed_operands_are_refused():
    from relax_hetero.encoding import PackedLayout
    from relax_hetero.encoding.problem import Operand, RowsProblem
    from relax_hetero.encoding.row_program import RowProgram

    packed = Operand((4, 16), "float32", ("d0", "n"), PackedLayout((0, 1), (0,), (4,)))
    with pytest.raises(EncodingError, match="found a packed operand"):
        rows_kernel(RowsProblem(RowProgram.parse("r0 = sum(x0); r0"), (packed,), packed), GPU)


@pytest.mark.parametrize(("text", "shape", "registers"), [(SOFTMAX, (4096, 4096), 64), (NORM, (512, 32768), 64)])
def test_registers_and_spills(text, shape, registers):
    x, names = np.zeros(shape, "float32"), ("d0", "n")
    arrays = [x] if text == SOFTMAX else [x, x[0], x[0]]
    kernel = rows_kernel(problem(text, arrays, [names, ("n",), ("n",)][: len(arrays)], shape, names, "float32"), GPU)
    (report,) = reports_of(kernel, TARGET)
    assert report.stack == report.spill_stores == 0 and report.registers <= registers


def test_weights_of_a_norm_are_loaded_before_the_wait():
    x, names = np.zeros((1, 2048), "float32"), ("d0", "n")
    kernel = rows_kernel(problem(NORM, [x, x[0], x[0]], [names, ("n",), ("n",)], x.shape, names, "float32"), GPU)
    assert list(kernel.attrs[READS_EARLY]) == [1, 2]
    symbolic = problem(NORM, [x, x[0], x[0]], [names, ("n",), ("n",)], x.shape, names, "float32", {"d0": "s0"})
    assert READS_EARLY not in rows_kernel(symbolic, GPU).attrs
    if nvdisasm() is None:
        pytest.skip("no nvdisasm")
    (source,) = sources_of(launched_early(waiting_in_place(kernel)), TARGET)
    before, after = disassembled(compile_source(source).code).split("ACQBULK")
    assert before.count("LDG.E.128") == 2 * after.count("LDG.E.128") > 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 1), (100, 17), (512, 768), (77, 1001), (64, 8192), (5, 70001)])
def test_on_a_gpu(shape, dtype):
    """The kernel that is compiled, and the one for any sizes, against numpy."""
    names, symbols = ("d0", "n"), {"d0": "s0", "n": "s1"}
    element = numpy_dtype(dtype)
    x = (fresh_rng().standard_normal(shape) * 3).astype(element)
    scale, shift = (fresh_rng().standard_normal(shape[1]).astype(element) for _ in range(2))
    wide = [array.astype("float64") for array in (x, scale, shift)]
    ulp = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for text, arrays, expected in ((SOFTMAX, [x], softmax(wide[0])), (NORM, [x, scale, shift], norm(*wide))):
        maps = [names, ("n",), ("n",)][: len(arrays)]
        for sizes in ({}, symbols):
            out = run_on_gpu(
                rows_kernel(problem(text, arrays, maps, shape, names, dtype, sizes), GPU), arrays, shape, dtype
            )
            np.testing.assert_allclose(out.astype("float64"), expected, rtol=4 * ulp, atol=4 * ulp)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_programs(data):
    """Programs of two reductions, of rows of any length, known or not, with operands that lack dimensions."""
    leaves, parts, functions = ["x0", "x1", "x2"], [], []
    for number in range(data.draw(st.integers(0, 2))):
        kind = data.draw(st.sampled_from(["mean", "max", "min"]))
        text, function = data.draw(expressions(leaves))
        parts.append(f"r{number} = {kind}({text})")
        functions.append((kind, function))
        leaves = [*leaves, f"r{number}"]
    text, result = data.draw(expressions(leaves))
    program = "; ".join([*parts, f"add({text}, add(add(x0, x1), x2))"])
    n, rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arrays = [rng.uniform(-1, 1, shape).astype("float32") for shape in ((rows, n), (n,), (rows, 1))]
    values = {f"x{i}": np.broadcast_to(array, (rows, n)).astype("float64") for i, array in enumerate(arrays)}
    for number, (kind, function) in enumerate(functions):
        reduced = getattr(np, kind)(function(values), -1, keepdims=True)
        values[f"r{number}"] = np.broadcast_to(reduced, (rows, n))
    want = result(values) + values["x0"] + values["x1"] + values["x2"]
    maps, symbols = [("d0", "n"), ("n",), ("d0", "1")], data.draw(st.sampled_from([{}, {"d0": "s0", "n": "s1"}]))
    case = problem(program, arrays, maps, (rows, n), ("d0", "n"), "float32", symbols)
    np.testing.assert_allclose(solved(case, arrays, (rows, n)), want, rtol=1e-4, atol=1e-4)
