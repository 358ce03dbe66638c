"""Products by mma.sync: numbers by the interpreter of GPU kernels, registers and spills as ptxas says."""

from __future__ import annotations

import dataclasses

import pytest
from tvm.target import Target

from cuda_reports import reports_of
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.matmul.cuda_matmul import cuda_matmul_kernel
from relax_hetero.tir.cuda.matmul.mma_matmul import mma_matmul_kernel, unsupported_reason
from relax_hetero.tir.cuda.matmul.mma_tiling import MmaTiling, choose_mma_tiling
from seeds import fresh_rng
from tir.cuda.matmul.products_on_gpus import check, product

TARGETS = {arch: Target({"kind": "cuda", "arch": arch}) for arch in ("sm_61", "sm_80", "sm_86", "sm_89", "sm_90")}
HALF = ("float16", "float16", "float32")


def verify(sizes, arch="sm_80", tiling=None, **how):
    problem = product(sizes, **{"types": HALF, **how})
    check(problem, mma_matmul_kernel(problem, gpu_target_of(TARGETS[arch]), tiling), sizes, problem.tf32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("types", "result", "arch"),
    [
        (HALF, "float16", "sm_80"),
        (("bfloat16", "bfloat16", "float32"), "", "sm_86"),
        (("uint8", "int8", "int32"), "", "sm_80"),
        (("float32",) * 3, "", "sm_90"),
        (("float8_e4m3fn", "float8_e5m2", "float32"), "float16", "sm_89"),
        (HALF, "float64", "sm_80"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("right", ["packed", "kn", "nk"])
def test_element_types_and_storage(types, result, arch, right):
    how = {"packed": True} if right == "packed" else {"maps": ("mk", right, "mn")}
    verify({"m": 40, "n": 24, "k": 72}, arch, types=types, result=result, **how)


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"m": 66, "n": 41, "k": 71}, {}),
        ({"m": 66, "n": 41, "k": 71}, {"packed": True}),
        ({"m": 72, "n": 40, "k": 64}, {"maps": ("km", "kn", "mn")}),
        ({"b0": 2, "m": 20, "n": 24, "k": 64}, {"maps": (("b0", "m", "k"), ("b0", "k", "n"), ("b0", "m", "n"))}),
        ({"b0": 2, "m": 20, "n": 24, "k": 64}, {"maps": (("b0", "m", "k"), "kn", ("b0", "m", "n")), "packed": True}),
        (
            {"m": 20, "n": 24, "k": 40},
            {"init": ("n",), "epilogue": "relu(add(x0, x1))", "operands": [("mn", "float32")]},
        ),
    ],
    ids=["odd sizes", "odd sizes, packed", "transposed", "batches", "a weight for all", "epilogue"],
)
def test_sizes_and_batches(sizes, how):
    verify(sizes, **how)


def test_symbolic_extents():
    sizes, small = {"m": 33, "n": 24, "k": 72}, MmaTiling(64, 64, 32, 32, 2, 32)
    verify(sizes, symbolic="m", packed=True, tiling=small)
    verify(sizes, symbolic="mnk", tiling=small)
    verify({**sizes, "m": 0}, symbolic="m", tiling=small)
    verify({**sizes, "k": 0}, symbolic="k", tiling=small)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling",
    [
        MmaTiling(128, 256, 64, 64, 3, 64),
        MmaTiling(128, 128, 64, 64, 3, 64),
        MmaTiling(128, 64, 64, 32, 4, 32),
        MmaTiling(64, 128, 32, 64, 2, 64),
    ],
    ids=lambda tiling: f"{tiling.rows}x{tiling.columns}",
)
def test_tiles(tiling):
    verify({"m": 130, "n": 260, "k": 200}, tiling=tiling, packed=True, result="float16")


@pytest.mark.parametrize(
    ("arch", "types"),
    [("sm_80", HALF), pytest.param("sm_89", ("float8_e4m3fn", "float8_e4m3fn", "float32"), marks=pytest.mark.slow)],
)
def test_registers(arch, types):
    problem = product({"m": 4096, "n": 4096, "k": 4096}, types, "float16", packed=True)
    (report,) = reports_of(mma_matmul_kernel(problem, gpu_target_of(TARGETS[arch])), TARGETS[arch])
    assert report.spill_stores == 0
    assert report.registers <= 255


def test_a_tiling_fits_into_the_gpu():
    rng = fresh_rng()
    for _ in range(200):
        m, n, k = (int(2 ** rng.uniform(0, 13)) for _ in range(3))
        gpu = gpu_target_of(TARGETS[str(rng.choice(["sm_80", "sm_86", "sm_89", "sm_90"]))])
        result = str(rng.choice(["float16", "float32"]))
        problem = product({"m": m, "n": n, "k": k}, HALF, result)
        tiling = choose_mma_tiling(problem, gpu, (m, n, k), [int(rng.integers(1, 20))])
        staging = tiling.threads // 32 * 16 * (tiling.epilogue_columns * bytes_of(result) + 32)
        assert tiling.stages >= 2
        assert tiling.stages * (tiling.rows + tiling.columns) * 128 + staging <= gpu.shared_bytes, (m, n, k, tiling)


def test_unsupported_problems():
    sizes = {"m": 64, "n": 64, "k": 64}
    ampere = gpu_target_of(TARGETS["sm_80"])
    assert unsupported_reason(product(sizes, HALF), ampere) == ""
    assert "lacks tensor cores" in unsupported_reason(product(sizes, HALF), gpu_target_of(TARGETS["sm_61"]))
    exact = dataclasses.replace(product(sizes), tf32=False)
    assert "element types float32" in unsupported_reason(exact, ampere)
    float8 = product(sizes, ("float8_e4m3fn", "float8_e4m3fn", "float32"))
    with pytest.raises(EncodingError, match="float8_e4m3fn -> float32 are not multiplied by the tensor cores of sm_80"):
        mma_matmul_kernel(float8, ampere)
    check(float8, cuda_matmul_kernel(float8, ampere), sizes)  # plain threads
