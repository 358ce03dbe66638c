"""Random convolutions for GPUs of all kinds, by the kernel that each of them chooses."""

from __future__ import annotations

import random

import pytest
from tvm.target import Target

import relax_hetero as rh
from gpu_interpreter import run
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.target.gpu_target import GpuTarget, gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.conv.cuda_convolution import cuda_conv_kernel
from seeds import fresh_rng
from tir.cuda.conv.convolutions_on_gpus import assert_near, conv_problem, operands_of
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.kernel_runs import poisoned

ARCHS = ("sm_90a", "sm_90a", "sm_90a", "sm_80", "sm_70")
TYPES = ("float16", "float16", "bfloat16", "float32", "tfloat32", "int8", "uint8")


def drawn(draw: random.Random, gpu: GpuTarget) -> tuple[ConvProblem, int]:
    """A problem, and its batch."""
    spatial = draw.choice([1, 2, 2, 2, 3])
    groups = draw.choice([1, 1, 1, 2, 3, 8])
    each = draw.choice([1, 1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 32, 40, 64, 70])
    outputs = draw.choice([1, 1, 2, 4, 5, 8, 24, 33, 64, 96])
    if groups > 1 and draw.random() < 0.4:
        groups, each, outputs = draw.choice([6, 8, 24, 32]), 1, draw.choice([1, 1, 2])
    windows, extents = [], []
    for _ in range(spatial):
        size, dilation = draw.choice([1, 2, 3, 3, 3, 5, 7]), draw.choice([1, 1, 1, 2])
        before, after = draw.randint(0, 3), draw.randint(0, 3)
        reach = (size - 1) * dilation + 1
        windows.append(Window(size, draw.choice([1, 1, 2, 3]), dilation, before, after))
        extents.append(max(1, reach - before - after) + draw.randint(0, 9 // spatial))
    dtype, batch = draw.choice(TYPES), draw.randint(1, 3)
    how = {}
    if "int" not in dtype:
        own = "float32" if dtype == "tfloat32" else dtype
        texts = {
            "": [],
            "cast(relu(add(x0, cast(x1, 'float32'))), 'OWN')": [("n", own)],
            "relu(add(cast(add(x0, cast(x1, 'float32')), 'OWN'), x2))": [("n", own), ("bny", own)],
            "cast(multiply(silu(x0), x1), 'OWN')": [("bn", "float32")],
            "cast(add(x0, x1), 'OWN')": [("by", "float32")],
        }
        text = draw.choice(list(texts))
        if own == "float32":
            how = {"epilogue": text.replace("cast(x1, 'float32')", "x1").replace("'OWN'", "'float32'")}
            how["epilogue"] = how["epilogue"].replace("cast(add(x0, x1), 'float32')", "add(x0, x1)")
            if "cast" in how["epilogue"]:
                how["epilogue"] = ""
        else:
            how = {"epilogue": text.replace("OWN", own)}
        how["shown"] = texts[text] if how["epilogue"] else []
    problem = conv_problem(
        (groups * each, groups * outputs),
        extents,
        windows,
        draw.choice([batch, batch, "s0"]),
        groups,
        dtype,
        gpu=gpu,
        **how,
    )
    return problem, batch


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 150))])
def test_random_convolutions(seed: int) -> None:
    draw = random.Random(seed)
    gpu = gpu_target_of(Target({"kind": "cuda", "arch": draw.choice(ARCHS)}))
    problem, batch = drawn(draw, gpu)
    kernel = cuda_conv_kernel(problem, gpu)
    assert is_one_launch(kernel)
    stored, want = operands_of(problem, fresh_rng(), batch)
    got = poisoned(problem.result.layout.packed_shape(want.shape), problem.result.dtype).numpy()
    run(kernel, *stored, got)
    assert_near(problem, problem.result.layout.unpack(got, want.shape), want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(40))
def test_on_a_gpu(seed: int) -> None:
    gpu = gpu_target_of(rh.native("cuda"))
    problem, batch = drawn(random.Random(1000 + seed), gpu)
    stored, want = operands_of(problem, fresh_rng(), batch)
    shape = problem.result.layout.packed_shape(want.shape)
    got = run_on_gpu(cuda_conv_kernel(problem, gpu), stored, shape, problem.result.dtype)
    assert_near(problem, problem.result.layout.unpack(got, want.shape), want)
