"""Products of rows by the matrices of their experts on GPUs: numbers by the interpreter of GPU kernels."""

import dataclasses

import numpy as np
import pytest
from tvm.target import Target

from cuda_reports import compile_source, reports_of, sources_of
from encoding.random_blocks import random_rows
from gpu_interpreter import run
from machine_code import disassembled, nvdisasm
from relax_hetero.encoding import Operand, PackedLayout
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows, integer_format
from relax_hetero.encoding.block_panels import BlockSource
from relax_hetero.encoding.block_weights import Fragments, pack_fragment_blocks, pack_fragments
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, QuantizedMatmulProblem
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import releases_after_wait, waiting_late
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import LATE_WAIT
from relax_hetero.tir.cuda.matmul import block_plan, expert_body
from relax_hetero.tir.cuda.matmul.block_plan import BlockPlan, StagedSumPlan, expert_plan
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_block_product_on_gpus import GPU

BLOCK, OLD_GPU = 32, gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"}))


NAMES = ("b0", "b1", "m")


def operand(shape, dtype, index_map):
    return Operand(tuple(shape), dtype, index_map, PackedLayout.identity(len(shape)))


def problem_of(tokens, used, experts, n, k, dtype, rows_per_token):
    weight, scales = Fragments().shapes(n, integer_format(4, BLOCK, False), k, experts)
    return QuantizedMatmulProblem(
        operand((tokens, rows_per_token, 1, k), dtype, (*NAMES, "k")),
        (operand(weight, "int32", Fragments.index_map), operand(scales, "float16", Fragments.index_map)),
        operand((tokens, used, 1, n), "float32", (*NAMES, "n")),
        BLOCK,
        experts=experts,
        index=operand((tokens, used), "int32", NAMES[:2]),
    )


def check(problem, tokens, gpu=GPU, is_on_gpu=False, plan=None):
    rng, experts, n, k = fresh_rng(), problem.experts, problem.columns, problem.depth
    used, rows = problem.index.shape[1], problem.lhs.shape[1]
    x = rng.standard_normal((tokens, rows, 1, k)).astype(numpy_dtype(problem.lhs.dtype))
    codes = rng.integers(0, 16, (experts * n, k), dtype=np.uint8)
    scales = (rng.random((experts * n, -(-k // BLOCK))) + 0.1).astype("float16")
    numbers = (codes.astype("float64") - 8) * np.repeat(scales.astype("float64"), BLOCK, 1)[:, :k]
    index = rng.integers(-1, experts, (tokens, used)).astype("int32")
    matrices = numbers.reshape(experts, n, k)[index]
    want = np.einsum("tuk,tunk->tun", np.broadcast_to(x[:, :, 0].astype("float64"), (tokens, used, k)), matrices)
    packed = [pack_fragments(codes[:, 0::2] | codes[:, 1::2] << 4, k, BLOCK), pack_fragment_blocks(scales)]
    func = quantized_matmul_kernel(problem, gpu, plan)
    assert is_one_launch(func)
    result = np.full((tokens, used, 1, n), np.nan, "float32")
    if is_on_gpu:
        result = run_on_gpu(func, [x, *packed, index], result.shape, "float32")
    else:
        run(func, x, *packed, index, result)
    own = index >= 0
    assert np.isnan(result[~own]).all()
    assert np.abs(result[:, :, 0] - want)[own].max(initial=0.0) <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("gpu", [GPU, OLD_GPU], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (3, (3, 2, 5, 48, 256, "float32", 1)),
        (2, (2, 3, 4, 32, 200, "float32", 3)),
        (1, (1, 4, 8, 64, 512, "float16", 1)),
        (4, ("s0", 2, 3, 16, 96, "float32", 2)),
    ],
    ids=["gate", "down", "one token", "symbolic"],
)
def test_rows_meet_their_experts(tokens, sizes, gpu):
    check(problem_of(*sizes), tokens, gpu)


def format_case(name, tokens, used, experts, n, k, dtype, rows, seed=3):
    """A problem with a file's weights, its arguments, and the result in float64, (tokens, used, n)."""
    rng, form, layout = np.random.default_rng(0), FILE_FORMATS[name], Fragments()
    raw = random_rows(name, experts * n, k, seed)
    packed = layout.pack(BlockSource((raw,), form, k), experts)
    assert [list(array.shape) for array in packed] == layout.shapes(n, form, k, experts)
    assert sum(array.nbytes for array in packed) == layout.packed_bytes(n, form, k, experts)
    x = rng.standard_normal((tokens, rows, 1, k)).astype(numpy_dtype(dtype))
    index = rng.integers(0, experts, (tokens, used)).astype("int32")
    problem = QuantizedMatmulProblem(
        operand(x.shape, dtype, (*NAMES, "k")),
        tuple(operand(array.shape, str(array.dtype), Fragments.index_map) for array in packed),
        operand((tokens, used, 1, n), "float32", (*NAMES, "n")),
        form.block,
        bits=form.bits,
        form=form,
        experts=experts,
        index=operand(index.shape, "int32", NAMES[:2]),
    )
    matrices = dequantize_rows(raw, form, k).astype("float64").reshape(experts, n, k)[index]
    rows = np.broadcast_to(x[:, :, 0].astype("float64"), (tokens, used, k))
    return problem, [x, *packed, index], np.einsum("tuk,tunk->tun", rows, matrices)


@pytest.mark.parametrize("minimum", [256, 8], ids=["each", "grouped"])
@pytest.mark.parametrize(
    ("name", "dtype", "k"),
    [
        ("f16", "float16", 200), ("bf16", "bfloat16", 72), ("bf16", "float32", 96), ("q6_k", "float16", 256),
        ("q5_k", "float32", 512), ("q5_1", "bfloat16", 704), ("mxfp4", "bfloat16", 160),
    ],
)  # fmt: skip
def test_formats(name, dtype, k, minimum, monkeypatch):
    monkeypatch.setattr(expert_body, "MIN_GROUPED_PAIRS", minimum)
    problem, arguments, want = format_case(name, 5, 3, 4, 48, k, dtype, 3)
    result = np.full((5, 3, 1, 48), np.nan, "float32")
    run(quantized_matmul_kernel(problem, GPU), *arguments, result)
    assert np.abs(result[:, :, 0] - want).max() <= 4e-6 * np.abs(want).max()


def result_of(problem, arguments, gpu, is_on_gpu):
    """The result of a problem's kernel, by the interpreter, also if it waits late, or on this machine's GPU."""
    func, shape = quantized_matmul_kernel(problem, gpu), problem.result.shape
    if is_on_gpu:
        return run_on_gpu(func, arguments, shape, "float32")
    results = []
    for each in (func, waiting_late(func)) if gpu.overlaps_launches else (func,):
        results.append(np.full(shape, np.nan, "float32"))
        run(each, *arguments, results[-1])
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


def biases_of(problem, count):
    """Operands and numbers of biases of experts, for a number of products."""
    numbers = [fresh_rng().standard_normal((problem.experts, problem.columns)).astype("float32") for _ in range(count)]
    return tuple(operand(each.shape, "float32", ("e", "n")) for each in numbers), numbers


def check_two_products(name, tokens, used, n, k, dtype, gpu=GPU, is_on_gpu=False, rounds=False):
    problem, (x, *packed, index), first = format_case(name, tokens, used, 4, n, k, dtype, 1)
    if rounds:  # to the numbers that the case has
        noise = 1 + 1e-4 * fresh_rng().uniform(-1, 1, x.shape)
        wide = (x.astype("float64") * noise).astype("float32")
        x = np.where(wide.astype(x.dtype) == x, wide, x.astype("float32"))
        problem = dataclasses.replace(problem, lhs=dataclasses.replace(problem.lhs, dtype="float32"), rounded=dtype)
    other, (_, *other_packed, _), second = format_case(name, tokens, used, 4, n, k, dtype, 1, seed=5)
    third = fresh_rng().standard_normal((*first.shape[:2], 1, n)).astype("float32")
    expression = Expression.parse("multiply(relu(x0), add(x1, x2))")
    operands, biases = biases_of(problem, 2)
    problem = dataclasses.replace(
        problem, second=other.weights, biases=operands, epilogue=Epilogue(expression, (problem.result,))
    )
    actual = result_of(problem, [x, *packed, *other_packed, index, *biases, third], gpu, is_on_gpu)[:, :, 0]
    want = np.maximum(first + biases[0][index], 0) * (second + biases[1][index] + third[:, :, 0])
    assert np.abs(actual - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("gpu", [GPU, OLD_GPU], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("name", "tokens", "used", "n", "k", "dtype"),
    [
        ("q4_0", 3, 2, 48, 320, "float16"), ("q4_k", 1, 4, 16, 512, "bfloat16"), ("q5_1", 2, 3, 32, 96, "float32"),
        ("bf16", 1, 2, 48, 72, "bfloat16"),
    ],
)  # fmt: skip
def test_two_products_of_a_row(name, tokens, used, n, k, dtype, gpu):
    check_two_products(name, tokens, used, n, k, dtype, gpu)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_are_rounded(dtype):
    check_two_products("q4_0", 3, 2, 48, 352, dtype, rounds=True)


def check_weighted_sums(name, tokens, used, n, k, dtype, gpu=GPU, is_on_gpu=False):
    problem, (x, *packed, index), products = format_case(name, tokens, used, 4, n, k, dtype, used)
    rng = fresh_rng()
    shares, added = rng.random((tokens, used), "float32"), rng.standard_normal((tokens, n)).astype("float32")
    # Pairs of other devices, whose rows nothing has written: at the end, as on meshes, at the beginning, and all.
    left_out = np.zeros((tokens, used), bool)
    left_out[0, used // 2 :], left_out[-1, : used // 2], left_out[2::3] = True, True, True
    index[left_out], x[left_out] = -1, np.nan
    own = (index >= 0)[:, :, None]
    result, (operands, (bias,)) = operand((tokens, n), "float32", ("m", "n")), biases_of(problem, 1)
    problem = dataclasses.replace(
        problem,
        biases=operands,
        shares=dataclasses.replace(problem.index, dtype="float32"),
        result=result,
        epilogue=Epilogue(Expression.parse("add(x0, x1)"), (result,)),
    )
    actual = result_of(problem, [x, *packed, index, shares, bias, added], gpu, is_on_gpu)
    want = np.einsum("tun,tu->tn", np.where(own, products + bias[index], 0), shares.astype("float64")) + added
    assert np.abs(actual - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("gpu", [GPU, OLD_GPU], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("name", "tokens", "used", "n", "k", "dtype"),
    [
        ("q4_0", 3, 8, 48, 704, "bfloat16"), ("q4_k", 1, 3, 32, 512, "float16"), ("q8_0", 2, 6, 16, 96, "float32"),
        ("f16", 2, 2, 80, 56, "float16"), ("q6_k", 1, 16, 16, 256, "bfloat16"), ("q5_0", 5, 1, 16, 64, "float16"),
    ],
)  # fmt: skip
def test_weighted_sums_of_the_rows_of_a_token(name, tokens, used, n, k, dtype, gpu):
    check_weighted_sums(name, tokens, used, n, k, dtype, dataclasses.replace(gpu, multiprocessors=2))


@pytest.mark.parametrize(
    ("name", "tokens", "used", "n", "k", "dtype"),
    [
        ("f16", 2, 8, 48, 96, "float16"), ("bf16", 1, 16, 16, 48, "bfloat16"), ("bf16", 3, 5, 32, 144, "bfloat16"),
    ],
)  # fmt: skip
def test_weighted_sums_by_stages_that_are_used_again(name, tokens, used, n, k, dtype, monkeypatch):
    monkeypatch.setattr(block_plan, "MIN_STAGE_BYTES", 1)
    monkeypatch.setattr(block_plan, "MAX_STAGED_FRACTION", 0.1)
    plans = []
    monkeypatch.setattr(expert_body, "expert_plan", lambda *args: plans.append(expert_plan(*args)) or plans[-1])
    check_weighted_sums(name, tokens, used, n, k, dtype)
    (plan,) = plans
    assert isinstance(plan, StagedSumPlan)


@pytest.mark.parametrize(("name", "used", "k"), [("f16", 8, 768), ("bf16", 8, 5120), ("bf16", 16, 3072)])
def test_stages_fit_shared_memory(name, used, k):
    rows = operand((1, used, 1, k), "bfloat16" if name != "f16" else name.replace("f", "float"), (*NAMES, "k"))
    form, index = FILE_FORMATS[name], operand((1, used), "int32", NAMES[:2])
    shapes, types = Fragments().shapes(2048, form, k, 4), ("int32", "int8", "float16")
    weights = tuple(operand(shape, dtype, Fragments.index_map) for shape, dtype in zip(shapes, types, strict=False))
    problem = QuantizedMatmulProblem(
        rows,
        weights,
        operand((1, 2048), "float32", ("m", "n")),
        form.block,
        bits=form.bits,
        form=form,
        experts=4,
        index=index,
        shares=dataclasses.replace(index, dtype="float32"),
    )
    plan = expert_plan(problem, GPU)
    assert isinstance(plan, StagedSumPlan)
    work = expert_body.StagedSumWork(problem, plan)
    work.share(GPU, 1, 1, 0)
    assert work.shared_bytes + 16 * plan.warps * plan.stages <= GPU.shared_bytes


@pytest.mark.parametrize(("second", "limit"), [(True, 168), (False, 128)])
@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_registers_of_kernels_of_few_pairs(name, second, limit):
    tokens = 1
    n, k = (768, 2048) if second else (2048, 768)
    shapes = Fragments().shapes(n, FILE_FORMATS[name], k, 2)
    types = ["int32", "int8", "float16"]
    weights = tuple(operand(shape, dtype, Fragments.index_map) for shape, dtype in zip(shapes, types, strict=True))
    form, index = FILE_FORMATS[name], operand((tokens, 8), "int32", NAMES[:2])
    problem = QuantizedMatmulProblem(
        operand((tokens, 1 if second else 8, 1, k), "bfloat16", (*NAMES, "k")),
        weights,
        operand((tokens, 8, 1, n), "float32", (*NAMES, "n")) if second else operand((tokens, n), "float32", ("m", "n")),
        form.block,
        Epilogue(Expression.parse("multiply(silu(x0), x1)")) if second else None,
        form.bits,
        form,
        2,
        index,
        second=weights if second else (),
        shares=None if second else dataclasses.replace(index, dtype="float32"),
    )
    (report,) = reports_of(quantized_matmul_kernel(problem, GPU), Target({"kind": "cuda", "arch": "sm_90a"}))
    assert report.registers <= limit and report.spill_stores == 0


@pytest.mark.parametrize("kind", ["sum", "grouped", "with an operand"])
def test_weights_are_loaded_before_a_late_wait(kind):
    """Where the previous launch writes rows, or an operand of the epilogue; in machine code, too."""
    tokens, is_sum, has_operand = 1 if kind == "sum" else 32, kind == "sum", kind == "with an operand"
    problem = problem_of(tokens, 8, 128, 2048, 768, "float16", 8)
    (shape,) = Fragments().shapes(2048, FILE_FORMATS["f16"], 768, 128)
    weights = (operand(shape, "int32", Fragments.index_map),)
    problem = dataclasses.replace(problem, weights=weights, bits=16, block=1, form=FILE_FORMATS["f16"])
    if is_sum:
        shares, result = dataclasses.replace(problem.index, dtype="float32"), operand((1, 2048), "float32", ("m", "n"))
        problem = dataclasses.replace(problem, shares=shares, result=result)
    if has_operand:
        epilogue = Epilogue(Expression.parse("multiply(x0, x1)"), (problem.result,))
        problem = dataclasses.replace(problem, epilogue=epilogue)
    kernel = quantized_matmul_kernel(problem, GPU)
    late = waiting_late(kernel)
    assert releases_after_wait(kernel) and releases_after_wait(late)
    assert list(kernel.attrs[LATE_WAIT]) == list(range(0 if has_operand else 1, 4 if is_sum else 3))
    if nvdisasm() is None:
        pytest.skip("no nvdisasm")
    (source,) = sources_of(late, Target({"kind": "cuda", "arch": "sm_90a"}))
    text = disassembled(compile_source(source).code)
    # The last wait is that of blocks with an expert.
    assert text.index("UBLKCP" if is_sum else "LDG.E.NA") < text.rindex("ACQBULK") < text.index("STG")
    assert (text.rindex("HMMA") < text.rindex("ACQBULK")) == has_operand


@pytest.mark.parametrize("fragments", [2, 4])
def test_blocks_of_several_fragments(fragments):
    check(problem_of(3, 2, 5, 128, 200, "float32", 1), 3, plan=BlockPlan(fragments, 1, 2, 2))


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (40, (40, 3, 5, 48, 96, "float16", 1)),
        (33, (33, 2, 40, 32, 200, "bfloat16", 2)),
        (64, (64, 1, 2, 16, 64, "float16", 1)),
    ],
    ids=["gate", "down", "two experts"],
)
@pytest.mark.parametrize("gpu", [GPU, OLD_GPU], ids=["sm_90a", "sm_80"])
def test_rows_grouped_by_expert(tokens, sizes, gpu, monkeypatch):
    monkeypatch.setattr(expert_body, "MIN_GROUPED_PAIRS", 8)
    check(problem_of(*sizes), tokens, gpu)


@pytest.mark.parametrize("tokens", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_registers_hold_all_values(tokens):
    problem = problem_of(tokens, 8, 128, 768, 2048, "float16", 1)
    (report,) = reports_of(quantized_matmul_kernel(problem, GPU), Target({"kind": "cuda", "arch": "sm_90a"}))
    assert report.registers <= 128 and report.spill_stores == 0


def test_fragments_of_a_plan_belong_to_one_expert():
    assert expert_plan(problem_of(1, 8, 128, 2048, 768, "float32", 8), GPU).fragments == 4
    assert expert_plan(problem_of(1, 8, 128, 768, 2048, "float32", 1), GPU).fragments == 2
    assert expert_plan(problem_of(9, 8, 128, 48, 2048, "float32", 1), GPU).fragments == 1  # three fragments


@needs_gpu
@pytest.mark.parametrize(
    ("tokens", "n", "k", "rows"), [(1, 768, 2048, 1), (5, 2048, 768, 8), (64, 768, 2048, 1), (300, 2048, 768, 8)]
)
def test_on_a_gpu(tokens, n, k, rows):
    for dtype in ("float32", "float16"):
        check(problem_of(tokens, 8, 16, n, k, dtype, rows), tokens, is_on_gpu=True)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", [form.name for form in FILE_FORMATS.values()])
def test_few_pairs_of_formats_on_a_gpu(name):
    dtype = "float16" if name == "f16" else "bfloat16"
    for tokens in (1, 5):
        check_two_products(name, tokens, 8, 768, 2048, dtype, is_on_gpu=True, rounds=tokens > 1)
        check_weighted_sums(name, tokens, 8, 2048, 768, dtype, is_on_gpu=True)
