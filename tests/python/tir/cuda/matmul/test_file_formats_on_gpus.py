"""Products with weights of a file's formats on GPUs, by the interpreter of their kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm.target import Target

from encoding.random_blocks import random_rows
from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows
from relax_hetero.encoding.block_panels import BlockSource, Panels
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.encoding.problem import Operand, QuantizedMatmulProblem
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
from relax_hetero.tir.cuda.matmul.ring_body import RingPlan
from relax_hetero.tir.cuda.matmul.staged_body import StagedPlan
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))
FORMATS = [form.name for form in FILE_FORMATS.values() if not form.is_plain]
plain = PackedLayout.identity


def case(name, m, n, depth, dtype):
    """A problem, the kernel's arguments, and the result in float64."""
    rng, form = fresh_rng(), FILE_FORMATS[name]
    raw = random_rows(name, n, depth)
    layout = Fragments()
    assert layout.fits(form, depth)
    packed = layout.pack(BlockSource((raw,), form, depth))
    assert [list(array.shape) for array in packed] == layout.shapes(n, form, depth)
    x = rng.standard_normal((m, depth)).astype(numpy_dtype(dtype))
    problem = QuantizedMatmulProblem(
        Operand((m, depth), dtype, ("m", "k"), plain(2)),
        tuple(Operand(array.shape, str(array.dtype), Fragments.index_map, plain(4)) for array in packed),
        Operand((m, n), "float32", ("m", "n"), plain(2)),
        form.block,
        None,
        form.bits,
        form,
    )
    want = x.astype("float64") @ dequantize_rows(raw, form, depth).astype("float64").T
    return problem, [x, *packed], want


def check(actual, want, x):
    # Quants of formats with minimums are not centred: the terms that cancel are larger than the result.
    assert np.abs(actual - want).max() <= 4e-6 * np.abs(want).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "dtype"), [(1, 19, "float16"), (3, 16, "float32"), (9, 35, "bfloat16")])
def test_formats(name, m, n, dtype):
    problem, arguments, want = case(name, m, n, 512, dtype)
    result = np.full((m, n), np.nan, "float32")
    run(quantized_matmul_kernel(problem, GPU), *arguments, result)
    check(result, want, arguments[0])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "plan"), [(2, RingPlan(1, 1, 4, 1, run=2, stages=2)), (17, StagedPlan(2, 3, 4, 1, stages=2))]
)
def test_weights_through_shared_memory(name, m, plan):
    problem, arguments, want = case(name, m, 40, 1024, "bfloat16")
    result = np.full((m, 40), np.nan, "float32")
    run(quantized_matmul_kernel(problem, dataclasses.replace(GPU, multiprocessors=1), plan), *arguments, result)
    check(result, want, arguments[0])


DEPTHS = [
    896, 1024, 1152, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 4608, 4864, 5120, 5376, 5632, 6144, 6912, 8192, 8960,
    9216, 9728, 10240, 11008, 12288, 13824, 14336, 15360, 17408, 18944, 21504, 22016, 25600, 27648, 28672, 29568, 36864,
]  # fmt: skip
"""Weights of a row in llama, qwen and gemma of 0.5 to 70 billion parameters: widths of layers and of feed-forward."""


def check_index_bounds(name, depth, m, dtype):
    """Run a product of few columns: the interpreter checks every index, and depths decide what warps ask for."""
    problem, arguments, want = case(name, m, 16, depth, dtype)
    result = np.full((m, 16), np.nan, "float32")
    run(quantized_matmul_kernel(problem, GPU), *arguments, result)
    check(result, want, arguments[0])


@pytest.mark.parametrize(
    ("name", "depth", "m", "dtype"), [("q4_k", 5632, 2, "float16"), ("q8_0", 2816, 40, "bfloat16")]
)
def test_more_chunks_than_are_left(name, depth, m, dtype):
    """Warps have equally many chunks of k, which are not whole rounds."""
    check_index_bounds(name, depth, m, dtype)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 17, 32, 64])
@pytest.mark.parametrize(
    ("name", "depth"),
    [(n, depth) for n in ("q8_0", "q4_0", "q4_k") for depth in DEPTHS if n != "q4_k" or depth % 256 == 0],
)  # rows of a file are whole superblocks
def test_real_depths(name, depth, m, dtype):
    check_index_bounds(name, depth, m, dtype)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "dtype"), [(1, "float16"), (33, "bfloat16")])
def test_on_a_gpu(name, m, dtype):
    problem, arguments, want = case(name, m, 300, 2048, dtype)
    actual = run_on_gpu(quantized_matmul_kernel(problem, GPU), arguments, (m, 300), "float32")
    check(actual, want, arguments[0])


# Scales of 6 bits take bytes, which is 1 to 4 % of the weights. Magnitudes of codebooks take 2 or 3 bits, and a sign.
STORED_BITS = {
    "q4_k": 4.625, "q5_k": 5.625, "q3_k": 3.5625, "iq4_xs": 4.3125, "iq3_s": 4.3125, "iq3_xxs": 4.3125, "iq2_s": 3.5625,
    "iq2_xs": 3.5625, "iq2_xxs": 3.3125, "iq1_m": 3.5625, "iq1_s": 2.625, "tq1_0": 2.0625,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_weights_take_as_many_bytes_as_in_the_file(name):
    form, (_, (_, *packed), _) = FILE_FORMATS[name], case(name, 1, 16, 512, "float16")
    size = sum(array.nbytes for array in packed)
    assert size == Fragments().packed_bytes(16, form, 512)
    assert size == (STORED_BITS[name] * 1024 if name in STORED_BITS else 16 * form.row_bytes(512))
    columns = Panels(16).pack(BlockSource((random_rows(name, 16, 512),), form, 512))
    assert columns[0].nbytes == size
