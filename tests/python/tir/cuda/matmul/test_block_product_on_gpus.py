"""Products with weights of 4 and 8 bits on GPUs, by the interpreter of their kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.block_formats import integer_format
from relax_hetero.encoding.block_weights import Fragments, pack_fragment_blocks, pack_fragments
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, Operand, QuantizedMatmulProblem
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.matmul import block_plan
from relax_hetero.tir.cuda.matmul.block_plan import BlockPlan, block_plans
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel, sends_words
from relax_hetero.tir.cuda.matmul.ring_body import RingPlan
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.sent_words import ADDRESSES, SENT, SentWords

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
OLD_GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_75"}))
plain = PackedLayout.identity


def problem_of(m, n, k, dtype, block, scales="float16", zeros="", epilogue="", bits=4):
    weights, blocks = Fragments().shapes(n, integer_format(bits, block, False), k)
    dtypes = ["int32", scales, *([zeros] if zeros else [])]
    shapes = [weights, blocks, blocks]
    packed = [Operand(tuple(s), d, Fragments.index_map, plain(4)) for s, d in zip(shapes, dtypes, strict=False)]
    operands = (Operand((n,), "float32", ("n",), plain(1)),) if epilogue else ()
    return QuantizedMatmulProblem(
        Operand((m, k), dtype, ("m", "k"), plain(2)),
        tuple(packed),
        Operand((m, n), dtype if epilogue else "float32", ("m", "n"), plain(2)),
        block,
        Epilogue(Expression.parse(epilogue), operands) if epilogue else None,
        bits,
    )


def check(problem, m, plan=None, tolerance=1e-6, gpu=GPU, is_on_gpu=False, sent=None):
    """The kernel's result against numpy's, of a kernel that is one launch; by the interpreter, or on a GPU.

    If it is sent, what each GPU gets is compared, too.
    """
    rng = fresh_rng()
    func = quantized_matmul_kernel(problem, gpu, plan)
    assert is_one_launch(func)
    n, k, block = problem.columns, problem.depth, problem.block
    x = rng.standard_normal((m, k)).astype(numpy_dtype(problem.lhs.dtype))
    bits, middle = problem.bits, 1 << (problem.bits - 1)
    codes = rng.integers(0, 1 << bits, (n, k + k % 2), dtype=np.uint8)
    scales = (rng.random((n, -(-k // block))) + 0.1).astype(problem.weights[1].dtype)
    points = []
    if len(problem.weights) > 2:
        kind = problem.weights[2].dtype
        points = [(rng.random(scales.shape) * (1 << bits)).astype(kind)]

    def of_each(values):
        return np.repeat(values.astype("float64"), block, 1)[:, :k]

    weight = (codes[:, :k].astype("float64") - (of_each(points[0]) if points else middle)) * of_each(scales)
    want = x.astype("float64") @ weight.T
    bias = [rng.standard_normal(n).astype("float32")] if problem.epilogue else []
    if bias:
        want = np.maximum(want + bias[0], 0)
    result = np.full((m, n), np.nan, numpy_dtype(problem.result.dtype))
    data = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    packed = [pack_fragments(data, k, block, bits)]
    packed += [pack_fragment_blocks(values) for values in (scales, *points)]
    if is_on_gpu:
        result = run_on_gpu(func, [x, *packed, *bias], (m, n), problem.result.dtype)
    else:
        run(func, x, *packed, *([ADDRESSES] if sent else []), *bias, result)
    for each in (result, *(sent.results if sent else [])):
        assert np.abs(each.astype("float64") - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(3, 36, 130, "float16", 32), 3, BlockPlan(1, 1, 2, 2)),
        (problem_of(1, 52, 512, "float16", 64), 1, RingPlan(1, 1, 2, 1, run=2, stages=2)),
    ],
    ids=["registers", "ring"],
)
def test_the_result_is_sent_to_other_gpus(problem, m, plan, monkeypatch):
    gpu = dataclasses.replace(GPU, multiprocessors=2)
    assert sends_words(problem, gpu) and not sends_words(problem_of(9, 36, 128, "float16", 32), gpu)
    ragged = problem_of(3, 37, 128, "float16", 32)
    assert not sends_words(ragged, gpu), "no whole vectors"
    with pytest.raises(EncodingError, match="is sent, expected a static one of float32 for a short sum"):
        quantized_matmul_kernel(dataclasses.replace(ragged, sent=SENT), gpu)
    problem = dataclasses.replace(problem, sent=SENT)
    check(problem, m, plan, gpu=gpu, sent=SentWords(monkeypatch, (m, problem.columns)))


@pytest.mark.parametrize(
    ("problem", "m", "plan"),
    [
        (problem_of(1, 40, 256, "float16", 32), 1, None),
        (problem_of(3, 37, 300, "float16", 16, "float32", "uint8"), 3, BlockPlan(1, 1, 2, 2)),  # asks ahead
        (problem_of(2, 33, 333, "float32", 32, "float32", "float32"), 2, BlockPlan(2, 1, 4, 1)),
        (problem_of(1, 16, 260, "float32", 64, "float16", "uint8"), 1, None),
        (problem_of(3, 16, 64, "float32", 32), 3, None),  # parts of the last row alone in a group of eight
        (problem_of("s0", 20, 130, "bfloat16", 48), 11, BlockPlan(1, 2, 2, 1)),
        (problem_of(1, 40, 200, "float16", 32, bits=8), 1, None),
        (problem_of(3, 37, 135, "float16", 16, "float32", "uint8", bits=8), 3, BlockPlan(1, 1, 2, 2)),
        (problem_of(9, 20, 130, "bfloat16", 128, zeros="uint8", bits=8), 9, None),
        (problem_of(2, 33, 77, "float32", 32, zeros="float32", bits=8), 2, BlockPlan(2, 1, 2, 1)),
    ],
)
def test_products(problem, m, plan):
    check(problem, m, plan)


@pytest.mark.parametrize("plan", [BlockPlan(1, 1, 2, 2), BlockPlan(1, 1, 4, 1)])
def test_blocks_with_several_tiles(plan):
    """More rounds than one, or one of each tile; the last blocks have a tile less."""
    small = dataclasses.replace(GPU, multiprocessors=1)
    plan = dataclasses.replace(plan, warps=16 if plan.ahead == 1 else 12)
    check(
        problem_of(2, 80, 64 * 12 * 2 + 64 if plan.ahead == 2 else 500, "float16", 32, zeros="uint8"),
        2,
        plan,
        gpu=small,
    )


def test_sums_of_more_tiles_than_wait_together(monkeypatch):
    """Five tiles of columns, added up two at a time; one row of sums, and parts of rows."""
    monkeypatch.setattr(block_plan, "MAX_SUMS_BYTES", 2 * 4 * 16 * 4 * 8)
    small = dataclasses.replace(GPU, multiprocessors=1)
    check(problem_of(8, 75, 256, "float16", 32), 8, BlockPlan(1, 1, 4, 1), gpu=small)
    check(problem_of(2, 75, 200, "float32", 32), 2, BlockPlan(1, 1, 4, 1), gpu=small)


def test_a_gate_of_half_precision():
    """The quick form of silu is as exact as float16."""
    problem = problem_of(2, 40, 128, "float16", 32)
    gates = Operand((2, 40), "float16", ("m", "n"), plain(2))
    text = "multiply(silu(x1), cast(x0, 'float16'))"
    result = dataclasses.replace(problem.result, dtype="float16")
    gated = dataclasses.replace(problem, result=result, epilogue=Epilogue(Expression.parse(text), (gates,)))
    rng = fresh_rng()
    x = rng.standard_normal((2, 128)).astype("float16")
    codes = rng.integers(0, 16, (40, 128), dtype=np.uint8)
    scales = np.full((40, 4), 0.1, "float16")
    gate = np.linspace(-14, 14, 80).reshape(2, 40).astype("float16")
    out = np.full((2, 40), np.nan, "float16")
    packed = pack_fragments(codes[:, 0::2] | codes[:, 1::2] << 4, 128, 32), pack_fragment_blocks(scales)
    run(quantized_matmul_kernel(gated, GPU), x, *packed, gate, out)
    wide = gate.astype("float64")
    want = x.astype("float64") @ ((codes.astype("float64") - 8) * float(scales[0, 0])).T * wide / (1 + np.exp(-wide))
    np.testing.assert_allclose(out.astype("float64"), want, rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("m", "n", "depth", "zeros"),
    [(1, 14336, 4096, ""), (1, 100003, 512, ""), (3, 9001, 1024, "uint8"), (8, 6144, 4096, ""), (1, 4096, 14336, "")],
)
def test_on_a_gpu(m, n, depth, zeros):
    check(problem_of(m, n, depth, "float16", 32, zeros=zeros), m, tolerance=1e-5, is_on_gpu=True)


def test_one_block_has_a_multiprocessor_where_tiles_are_many():
    def warps(n, zeros=""):
        (plan,) = block_plans(problem_of(1, n, 4096, "float16", 32, zeros=zeros), GPU)
        return plan.warps

    assert (warps(4096), warps(14336), warps(14336, "uint8")) == (8, 16, 8)
    check(problem_of(2, 50, 64 * 17, "float16", 32), 2, None, gpu=dataclasses.replace(GPU, multiprocessors=1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("m", "dtype"), [(1, "float32"), (3, "float32"), (8, "float16"), (9, "float16")])
def test_a_symbolic_number_of_rows(m, dtype):
    """A body for few rows, and one for more."""
    check(problem_of("s0", 40, 200, dtype, 32, zeros="uint8"), m)


def test_an_epilogue_and_a_result_of_half_precision():
    problem = problem_of(9, 24, 128, "float16", 128, epilogue="cast(relu(add(x0, x1)), 'float16')")
    check(problem, 9, tolerance=1e-3)


def test_infinities_of_float32_stay():
    problem = problem_of(1, 16, 64, "float32", 32)
    x = np.zeros((1, 64), "float32")
    x[0, 3], x[0, 5] = np.inf, 3e38
    codes = np.full((16, 64), 9, np.uint8)
    result = np.zeros((1, 16), "float32")
    scales = np.ones((16, 2), "float16")
    packed = pack_fragments(codes[:, 0::2] | codes[:, 1::2] << 4, 64, 32), pack_fragment_blocks(scales)
    run(quantized_matmul_kernel(problem, GPU), x, *packed, result)
    assert (result == np.inf).all()


def test_one_row_of_a_large_weight_fits_into_registers():
    (report,) = reports_of(quantized_matmul_kernel(problem_of(1, 14336, 4096, "float16", 32), GPU), TARGET)
    assert report.spill_stores == 0, "a spilled weight is waited for where it should be on its way"
    assert report.registers <= 128, "two blocks share a multiprocessor"


def test_unsupported_problems_are_refused():
    with pytest.raises(EncodingError, match="multiple of 16"):
        quantized_matmul_kernel(problem_of(1, 16, 64, "float16", 24), GPU)
    with pytest.raises(EncodingError, match="sm_75"):
        quantized_matmul_kernel(problem_of(1, 16, 64, "float16", 32), OLD_GPU)


def test_weights_of_8_bits_compile():
    problem = problem_of(1, 256, 256, "bfloat16", 32, zeros="uint8", bits=8)
    (report,) = reports_of(quantized_matmul_kernel(problem, GPU), TARGET)
    assert report.spill_stores == 0


def test_a_gpu_without_overlapping_launches():
    """An instruction of compute capability 9.0 is in no kernel for 8.0."""
    target = Target({"kind": "cuda", "arch": "sm_80"})
    kernel = quantized_matmul_kernel(problem_of(1, 256, 256, "float16", 32), gpu_target_of(target))
    assert READS_EARLY not in kernel.attrs
    (report,) = reports_of(kernel, target)
    assert report.registers > 0
