"""Convolutions on tensor cores: semantics by the interpreter of GPU kernels, registers and spills as ptxas says."""

from __future__ import annotations

import pytest
from tvm.target import Target

from cuda_reports import reports_of
from gpu_interpreter import run
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.conv.conv_products import implicit_product
from relax_hetero.tir.cuda.conv.tensor_core_conv import tensor_core_conv_kernel
from relax_hetero.tir.cuda.matmul.wgmma_tiling import tiling_of
from seeds import fresh_rng
from tir.cuda.conv.convolutions_on_gpus import GPU, TARGET, assert_near, conv_problem, operands_of
from tir.kernel_runs import poisoned

BIAS_RELU = "cast(relu(add(x0, cast(x1, 'float32'))), 'float16')"
RESIDUAL = "relu(add(cast(add(x0, cast(x1, 'float32')), 'float16'), x2))"
ADA = gpu_target_of(Target({"kind": "cuda", "arch": "sm_89"}))
SAME = Window(3, 1, 1, 1, 1)


def check(problem: ConvProblem, tile: tuple[int, int] = (64, 64), batch: int = 1, **how: int) -> None:
    """Run the kernel and compare it with float64; storage of the result is poisoned before."""
    product = implicit_product(problem)
    rows = [batch if isinstance(size, str) else size for size in product.result.shape[:-1]]
    count = 1
    for size in rows:
        count *= size
    n, k = product.rhs.shape
    tiling = tiling_of(product, GPU, (count, n, k), [problem.groups], tile, **how)
    kernel = tensor_core_conv_kernel(problem, GPU, tiling)
    assert is_one_launch(kernel)
    stored, want = operands_of(problem, fresh_rng(), batch)
    shape = problem.result.layout.packed_shape(want.shape)
    got = poisoned(shape, problem.result.dtype).numpy()
    run(kernel, *stored, got)
    assert_near(problem, problem.result.layout.unpack(got, want.shape), want)


@pytest.mark.parametrize(
    "how",
    [
        {"channels": (64, 64), "extents": (5, 7), "windows": SAME},
        {"channels": (72, 40), "extents": (9, 8), "windows": Window(3, 2, 1, 0, 1), "batch": 2},
        {"channels": (10, 24), "extents": (9, 5), "windows": (Window(2, 1, 2, 1, 0), Window(3, 1, 1, 2, 2))},
        {"channels": (16, 70), "extents": (10, 9), "windows": Window(1, 2, 1, 0, 0)},
        {"channels": (32, 16), "extents": (20,), "windows": Window(5, 1, 2, 4, 4), "dtype": "bfloat16", "batch": 3},
        {"channels": (8, 8), "extents": (3, 4, 5), "windows": SAME},
        {"channels": (128, 128), "extents": (4, 4), "windows": SAME, "groups": 2},
    ],
    ids=["same", "dilation", "skips", "stride", "1d", "3d", "groups"],
)
def test_windows(how):
    check(conv_problem(**how))


@pytest.mark.parametrize(
    "how",
    [
        {"channels": (24, 72), "extents": (6, 7), "windows": SAME, "tile": (64, 128)},
        {"channels": (24, 72), "extents": (6, 7), "windows": SAME, "tile": (48, 128), "swap_ab": True},
        {"channels": (8, 40), "extents": (9,), "windows": Window(11, 2, 1, 5, 5), "batch": 3},
        {"channels": (16, 64), "extents": (5, 6), "windows": SAME, "dtype": "int8"},
        {"channels": (3, 40), "extents": (16, 13), "windows": Window(7, 2, 1, 3, 3), "batch": 2},
        {"channels": (1, 24), "extents": (8, 8), "windows": Window(4, 4, 1, 0, 0), "dtype": "bfloat16"},
        {"channels": (4, 64), "extents": (5, 4, 6), "windows": SAME, "tile": (64, 64)},
        {"channels": (3, 24), "extents": (9, 8), "windows": SAME, "dtype": "tfloat32"},
        {"channels": (3, 24), "extents": (11, 12), "windows": Window(7, 2, 1, 3, 3), "dtype": "uint8"},
        {"channels": (3, 32), "extents": (15, 13), "windows": Window(3, 2, 1, 1, 1), "batch": 2},
        {"channels": (4, 70), "extents": (9, 14), "windows": SAME},
        {"channels": (4, 130), "extents": (9, 7), "windows": SAME, "tile": (48, 128), "swap_ab": True},
    ],
    ids=[
        "chunks",
        "swapped chunks",
        "1d",
        "bytes",
        "image",
        "patches",
        "3d image",
        "tf32 image",
        "image of bytes",
        "3x3",
        "two columns",
        "swapped 3x3",
    ],
)
def test_few_channels(how):
    tile, options = how.get("tile", (64, 64)), {"swap_ab": how.get("swap_ab", False)}
    check(
        conv_problem(**{name: value for name, value in how.items() if name not in ("tile", "swap_ab")}), tile, **options
    )


@pytest.mark.parametrize(
    ("how", "tile", "options"),
    [
        ({"epilogue": BIAS_RELU, "shown": [("n", "float16")], "batch": "s0"}, (64, 64), {}),
        ({"epilogue": RESIDUAL, "shown": [("n", "float16"), ("bny", "float16")]}, (128, 64), {}),
        ({"epilogue": "cast(multiply(x0, x1), 'float16')", "shown": [("bn", "float32")]}, (64, 64), {}),
        ({"channels": (80, 48)}, (64, 64), {"cluster_split_k": 4}),
        ({"epilogue": BIAS_RELU, "shown": [("n", "float16")]}, (32, 64), {"swap_ab": True}),
        ({"epilogue": RESIDUAL, "shown": [("n", "float16"), ("bny", "float16")]}, (32, 64), {"swap_ab": True}),
        ({"dtype": "int8"}, (64, 64), {}),
        ({"dtype": "tfloat32"}, (64, 64), {}),
        (
            {
                "dtype": "uint8",
                "epilogue": "cast(clip(round(multiply(cast(x0, 'float32'), x1)), -128.0, 127.0), 'int8')",
                "shown": [("n", "float32")],
                "result": "int8",
            },
            (64, 64),
            {},
        ),
    ],
    ids=[
        "bias relu",
        "residual",
        "by image",
        "parts of k",
        "swap_ab",
        "residual, swapped",
        "bytes",
        "tf32",
        "requantized",
    ],
)
def test_epilogues_and_types(how, tile, options):
    how = {"channels": (32, 40), "extents": (6, 5), "windows": SAME, "batch": 2, **how}
    check(conv_problem(**how), tile, 2, **options)


@pytest.mark.parametrize(
    "how",
    [
        {"channels": (64, 72), "extents": (6, 7), "windows": SAME, "batch": 2},
        {"channels": (36, 40), "extents": (9, 8), "windows": Window(3, 2, 1, 0, 1), "dtype": "int8"},
        {"channels": (64, 128), "extents": (5, 5), "windows": SAME, "groups": 2, "dtype": "tfloat32"},
        {
            "channels": (32, 40),
            "extents": (5, 6),
            "windows": SAME,
            "epilogue": RESIDUAL,
            "shown": [("n", "float16"), ("bny", "float16")],
        },
    ],
    ids=["same", "bytes", "groups", "residual"],
)
def test_without_wgmma(how):
    """Uses ``mma.sync``."""
    problem = conv_problem(**how, gpu=ADA)
    stored, want = operands_of(problem, fresh_rng(), 1)
    got = poisoned(problem.result.layout.packed_shape(want.shape), problem.result.dtype).numpy()
    kernel = tensor_core_conv_kernel(problem, ADA)
    assert is_one_launch(kernel)
    run(kernel, *stored, got)
    assert_near(problem, problem.result.layout.unpack(got, want.shape), want)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        ((64, 128), {}),
        pytest.param((128, 256), {}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"cluster_split_k": 2}, marks=pytest.mark.slow),
        pytest.param((64, 128), {"blocks_per_sm": 2, "staged_bytes": 128}, marks=pytest.mark.slow),
    ],
)
def test_registers(tile, options):
    """Sums and what producers know of their lines stay in registers, and wgmma is not serialized."""
    how = {"epilogue": "relu(add(cast(x0, 'float16'), x1))", "shown": [("n", "float16")]}
    problem = conv_problem((256, 256), (14, 14), SAME, 16, **how)
    product = implicit_product(problem)
    tiling = tiling_of(product, GPU, (16 * 14 * 14, 256, 9 * 256), [], tile, **options)
    (report,) = reports_of(tensor_core_conv_kernel(problem, GPU, tiling), TARGET)
    assert report.serialized == "" and not report.touched
    assert report.spill_stores <= 16
