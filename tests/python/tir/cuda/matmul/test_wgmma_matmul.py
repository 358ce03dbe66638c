"""Products by wgmma: semantics by the interpreter of GPU kernels, registers and spills as ptxas reports them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from gpu_interpreter.calls import EXTERNS
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand, SentSum
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of, numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import releases_after_wait, waiting_late
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.core.launch import LATE_WAIT, READS_EARLY
from relax_hetero.tir.cuda.matmul.wgmma_matmul import sends_tiles, unsupported_reason, wgmma_matmul_kernel
from relax_hetero.tir.cuda.matmul.wgmma_tiling import choose_tiling, tiling_of
from seeds import fresh_rng
from tir.kernel_runs import in_double, poisoned

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
IS_HOPPER = tvm.cuda(0).exist and tvm.cuda(0).compute_version == "9.0"
SYMBOLS = {"b0": "s0", "m": "s1", "n": "s2", "k": "s3"}
BIAS_GELU = "cast(gelu(add(x0, cast(x1, 'float32'))), 'float16')"
RESIDUAL = "add(cast(add(x0, cast(x1, 'float32')), 'float16'), x2)"
REQUANTIZED = "cast(clip(round(multiply(cast(x0, 'float32'), x1)), 0.0, 255.0), 'uint8')"


def packed(rank: int, dtype: str) -> PackedLayout:
    """The layout of a right operand (batch.., k, n)."""
    batch = tuple(range(rank - 2))
    return PackedLayout((*batch, rank - 1, rank - 2), (rank - 1, rank - 2), (64, 128 // bytes_of(dtype)), swizzle=True)


def problem_of(
    sizes: dict[str, int],
    dtype: str = "float16",
    result: str = "",
    acc: str = "float32",
    right_dtype: str = "",
    lhs: str = "mk",
    rhs: str = "packed",
    epilogue: str = "",
    operands: Sequence[tuple[Sequence[str], str]] = (),
    init: bool = False,
    symbolic: Sequence[str] = (),
    shares_right: bool = False,
    shares_left: bool = False,
) -> MatmulProblem:
    """A product; `lhs` and `rhs` name the order of the last dimensions, "packed" the tiles of tensor cores."""
    batch = tuple(name for name in sizes if name.startswith("b"))
    result, right_dtype = result or dtype, right_dtype or dtype

    def operand(names: Sequence[str], element: str, layout: PackedLayout | None = None) -> Operand:
        shape = tuple(SYMBOLS[n] if n in symbolic else sizes[n] for n in names)
        return Operand(shape, element, tuple(names), layout or PackedLayout.identity(len(names)))

    of_right = () if shares_right else batch
    layout = packed(len(of_right) + 2, right_dtype) if rhs == "packed" else None
    if not epilogue and result != acc:
        epilogue = f"cast(x0, '{result}')"
    extra = tuple(operand(names, element) for names, element in operands)
    return MatmulProblem(
        operand((() if shares_left else (*batch,)) + (*lhs,), dtype),
        operand((*of_right, *("kn" if rhs == "packed" else rhs)), right_dtype, layout),
        operand((*batch, "m", "n"), result),
        acc,
        operand((*batch, "m", "n"), acc) if init else None,
        Epilogue(Expression.parse(epilogue), extra) if epilogue else None,
        tf32=dtype == "float32",
    )


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return rng.integers(np.iinfo(dtype).min // (1 if "8" in dtype else 2**20), 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def check(problem: MatmulProblem, sizes: dict[str, int], tile: tuple[int, int] = (64, 64), **how: int) -> None:
    """Run the kernel and compare it with float64; storage of the result is poisoned before."""
    counts = [problem.result.size(name) for name in problem.rhs.index_map if name.startswith("b")]
    m, n, k = (problem.result.size("m"), problem.result.size("n"), problem.lhs.size("k"))
    tiling = tiling_of(problem, GPU, (m, n, k), counts, tile, **how)
    if tiling.blocks == GPU.multiprocessors:  # some extent is symbolic: blocks have several tiles or none
        tiling = dataclasses.replace(tiling, blocks=3)
    kernel = wgmma_matmul_kernel(problem, GPU, tiling)
    assert is_one_launch(kernel)
    stored, want = operands_of(problem, sizes)
    got = poisoned([sizes[name] for name in problem.result.index_map], problem.result.dtype).numpy()
    run(kernel, *stored, got)
    assert_equal(got, want, problem, sizes["k"])


def operands_of(problem: MatmulProblem, sizes: dict[str, int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Random operands as they are stored, and the result in float64."""
    rng = fresh_rng()
    names = problem.result.index_map
    logical, stored = [], []
    for operand in problem.parameters[:-1]:
        array = random_array(rng, [sizes[name] for name in operand.index_map], operand.dtype)
        stored.append(operand.layout.pack(array) if array.ndim else array)
        logical.append((array.astype("float64"), operand.index_map))

    def aligned(number: int, order: Sequence[str]) -> np.ndarray:
        array, index_map = logical[number]
        array = array.transpose([index_map.index(name) for name in order if name in index_map])
        return np.expand_dims(array, [i for i, name in enumerate(order) if name not in index_map])

    want = aligned(0, [*names[:-1], "k"]) @ aligned(1, [*names[:-2], "k", "n"])
    extra = [aligned(i, names) for i in range(2, len(logical))]
    if problem.init is not None:
        want = want + extra.pop(0)
    if problem.epilogue is not None:
        want = in_double(problem.epilogue.expression, [want, *extra])
    return stored, want


def assert_equal(got: np.ndarray, want: np.ndarray, problem: MatmulProblem, k: int) -> None:
    """Integers exactly; floats within roundings of the result, and of the sums of `k` products."""
    if "int" in problem.result.dtype:
        np.testing.assert_array_equal(got, want)
        return
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(problem.result.dtype, 1e-6)
    operands = (2.0**-7 if problem.tf32 else 1e-5) * math.sqrt(k)
    np.testing.assert_allclose(got.astype("float64"), want, rtol=2 * rounding, atol=operands + 2 * rounding)


@pytest.mark.parametrize(
    ("sizes", "how", "tile"),
    [
        ({"m": 70, "n": 72, "k": 100}, {"lhs": "km"}, (64, 64)),
        ({"m": 64, "n": 128, "k": 64}, {}, (64, 64)),
        ({"m": 66, "n": 41, "k": 64}, {"dtype": "bfloat16", "result": "float32"}, (64, 64)),
        ({"m": 20, "n": 136, "k": 72}, {"rhs": "kn"}, (64, 128)),
        ({"m": 20, "n": 71, "k": 68}, {"rhs": "nk"}, (64, 64)),
        ({"b0": 2, "b1": 2, "m": 30, "n": 40, "k": 64}, {}, (64, 64)),
        ({"b0": 3, "m": 30, "n": 40, "k": 63}, {"shares_right": True}, (64, 64)),
        ({"b0": 2, "m": 30, "n": 24, "k": 40}, {"shares_left": True, "rhs": "kn"}, (64, 64)),
    ],
)
def test_any_storage_and_size(sizes, how, tile):
    check(problem_of(sizes, **how), sizes, tile)


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "int8", "acc": "int32", "result": "int32"},
        {"dtype": "uint8", "right_dtype": "int8", "acc": "int32", "result": "int32", "rhs": "kn"},
        {"dtype": "float8_e4m3fn", "right_dtype": "float8_e5m2", "result": "float16"},
        {"dtype": "float32"},
    ],
    ids=lambda how: f"{how['dtype']}-{how.get('right_dtype', '')}",
)
def test_element_types(how):
    sizes = {"m": 30, "n": 40, "k": 48}
    check(problem_of(sizes, **how), sizes, (64, 256) if how["dtype"] == "int8" else (64, 64))


@pytest.mark.parametrize(
    "how",
    [
        {"epilogue": BIAS_GELU, "operands": [("n", "float16")]},
        {"epilogue": RESIDUAL, "operands": [("n", "float16"), ("mn", "float16")]},
        {
            "dtype": "bfloat16",
            "epilogue": "cast(multiply(add(x0, cast(x1, 'float32')), multiply(x2, x3)), 'bfloat16')",
            "operands": [("mn", "bfloat16"), ("m", "float32"), ("", "float32")],
        },
        {"epilogue": "cast(where(x1, x0, -5.0), 'float16')", "operands": [("mn", "bool")]},
        {"init": True, "result": "float32"},
        {"epilogue": "multiply(mish(add(x0, x1)), softsign(x0))", "operands": [("n", "float32")], "result": "float32"},
        {"epilogue": "cast(x0, 'float64')", "result": "float64"},
        {
            "dtype": "uint8",
            "right_dtype": "int8",
            "acc": "int32",
            "epilogue": REQUANTIZED,
            "operands": [("n", "float32")],
        },
    ],
    ids=["bias gelu", "residual", "row scale", "mask", "init", "formulas", "wider than sums", "requantized"],
)
def test_epilogues(how):
    sizes = {"m": 66, "n": 40, "k": 64}
    check(problem_of(sizes, **how), sizes)


@pytest.mark.parametrize(
    ("sizes", "tile", "how"),
    [
        ({"m": 40, "n": 64, "k": 258}, (64, 64), {"cluster_split_k": 4}),
        ({"m": 140, "n": 320, "k": 130}, (64, 128), {"blocks_per_sm": 2}),
        ({"m": 130, "n": 256, "k": 64}, (128, 256), {"staged_bytes": 128}),
    ],
    ids=["parts of k", "blocks of a multiprocessor", "large tiles"],
)
def test_clusters_and_tiles(sizes, tile, how):
    check(problem_of(sizes), sizes, tile, **how)


@pytest.mark.parametrize(
    ("sizes", "tile", "how"),
    [
        ({"m": 50, "n": 64, "k": 96}, (48, 64), {}),
        ({"m": 100, "n": 200, "k": 130}, (96, 128), {}),
        ({"m": 100, "n": 300, "k": 130}, (32, 256), {}),
        ({"m": 100, "n": 128, "k": 300}, (112, 128), {"cluster_split_k": 2}),
        ({"m": 60, "n": 256, "k": 520}, (96, 256), {"cluster_split_k": 4}),
        ({"m": 40, "n": 64, "k": 64}, (16, 64), {"staged_bytes": 256}),  # eight rows at a time: one matrix
    ],
)
def test_swapped_operands(sizes, tile, how):
    check(problem_of(sizes), sizes, tile, swap_ab=True, **how)


@pytest.mark.parametrize(
    "how",
    [
        {"epilogue": "cast(add(x0, cast(x1, 'float32')), 'float16')", "operands": [("n", "float16")]},
        {"epilogue": "cast(add(x0, cast(x1, 'float32')), 'float16')", "operands": [("mn", "float16")]},
        {"epilogue": "cast(multiply(x0, x1), 'float16')", "operands": [("m", "float32")]},
        {"dtype": "int8", "result": "int32", "acc": "int32"},
        {"dtype": "float32"},
        {
            "dtype": "int8",
            "acc": "int32",
            "epilogue": "cast(clip(round(multiply(cast(x0, 'float32'), 0.0009765625)), -128, 127), 'int8')",
        },
    ],
)
def test_epilogues_of_swapped_operands(how):
    sizes = {"m": 60, "n": 100, "k": 96}
    check(problem_of(sizes, **how), sizes, (48, 128), swap_ab=True)


def test_biases_of_wide_tiles():
    """A lane holds several pairs of columns, of 32 and of 16 bits; columns beyond the last one are not read."""
    sizes = {"m": 20, "n": 200, "k": 64}
    scaled = "cast(multiply(add(x0, x1), cast(x2, 'float32')), 'float16')"
    problem = problem_of(sizes, epilogue=scaled, operands=[("n", "float32"), ("n", "float16")])
    check(problem, sizes, (64, 256), staged_bytes=128)


def test_symbolic_extents():
    sizes = {"b0": 2, "m": 65, "n": 24, "k": 40}
    check(problem_of(sizes, rhs="kn", symbolic=["b0", "m", "n", "k"]), sizes)
    check(problem_of({**sizes, "k": 72}, symbolic=["m"]), {**sizes, "k": 72})


@pytest.mark.parametrize("rows", [0, 65])
def test_blocks_that_share_the_k_of_a_symbolic_number_of_tiles(rows):
    sizes = {"m": rows, "n": 72, "k": 200}
    check(problem_of(sizes, symbolic=["m"]), sizes, cluster_split_k=2)


@pytest.mark.parametrize(
    ("how", "tile", "options"),
    [
        ({"epilogue": RESIDUAL, "operands": [("n", "float16"), ("mn", "float16")]}, (128, 256), {}),
        pytest.param(
            {"epilogue": "gelu(add(cast(x0, 'float16'), x1))", "operands": [("n", "float16")]},
            (128, 256),
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param({}, (128, 256), {}, marks=pytest.mark.slow),
        pytest.param({}, (128, 128), {"cluster_split_k": 4}, marks=pytest.mark.slow),
        pytest.param({"dtype": "int8", "acc": "int32", "result": "int32"}, (128, 256), {}, marks=pytest.mark.slow),
        ({"result": "float32", "sent": SentSum(0, 2, 1, 1 << 25)}, (128, 256), {}),
    ],
    ids=["residual", "gelu", "plain", "split", "int8", "sent"],
)
def test_registers(how, tile, options):
    """Sums stay in registers, and wgmma is not serialized."""
    sent = how.get("sent")
    problem = problem_of({"m": 4096, "n": 4096, "k": 4096}, **{key: how[key] for key in how if key != "sent"})
    problem = dataclasses.replace(problem, sent=sent)
    tiling = tiling_of(problem, GPU, (4096, 4096, 4096), [], tile, **options)
    (report,) = reports_of(wgmma_matmul_kernel(problem, GPU, tiling), TARGET)
    assert report.serialized == "" and not report.touched
    assert report.spill_stores <= 16
    assert report.registers * (128 + 2 * tiling.rows) <= GPU.registers


def test_a_tiling_fits_into_the_gpu():
    rng = fresh_rng()
    for _ in range(300):
        m, n, k = (int(2 ** rng.uniform(0, 13)) for _ in range(3))
        result = str(rng.choice(["float16", "float32", "int8"]))
        problem = problem_of({"m": m, "n": n, "k": k}, result=result)
        tiling = choose_tiling(problem, GPU, (m, n, k), [int(rng.integers(1, 20))])
        stages = tiling.stages * (tiling.rows + tiling.columns) * 128
        sums = tiling.rows * tiling.columns * 4 if tiling.cluster_split_k > 1 else 0
        staging = tiling.rows * (tiling.epilogue_columns * bytes_of(result) + 32)
        each = max(stages, sums) + staging + 16 * tiling.stages + 1024  # reserved for each block
        assert tiling.blocks_per_sm * each <= GPU.shared_bytes + 1024, (m, n, k, tiling)
        assert tiling.blocks % tiling.cluster_split_k == 0
        assert tiling.cluster_split_k <= -(-k // 64), "every block of a cluster has a part of k"
        assert tiling.columns // tiling.cluster_split_k % 8 == 0


@pytest.mark.parametrize(
    ("sizes", "tile", "split"),
    [
        ((4096, 4096, 4096), (128, 256), 1),
        ((4096, 1024, 4096), (128, 256), 1),
        ((512, 4096, 4096), (64, 256), 1),
        ((128, 4096, 4096), (64, 128), 2),
        ((127, 255, 511), (64, 64), 8),
        ((128, 768, 3072), (64, 64), 4),
        ((784, 512, 4608), (64, 256), 4),
        ((784, 512, 2048), (64, 128), 2),
    ],
)
def test_tilings_are_those_that_were_fastest(sizes, tile, split):
    m, n, k = sizes
    problem = problem_of({"m": m, "n": n, "k": k})
    tiling = choose_tiling(problem, GPU, sizes, [], gathers=k == 511)
    assert ((tiling.rows, tiling.columns), tiling.cluster_split_k) == (tile, split)
    assert tiling.stages >= min(4, -(-k // 64 // split))
    assert (tiling.blocks_per_sm, tiling.swap_ab) == (1, False)


@pytest.mark.parametrize(
    ("sizes", "tile", "blocks_per_sm"),
    [
        ((12544, 128, 1152), (96, 128), 1),
        ((784, 2048, 1024), (112, 128), 1),
        ((50176, 64, 576), (192, 64), 1),
        ((12544, 256, 512), (96, 128), 2),
        ((3136, 1024, 256), (96, 128), 2),
    ],
)
def test_swapped_tiles_give_all_multiprocessors_as_much_to_do(sizes, tile, blocks_per_sm):
    m, n, k = sizes
    tiling = choose_tiling(problem_of({"m": m, "n": n, "k": k}), GPU, sizes, [], may_swap=True)
    assert ((tiling.rows, tiling.columns), tiling.blocks_per_sm, tiling.swap_ab) == (tile, blocks_per_sm, True)


@pytest.mark.parametrize("sizes", [(12544, 128, 1152), (12544, 512, 256), (50176, 256, 64), (784, 2048, 512)])
def test_many_short_tiles_share_multiprocessors(sizes):
    m, n, k = sizes
    tiling = choose_tiling(problem_of({"m": m, "n": n, "k": k}), GPU, sizes, [])
    assert (tiling.rows, tiling.columns, tiling.blocks_per_sm) == (64, 128, 2)
    assert tiling.blocks == min(2 * GPU.multiprocessors, -(-m // 64) * -(-n // 128))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"m": 300, "n": 520, "k": 1000}, {}),
        ({"m": 1024, "n": 2304, "k": 512}, {"epilogue": RESIDUAL, "operands": [("n", "float16"), ("mn", "float16")]}),
        ({"m": 127, "n": 255, "k": 511}, {}),
        ({"b0": 12, "m": 128, "n": 64, "k": 128}, {"rhs": "kn"}),
        ({"m": 512, "n": 1024, "k": 640}, {"dtype": "int8", "acc": "int32", "result": "int32"}),
    ],
    ids=["ragged", "residual", "odd", "batches", "int8"],
)
def test_on_a_gpu(sizes, how):
    """With the tiling that is chosen, many blocks at a time."""
    problem = problem_of(sizes, **how)
    kernel = wgmma_matmul_kernel(problem, GPU)
    executable = tvm.compile(tvm.IRModule({"main": kernel}), target=TARGET.with_host(Target("llvm")))
    stored, want = operands_of(problem, sizes)
    device = tvm.cuda(0)
    shape = [sizes[name] for name in problem.result.index_map]
    got = tvm.runtime.tensor(poisoned(shape, problem.result.dtype).numpy(), device)
    executable["main"](*(tvm.runtime.tensor(array, device) for array in stored), got)
    assert_equal(got.numpy(), want, problem, sizes["k"])


def test_unsupported_problems():
    sizes = {"m": 64, "n": 64, "k": 64}
    problem = problem_of(sizes)
    assert unsupported_reason(problem, GPU) == ""
    assert "lacks wgmma" in unsupported_reason(problem, gpu_target_of(Target({"kind": "cuda", "arch": "sm_80"})))
    exact = dataclasses.replace(problem_of(sizes, "float32"), tf32=False)
    assert "element types float32 * float32 -> float32" in unsupported_reason(exact, GPU)
    assert "0" in unsupported_reason(problem_of({**sizes, "k": 0}), GPU)
    rows = Operand((64, 64), "float16", ("k", "n"), PackedLayout((1, 0), (1,), (16,)))
    with pytest.raises(EncodingError, match="expected tiles n:64, k:64, swizzled"):
        wgmma_matmul_kernel(dataclasses.replace(problem, rhs=rows), GPU)


def test_weights_are_asked_for_before_the_wait():
    """Only with static sizes: with a symbolic m, a block may be without a tile."""
    for symbolic, asks in (((), [1]), (("m",), [])):
        func = wgmma_matmul_kernel(problem_of({"m": 200, "n": 136, "k": 300}, symbolic=symbolic), GPU)
        assert list(func.attrs[READS_EARLY]) == asks
        text = func.script()
        assert (0 < text.find("prefetch") < text.index("griddepcontrol")) == bool(asks)


@pytest.mark.parametrize("how", [{}, {"swap_ab": True}])
def test_a_product_may_wait_in_its_epilogue(how):
    """Blocks of several tiles; the left operand is loaded before the wait, the residual after it."""
    sizes = {"m": 100, "n": 130, "k": 96}
    problem = problem_of(sizes, epilogue="cast(add(x0, cast(x1, 'float32')), 'float16')", operands=[("mn", "float16")])
    tiling = dataclasses.replace(tiling_of(problem, GPU, (100, 130, 96), [], (64, 64), **how), blocks=4)
    kernel = wgmma_matmul_kernel(problem, GPU, tiling)
    assert list(kernel.attrs[LATE_WAIT]) == [0, 1]
    late = waiting_late(kernel)
    for each, waits_late in ((kernel, False), (late, True)):
        assert releases_after_wait(each)
        text = each.script()
        assert (text.index("griddepcontrol") > text.index("mbarrier_wait")) == waits_late
        stored, want = operands_of(problem, sizes)
        got = poisoned([100, 130], "float16").numpy()
        run(each, *stored, got)
        assert_equal(got, want, problem, sizes["k"])


def test_kernels_without_large_operands_or_with_one_tile_wait_first():
    sizes = {"m": 64, "n": 64, "k": 64}
    for problem in (
        problem_of(sizes, epilogue=RESIDUAL, operands=[("n", "float16"), ("mn", "float16")]),
        problem_of({"m": 2048, "n": 4096, "k": 64}),
    ):
        assert LATE_WAIT not in wgmma_matmul_kernel(problem, GPU).attrs


@pytest.mark.parametrize("rank", [0, 1])
def test_tiles_of_other_gpus_are_sent_first(rank, monkeypatch):
    """Two warps send each tile when it is stored, tiles of the GPU's own rows last, for which the call does nothing."""
    sizes = {"m": 512, "n": 512, "k": 64}
    plain = problem_of(sizes, result="float32")
    problem = dataclasses.replace(plain, sent=SentSum(rank, 2, 1, 1 << 20))
    tiling = dataclasses.replace(tiling_of(problem, GPU, (512, 512, 64), [], (128, 256)), blocks=1)
    stored, want = operands_of(plain, sizes)
    got, sent = poisoned([512, 512], "float32").numpy(), []

    def send(expressions, call):
        numbers = [expressions.compiled(argument) for argument in call.args[3:-1]]

        def evaluate(lanes, mask):
            assert mask.sum() == 64
            values = [np.unique(np.broadcast_to(each(lanes, mask), lanes.count)[mask]).item() for each in numbers]
            assert values[1:2] + values[3:6] == [1 << 20, 1, 256, 512]  # bytes of a slot, slot, rows of a GPU, columns
            row, column = values[6:]
            tile = np.s_[row : row + 128, column : column + 256]
            np.testing.assert_allclose(got[tile], want[tile], atol=1e-3)
            sent.append((row, column))

        return evaluate

    monkeypatch.setitem(EXTERNS, f"rh_send_tile<{rank}, 2>", send)
    run(wgmma_matmul_kernel(problem, GPU, tiling), *stored, np.zeros(2, "int64"), got)
    assert_equal(got, want, problem, sizes["k"])
    assert sorted(sent) == [(row, column) for row in range(0, 512, 128) for column in (0, 256)]
    assert [row // 256 for row, _ in sent] == [1 - rank] * 4 + [rank] * 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "how", "is_sent"),
    [
        ((2048, 4096, 1024), {}, True),
        ((3072, 4096, 514), {}, True),
        ((2048, 4096, 1023), {}, False),  # gathered
        ((2048, 2048, 1024), {}, False),  # one tile for each block
        ((2304, 2048, 1024), {}, False),  # swapped tiles of 192 rows
        ((2048, 4096, 1024), {"result": "float16"}, False),
        ((2048, 4096, 1024), {"rhs": "kn"}, False),
        ((2048, 4096, 1024), {"symbolic": "m"}, False),
    ],
)
def test_products_that_can_send_tiles(sizes, how, is_sent):
    problem = problem_of(dict(zip("mnk", sizes, strict=True)), **{"result": "float32", **how})
    assert sends_tiles(problem, GPU) == is_sent


def test_other_tiles_are_not_sent():
    problem = problem_of({"m": 512, "n": 512, "k": 64}, result="float32")
    tiling = tiling_of(problem, GPU, (512, 512, 64), [], (128, 128))
    with pytest.raises(EncodingError, match=r"found Tiling\(rows=128, columns=128.*, expected tiles of \(128, 256\)"):
        wgmma_matmul_kernel(dataclasses.replace(problem, sent=SentSum(0, 2, 1, 1 << 20)), GPU, tiling)
