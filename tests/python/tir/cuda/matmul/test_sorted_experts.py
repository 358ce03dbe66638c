"""Products of many pairs of tokens and experts on Hopper: sorted pairs, and numbers by the interpreter of kernels."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of
from encoding.random_blocks import random_rows
from gpu_interpreter import run
from relax_hetero.encoding import Operand, PackedLayout
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows
from relax_hetero.encoding.block_panels import BlockSource
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, ExpertOrderProblem, QuantizedMatmulProblem
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import waiting_late
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import LATE_WAIT
from relax_hetero.tir.cuda.matmul import wgmma_experts
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
from relax_hetero.tir.cuda.matmul.expert_order import expert_order_kernel
from relax_hetero.tir.cuda.matmul.wgmma_experts import TILE_PAIRS, ExpertTiling, expert_order_of
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_file_formats_on_gpus import FORMATS
from tir.matmul.block_problems import integers

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU, OLD_GPU = gpu_target_of(TARGET), gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"}))
PAIR = ("b0", "b1", "m")


def operand(shape, dtype, index_map):
    return Operand(tuple(shape), dtype, index_map, PackedLayout.identity(len(shape)))


def index_of(tokens, used, dtype="int32"):
    return operand((tokens, used), dtype, PAIR[:2])


def run_here(func, arguments, shape, dtype, change=lambda func: func):
    result = np.full(shape, -7 if dtype == "int32" else np.nan, numpy_dtype(dtype))
    run(change(func) if LATE_WAIT in func.attrs else func, *arguments, result)
    return result


def source_of(form, rows, depth, seed):
    """Random weights of a file's format, or of one without a file, and their numbers in float64."""
    if form in FILE_FORMATS:
        raw = random_rows(form, rows, depth, seed)
        source = BlockSource((raw,), FILE_FORMATS[form], depth)
        return source, dequantize_rows(raw, source.form, depth).astype("float64")
    bits, block, zeros = form
    weights = integers(np.random.default_rng(seed), rows, depth, block, zeros, bits)
    return weights.source, weights.numbers


def case(form, sizes, dtype, result="float32", expression=""):
    """A problem of (tokens, used, experts, n, k, rows per token), the kernel's weights, and their numbers."""
    tokens, used, experts, n, k, rows = sizes
    source, numbers = source_of(form, experts * n, k, 5)
    packed = Fragments().pack(source, experts)
    epilogue = None
    if expression:
        operands = [operand((tokens, used, 1, n), "float16", (*PAIR, "n")), operand((n,), "float32", ("n",))]
        parsed = Expression.parse(expression)
        epilogue = Epilogue(parsed, tuple(operands[: parsed.num_operands - 1]))
    problem = QuantizedMatmulProblem(
        operand((tokens, rows, 1, k), dtype, (*PAIR, "k")),
        tuple(operand(array.shape, str(array.dtype), Fragments.index_map) for array in packed),
        operand((tokens, used, 1, n), result, (*PAIR, "n")),
        source.form.block,
        epilogue,
        source.form.bits,
        source.form if form in FILE_FORMATS else None,
        experts,
        index_of(tokens, used),
    )
    return replace(problem, order=expert_order_of(problem, GPU)), packed, numbers.reshape(experts, n, k)


def check(form, sizes, dtype, index=None, tiling=None, result="float32", expression="", run=run_here):
    problem, packed, numbers = case(form, sizes, dtype, result, expression)
    if tiling is not None:
        problem = replace(problem, order=replace(problem.order, tile=tiling.rows[-1]))
    tokens, used, experts, n, _, rows = sizes
    rng = fresh_rng()
    x = rng.standard_normal(problem.lhs.shape, "float32").astype(numpy_dtype(dtype))
    index = rng.integers(-1, experts + 1, (tokens, used)) if index is None else index
    index = index.astype("int32")
    chosen, rows_of = np.minimum(index, experts - 1), np.broadcast_to(x[:, :, 0], (tokens, used, x.shape[-1]))
    # Pairs of negative numbers are left out: their results stay what they were, NaN.
    sums, size = np.full((tokens, used, n), np.nan), np.full((tokens, used, n), np.nan)
    for expert in range(experts):
        own = chosen == expert
        values = rows_of[own].astype("float64")
        sums[own] = values @ numbers[expert].T
        size[own] = np.sqrt(values**2 @ (numbers[expert] ** 2).T)
    extra = []
    if expression:
        extra = [rng.standard_normal(o.shape, "float32").astype(o.dtype) for o in problem.epilogue.operands]
    func = quantized_matmul_kernel(problem, GPU, tiling)
    assert is_one_launch(func)
    order = run(expert_order_kernel(problem.order, GPU), [index], problem.order.result.shape, "int32")
    actual = run(func, [x, *packed, order, *extra], problem.result.shape, result)[:, :, 0].astype("float64")
    want = sums if not expression else evaluate(expression, sums, extra)
    # Weights are rounded once or twice, and so are the results.
    unit = 2.0 ** (-8 if "bfloat16" in (dtype, result) else -11)
    own, tolerance = index >= 0, 4 * unit * (size + np.abs(want)) + 1e-6
    assert np.isnan(actual[~own]).all()
    np.testing.assert_array_less(np.abs(actual - want)[own], tolerance[own])


def evaluate(expression, sums, extra):
    if expression == "cast(x0, 'float16')":
        return sums
    gate, bias = extra[0][:, :, 0].astype("float64"), extra[1].astype("float64")
    return gate * sums + bias


@pytest.mark.parametrize(
    ("tokens", "used", "experts", "dtype"), [(40, 3, 5, "int32"), (300, 8, 128, "int64"), (9000, 1, 40, "int32")]
)
def test_pairs_sorted_by_expert(tokens, used, experts, dtype):
    problem = ExpertOrderProblem(index_of(tokens, used, dtype), experts, 64)
    index = fresh_rng().integers(-2, experts + 2, (tokens, used)).astype(dtype)
    order = run_here(expert_order_kernel(problem, GPU), [index], problem.result.shape, "int32")
    chosen, count_of_all = np.minimum(index, experts - 1).reshape(-1), (index >= 0).sum()
    pairs = order[problem.pairs_at : problem.pairs_at + count_of_all]
    np.testing.assert_array_equal(np.sort(pairs), np.flatnonzero(chosen >= 0))
    places, owners = np.empty(0, int), []
    for expert, first, count, _ in order[4 : 4 + 4 * order[0]].reshape(-1, 4):
        assert 0 < count <= 64 and (chosen[pairs[first : first + count]] == expert).all()
        places = np.append(places, np.arange(first, first + count))
        owners.append(expert)
    np.testing.assert_array_equal(places, np.arange(count_of_all))
    assert owners == sorted(owners) and order[0] <= problem.max_tiles
    assert is_one_launch(expert_order_kernel(problem, GPU))


@pytest.fixture
def few(monkeypatch):
    """Few pairs are sorted, too."""
    monkeypatch.setattr(wgmma_experts, "MIN_SORTED_PAIRS", 1)


def test_weights_near_their_minimum_are_rounded_like_others(few):
    """Codes of IQ1_S are -1, 0 and 1, its minimums an eighth of a scale: weights of code 0 are the minimum."""
    problem, packed, (weights,) = case("iq1_s", (64, 1, 1, 32, 256, 1), "float16")
    problem = replace(problem, order=replace(problem.order, tile=SMALL.rows[-1]))
    index, rows = np.zeros((64, 1), "int32"), np.eye(64, 256, dtype="float16").reshape(problem.lhs.shape)
    order = run_here(expert_order_kernel(problem.order, GPU), [index], problem.order.result.shape, "int32")
    func = quantized_matmul_kernel(problem, GPU, SMALL)
    actual = run_here(func, [rows, *packed, order], problem.result.shape, "float32")
    np.testing.assert_allclose(actual.reshape(64, 32), weights[:, :64].T, rtol=2.0**-10)


INTEGERS = [(4, 16, ""), (4, 128, "uint8"), (4, 64, "float32"), (8, 32, "uint8")]
SMALL = ExpertTiling(1, (64,))  # the least code


@pytest.mark.parametrize("form", [*FORMATS, *INTEGERS], ids=str)
def test_formats(form, few):
    check(form, (30, 2, 2, 48, 256, 1), "float16", tiling=SMALL)


@pytest.mark.slow
def test_weights_of_16_bits(few):
    check("f16", (30, 2, 2, 48, 192, 1), "float16", tiling=SMALL)
    check("bf16", (30, 2, 2, 48, 128, 2), "bfloat16", tiling=ExpertTiling(2, (TILE_PAIRS,)))


@pytest.mark.parametrize("form", ["q4_0", "q5_k", "q6_k", "mxfp4", (4, 32, "float32")], ids=str)
def test_rows_of_bfloat16(form, few):
    check(form, (30, 2, 2, 32, 256, 2), "bfloat16", tiling=SMALL)


@pytest.mark.parametrize("tiling", [ExpertTiling(2, (TILE_PAIRS,)), ExpertTiling(1)], ids=str)
@pytest.mark.slow
def test_tilings(tiling, few):
    """Several tiles of columns and pairs, the last ones incomplete; a stage is used several times."""
    check("q4_0", (130, 1, 2, 304, 640, 1), "float16", tiling=tiling)


@pytest.mark.parametrize("expert", [0, 2, 7])
def test_one_expert_has_all_pairs(expert, few):
    """Numbers out of range are clamped; the second tile is incomplete."""
    check("q4_0", (75, 2, 3, 32, 64, 2), "float16", np.full((75, 2), expert), ExpertTiling(1, (TILE_PAIRS,)))


@pytest.mark.parametrize(
    ("result", "expression"),
    [("float16", "cast(x0, 'float16')"), ("float32", "add(multiply(cast(x1, 'float32'), x0), x2)")],
)
def test_epilogues(result, expression, few):
    """The kernel may wait for the previous launch, which may write an operand, in its epilogue."""
    check("q4_0", (30, 2, 3, 80, 64, 1), "float16", None, SMALL, result, expression)
    late = partial(run_here, change=waiting_late)
    check("q4_0", (30, 2, 3, 80, 64, 1), "float16", None, SMALL, result, expression, late)


@pytest.mark.slow
def test_registers_hold_all_values():
    problem, *_ = case("q4_k", (64, 8, 2, 768, 2048, 1), "float16", "float16", "cast(x0, 'float16')")
    (report,) = reports_of(quantized_matmul_kernel(problem, GPU), TARGET)
    assert report.spill_stores == 0 and not report.serialized and not report.touched


def test_problems_that_are_not_sorted():
    problem, *_ = case("q4_0", (64, 8, 2, 32, 64, 1), "float16")
    assert problem.order is not None and expert_order_of(problem, OLD_GPU) is None
    assert expert_order_of(replace(problem, index=index_of(63, 8)), GPU) is None
    assert expert_order_of(replace(problem, index=index_of("s0", 8)), GPU) is None
    assert expert_order_of(replace(problem, lhs=replace(problem.lhs, dtype="float32")), GPU) is None
    assert expert_order_of(replace(problem, lhs=replace(problem.lhs, shape=(64, 1, 1, 96))), GPU) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", [*FORMATS, *INTEGERS], ids=str)
@pytest.mark.parametrize(("dtype", "rows"), [("float16", 1), ("bfloat16", 8)])
def test_on_a_gpu(form, dtype, rows):
    check(form, (301, 8, 12, 336, 768, rows), dtype, run=run_on_gpu)
