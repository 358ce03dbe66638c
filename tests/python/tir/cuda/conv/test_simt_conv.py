"""Convolutions by plain threads: semantics by the interpreter of GPU kernels."""

from __future__ import annotations

import pytest
from tvm import tirx
from tvm.target import Target

from cuda_reports import compile_source, parse_reports, sources_of
from gpu_interpreter import run
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.conv.cuda_convolution import cuda_conv_kernel
from relax_hetero.tir.cuda.conv.cuda_depthwise_conv import ChannelPlan, depthwise_conv_kernel
from seeds import fresh_rng
from tir.cuda.conv.convolutions_on_gpus import GPU, TARGET, assert_near, conv_problem, operands_of
from tir.kernel_runs import poisoned

VOLTA = gpu_target_of(Target({"kind": "cuda", "arch": "sm_70"}))
RESIDUAL = "relu(add(add(x0, x1), x2))"
SAME = Window(3, 1, 1, 1, 1)


def check(problem: ConvProblem, batch: int = 1) -> None:
    """Run the kernel that is chosen and compare it with float64."""
    check_kernel(problem, cuda_conv_kernel(problem, VOLTA), batch)


def check_kernel(problem: ConvProblem, kernel: tirx.PrimFunc, batch: int = 1) -> None:
    """Storage of the result is poisoned before."""
    assert is_one_launch(kernel)
    stored, want = operands_of(problem, fresh_rng(), batch)
    shape = problem.result.layout.packed_shape(want.shape)
    got = poisoned(shape, problem.result.dtype).numpy()
    run(kernel, *stored, got)
    assert_near(problem, problem.result.layout.unpack(got, want.shape), want)


@pytest.mark.parametrize(
    "how",
    [
        {"channels": (8, 24), "extents": (5, 7), "windows": SAME, "batch": "s0"},
        {"channels": (3, 16), "extents": (15, 12), "windows": Window(7, 2, 1, 3, 3), "dtype": "float16"},
        {"channels": (6, 10), "extents": (9, 5), "windows": (Window(2, 1, 2, 1, 0), Window(3, 1, 1, 2, 2))},
        {"channels": (8, 12), "extents": (5, 4, 3), "windows": SAME},
        {"channels": (12, 30), "extents": (8, 8), "windows": SAME, "groups": 3},
        {"channels": (20, 8), "extents": (40,), "windows": Window(4, 2, 1, 0, 0), "dtype": "uint8"},
        {
            "channels": (8, 16),
            "extents": (6, 6),
            "windows": SAME,
            "epilogue": RESIDUAL,
            "shown": [("n", "float32"), ("bny", "float32")],
        },
    ],
    ids=["same", "first layer", "skips", "3d", "groups", "bytes", "residual"],
)
def test_windows(how):
    check(conv_problem(**how, gpu=VOLTA), 2)


@pytest.mark.parametrize(
    "how",
    [
        {"channels": (16, 16), "extents": (5, 7), "windows": SAME, "groups": 16, "batch": "s0"},
        {"channels": (24, 24), "extents": (9, 11), "windows": Window(5, 2, 1, 2, 2), "groups": 24, "dtype": "float16"},
        {"channels": (6, 6), "extents": (9,), "windows": Window(3, 1, 3, 0, 1), "groups": 6, "dtype": "bfloat16"},
        {"channels": (4, 12), "extents": (6, 5), "windows": SAME, "groups": 4},
        {"channels": (12, 24), "extents": (5, 6), "windows": SAME, "groups": 3, "dtype": "float16"},
        {"channels": (16, 16), "extents": (3, 4, 5), "windows": SAME, "groups": 16, "dtype": "int8"},
        {
            "channels": (8, 8),
            "extents": (6, 6),
            "windows": Window(17, 1, 1, 8, 8),
            "groups": 8,
            "epilogue": RESIDUAL,
            "shown": [("n", "float32"), ("bny", "float32")],
        },
    ],
    ids=["same", "stride", "1d", "multiplied", "small groups", "bytes 3d", "wide window"],
)
def test_small_groups(how):
    check(conv_problem(**how, gpu=VOLTA), 2)


def test_a_thread_makes_several_pixels():
    problem = conv_problem((8, 8), (6, 7), SAME, 1, 8, "float16", gpu=VOLTA)
    check_kernel(problem, depthwise_conv_kernel(problem, VOLTA, ChannelPlan(4, 8)))
    problem = conv_problem((8, 16), (6, 9), Window(3, 2, 1, 1, 1), 1, 2, gpu=VOLTA)
    check_kernel(problem, depthwise_conv_kernel(problem, VOLTA, ChannelPlan(2, 4)))


@pytest.mark.parametrize(
    ("channels", "window", "groups", "most_bytes"),
    [(384, 7, 384, 12_000), (256, 3, 32, 40_000)],
    ids=["depthwise", "eight channels a group"],
)
def test_code_is_short(channels, window, groups, most_bytes):
    """Few threads have a large window: each multiprocessor reads all code once, and waits for it."""
    same = Window(window, 1, 1, window // 2, window // 2)
    problem = conv_problem((channels, channels), (14, 14), same, 1, groups, "float16")
    (source,) = sources_of(cuda_conv_kernel(problem, GPU), TARGET)
    compiled = compile_source(source)
    (report,) = parse_reports(compiled.log)
    assert report.spill_stores == 0
    assert len(compiled.code) <= most_bytes
