"""Products without tensor cores: numbers by the interpreter of GPU kernels, registers and spills as ptxas says."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tvm
from tvm.target import Target
from tvm_ffi import structural_walk

from cuda_reports import reports_of
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import RowPhase
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.graph_functions import waiting_in_place
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.tir.cuda.matmul.simt_matmul import simt_matmul_kernel
from relax_hetero.tir.cuda.matmul.simt_plan import SimtPlan, simt_plan
from seeds import fresh_rng
from tir.cuda.matmul.products_on_gpus import check, product

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
OLD = gpu_target_of(Target({"kind": "cuda", "arch": "sm_61"}))
HEADS = PackedLayout((0, 2, 1, 3))
RAGGED = {"m": 33, "n": 50, "k": 37}


def verify(sizes, plan=None, gpu=GPU, **how):
    problem = product(sizes, **how)
    check(problem, simt_matmul_kernel(problem, gpu, plan), sizes)


@pytest.mark.parametrize(
    ("types", "result"),
    [
        (("float32",) * 3, ""),
        (("float64",) * 3, ""),
        (("float16", "float16", "float32"), "float16"),
        (("float16", "float16", "float16"), ""),
        (("bfloat16", "bfloat16", "float32"), "bfloat16"),
        (("float8_e4m3fn", "float8_e5m2", "float32"), ""),
        (("uint8", "int8", "int32"), ""),
        (("int32",) * 3, ""),
        (("int64",) * 3, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("rhs", ["kn", "nk"])
def test_element_types(types, result, rhs):
    sizes = RAGGED if rhs == "kn" else {"m": 16, "n": 32, "k": 32}
    verify(sizes, types=types, result=result, maps=("mk", rhs, "mn"))


@pytest.mark.parametrize(
    "plan",
    [
        SimtPlan(128, 128, 8, 8, 4, 16, 1),
        SimtPlan(64, 64, 8, 8, 4, 8, 4),
        SimtPlan(64, 64, 8, 8, 4, 8, 2, 2),
        SimtPlan(32, 32, 4, 4, 4, 8, 4),
        SimtPlan(16, 32, 4, 4, 4, 16, 4),
    ],
    ids=lambda plan: f"{plan.rows}x{plan.columns}x{plan.depth} by {plan.slices}x{plan.cluster}",
)
@pytest.mark.parametrize("maps", [("mk", "kn", "mn"), pytest.param(("km", "nk", "mn"), marks=pytest.mark.slow)])
def test_tiles(plan, maps):
    verify({"m": 130, "n": 66, "k": 70}, plan, maps=maps)


@pytest.mark.parametrize(
    ("sizes", "rhs"),
    [
        ({"m": 1, "n": 300, "k": 70}, "kn"),
        ({"m": 1, "n": 40, "k": 200}, "nk"),
        ({"m": 3, "n": 33, "k": 17}, "kn"),
        ({"m": 8, "n": 64, "k": 64}, "nk"),
        ({"m": 70, "n": 1, "k": 33}, "kn"),
        ({"m": 70, "n": 2, "k": 64}, "nk"),
        ({"m": 1, "n": 1, "k": 1}, "kn"),
        ({"b0": 3, "m": 2, "n": 40, "k": 36}, ("b0", "k", "n")),
        ({"m": 12, "n": 9, "k": 1030}, "nk"),  # two blocks of rows
        pytest.param({"b0": 2, "m": 24, "n": 9, "k": 1024}, ("b0", "k", "n"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_few_rows_or_columns(sizes, rhs):
    batch = [name for name in sizes if name.startswith("b")]
    verify(sizes, maps=((*batch, "m", "k"), rhs, (*batch, "m", "n")))


@pytest.mark.parametrize(
    ("sizes", "multiprocessors"),
    [
        ({"m": 1100, "n": 1, "k": 32}, 1),  # several columns of a thread
        ({"m": 1101, "n": 3, "k": 24}, 1),
        ({"m": 130, "n": 8, "k": 5}, 132),
        ({"m": 1030, "n": 2, "k": 600}, 1),  # warps with columns of their own
    ],
    ids=str,
)
def test_few_columns_of_many_rows(sizes, multiprocessors):
    gpu = dataclasses.replace(GPU, multiprocessors=multiprocessors)
    verify(sizes, gpu=gpu, types=("float16", "float16", "float32"), result="float16", maps=("mk", "nk", "mn"))


def test_few_rows_of_other_types():
    verify({"m": 2, "n": 33, "k": 40}, types=("float16", "float16", "float32"), result="float16")
    verify({"m": 2, "n": 32, "k": 48}, types=("int8", "uint8", "int32"), maps=("mk", "nk", "mn"))


@pytest.mark.parametrize(
    ("maps", "layouts"),
    [
        ((("b0", "b1", "m", "k"), ("b0", "b1", "n", "k"), ("b0", "b1", "m", "n")), (HEADS, HEADS, HEADS)),
        ((("b0", "1", "m", "k"), ("b1", "k", "n"), ("b0", "b1", "m", "n")), (None, None, None)),
        ((("b0", "b1", "m", "k"), ("k", "n"), ("b0", "b1", "m", "n")), (None, None, None)),
        ((("m", "b0", "k", "b1"), ("k", "b0", "b1", "n"), ("b0", "m", "b1", "n")), (None, None, None)),
        ((("b0", "b1", "k", "m"), ("b1", "n", "k"), ("b0", "n", "b1", "m")), (None, None, None)),
    ],
    ids=["heads", "broadcast", "rows", "permuted", "columns of m"],
)
def test_batches_and_orders(maps, layouts):
    verify({"b0": 2, "b1": 3, "m": 20, "n": 12, "k": 24}, maps=maps, layouts=layouts)


@pytest.mark.parametrize(
    "how",
    [
        {"epilogue": "gelu(add(x0, x1))", "operands": [("n", "float32")]},
        {"epilogue": "add(relu(add(x0, x1)), x2)", "operands": [("n", "float32"), ("mn", "float32")]},
        {"epilogue": "where(x1, divide(x0, 8.0), x2)", "operands": [("mn", "bool"), ("", "float32")]},
        {"epilogue": "where(x1, x0, -1.5)", "operands": [(("m", "1"), "bool")]},
        {
            "types": ("bfloat16", "bfloat16", "float32"),
            "result": "bfloat16",
            "epilogue": "cast(multiply(x0, cast(x1, 'float32')), 'bfloat16')",
            "operands": [("mn", "bfloat16")],
        },
        {
            "types": ("int8", "int8", "int32"),
            "result": "uint8",
            "epilogue": "cast(clip(round(multiply(cast(x0, 'float32'), x1)), 0.0, 255.0), 'uint8')",
            "operands": [("n", "float32")],
        },
        {"init": ("n",)},
        {"init": ("m", "n")},
    ],
    ids=["bias gelu", "bias relu residual", "mask", "rows' mask", "bfloat16", "requantized", "bias first", "init"],
)
@pytest.mark.parametrize("n", [50, 48], ids=["single elements", "vectors"])
def test_epilogues(how, n):
    verify({"m": 33, "n": n, "k": 16}, **how)


@pytest.mark.parametrize(
    ("symbolic", "zero"),
    [("m", ""), ("n", ""), ("k", ""), ("mnk", ""), ("mnk", "m"), ("mnk", "k"), ("", "m"), ("", "k")],
)
def test_symbolic_and_empty_extents(symbolic, zero):
    verify({**RAGGED, **({zero: 0} if zero else {})}, symbolic=symbolic)


def test_symbolic_batches():
    maps = (("b0", "m", "k"), ("b0", "n", "k"), ("b0", "m", "n"))
    for count in (0, 2):
        verify({"b0": count, "m": 17, "n": 32, "k": 16}, maps=maps, symbolic=("b0", "m"))
        verify({"b0": count, "m": 2, "n": 32, "k": 16}, maps=maps, symbolic=("b0", "k"))


def test_a_gpu_that_is_in_no_table():
    verify(RAGGED, gpu=OLD)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_rows_fit_into_the_shared_memory_of_a_gpu_that_is_in_no_table(dtype):
    kernel = simt_matmul_kernel(product({"m": 8, "n": 4096, "k": 4096}, types=(dtype,) * 3), OLD)
    sizes: list[int] = []

    def on_allocation(allocation):
        if allocation.buffer.scope() == "shared.dyn":
            sizes.append(int(allocation.buffer.shape[0]) * bytes_of(dtype))

    structural_walk(kernel.body, (tvm.tirx.AllocBuffer, on_allocation))
    assert 0 < sum(sizes) <= OLD.shared_bytes


def test_a_plan_fits_into_the_gpu():
    rng = fresh_rng()
    for _ in range(300):
        sizes = tuple(None if rng.uniform() < 0.1 else int(2 ** rng.uniform(0, 13)) for _ in range(3))
        dtype = str(rng.choice(["float32", "float64", "int32", "int64"]))
        plan = simt_plan(sizes, int(rng.integers(1, 20)), dtype, GPU)
        assert plan.shared_elements * bytes_of(dtype) <= GPU.shared_bytes // 2
        assert plan.threads <= 512
        assert plan.thread_rows * plan.thread_columns % (plan.slices * plan.cluster * plan.group) == 0
        assert plan.thread_rows % plan.group == plan.thread_columns % plan.group == 0


def test_all_clusters_of_a_router_of_experts_run_at_once():
    """Not all multiprocessors have room for clusters of 8: sixteen of them took two waves."""
    plan = simt_plan((2048, 128, 2048), 1, "float32", GPU)
    blocks = 2048 // plan.rows * (128 // plan.columns) * plan.cluster
    assert 120 <= blocks <= GPU.model.resident_blocks[plan.cluster]


def test_registers():
    """Sums and fragments stay in registers."""
    problem = product({"m": 4096, "n": 4096, "k": 4096})
    (report,) = reports_of(simt_matmul_kernel(problem, GPU), TARGET)
    assert report.spill_stores == 0
    assert report.registers * 256 <= GPU.registers


def test_unsupported_problems():
    problem = product({"m": 64, "n": 64, "k": 64})
    packed = product({"m": 64, "n": 64, "k": 64}, packed=True)
    with pytest.raises(EncodingError, match="found rhs stored as pack<.*expected a permutation"):
        simt_matmul_kernel(packed, GPU)
    rows = RowPhase(None, 0, ())  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="row program"):
        simt_matmul_kernel(dataclasses.replace(problem, rows=rows), GPU)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "sizes",
    [{"m": 130, "n": 257, "k": 100}, {"m": 512, "n": 512, "k": 512}, {"m": 1, "n": 2304, "k": 768}],
    ids=str,
)
def test_on_a_gpu(sizes):
    device = tvm.cuda(0)
    target = Target({"kind": "cuda", "arch": f"sm_{device.compute_version.replace('.', '')}"}, host="llvm")
    kernel = simt_matmul_kernel(product(sizes), gpu_target_of(target))
    module = tvm.compile(tvm.IRModule({"main": kernel}), target)
    rng, (m, n, k) = fresh_rng(), sizes.values()
    left, right = (rng.standard_normal(shape).astype("float32") for shape in ((m, k), (k, n)))
    out = tvm.runtime.tensor(np.full((m, n), np.nan, "float32"), device)
    module["main"](tvm.runtime.tensor(left, device), tvm.runtime.tensor(right, device), out)
    np.testing.assert_allclose(out.numpy(), left.astype("float64") @ right, atol=1e-5 * sizes["k"] ** 0.5, rtol=1e-5)


@pytest.mark.parametrize(("k", "early"), [(2048, [1]), (4096, [1]), (16384, None)])
def test_weights_that_registers_hold_are_loaded_before_the_wait(k, early):
    sizes = {"m": 1, "n": 12, "k": k}
    problem = product(sizes, maps=("mk", "nk", "mn"))
    kernel = simt_matmul_kernel(problem, GPU)
    assert kernel.attrs.get(READS_EARLY) == early
    if early:
        kernel = waiting_in_place(kernel)
        left, right = (re.escape(f"{name}[T.Ramp(") for name in ("buffer", "buffer_1"))
        assert re.search(rf"{right}(?s:.*)griddepcontrol\(\"wait(?s:.*)= {left}", kernel.script())
    check(problem, kernel, sizes)
