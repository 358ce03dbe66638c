"""Layout kernels of GPUs, run by the interpreter, against `PackedLayout.pack` and `unpack`: bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.cuda_pack import relayout_kernel
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.kernel_runs import poisoned, random_bits, same_bits, stored

GPU = gpu_target_of(Target({"kind": "cuda", "arch": "sm_90a"}))
SWIZZLED = "pack<outer=[1, 0] inner=[1:64, 0:64] +swizzle>"  # of (k, n), 16 bits
SWIZZLED_ROWS = "pack<outer=[0, 1] inner=[0:64, 1:64] +swizzle>"  # of (n, k)
CASES = [
    ((100, 70), "float16", SWIZZLED),
    ((70, 130), "bfloat16", SWIZZLED_ROWS),
    ((64, 128), "float16", SWIZZLED_ROWS),
    ((17, 200), "int8", "pack<outer=[0, 1] inner=[0:8, 1:128] +swizzle>"),
    ((2, 37, 70), "float32", "pack<outer=[0, 2, 1] inner=[2:64, 1:32] +swizzle>"),
    ((37, 70), "float32", "pack<outer=[1, 0] inner=[]>"),
    ((3, 5, 40), "float64", "pack<outer=[1, 0, 2] inner=[]>"),
    ((37, 70), "float32", "pack<outer=[1, 0] inner=[1:32]>"),
    ((37, 70), "float32", "pack<outer=[0, 1] inner=[0:3, 1:5]>"),
    ((1, 1), "float32", "pack<outer=[0, 1] inner=[0:8]>"),
    ((2, 3, 9, 14), "float16", "pack<outer=[0, 2, 3, 1] inner=[1:4]>"),
    ((1, 3, 5, 7), "float32", "pack<outer=[0, 2, 3, 1] inner=[]>"),
    ((0, 70), "float32", "pack<outer=[1, 0] inner=[1:32]>"),
    ((0, 37, 70), "float32", "pack<outer=[0, 2, 1] inner=[2:64, 1:32] +swizzle>"),
]


def moved(shape, dtype, source, destination, array, padding=0xFF, dynamic=False):
    """Result of the relayout kernel for an array in the source layout."""
    dims = [f"s{i}" for i in range(len(shape))] if dynamic else list(shape)
    kernel = relayout_kernel(dims, dtype, source, destination, GPU)
    assert is_one_launch(kernel)
    out = poisoned(destination.packed_shape(shape), dtype).numpy().copy()
    run(kernel, stored(array, source, padding), out)
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("shape", "dtype", "layout"), CASES)
def test_pack_and_unpack(shape, dtype, layout, dynamic):
    plain, packed = PackedLayout.identity(len(shape)), PackedLayout.parse(layout)
    array = random_bits(shape, dtype, np.random.default_rng(sum(shape)))
    assert same_bits(moved(shape, dtype, plain, packed, array, dynamic=dynamic), packed.pack(array))
    assert same_bits(moved(shape, dtype, packed, plain, array, dynamic=dynamic), array)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("pack<outer=[1, 0] inner=[1:32]>", "pack<outer=[1, 0] inner=[1:64, 0:32] +swizzle>"),
        ("pack<outer=[1, 0] inner=[1:64, 0:32] +swizzle>", "pack<outer=[0, 1] inner=[0:8, 1:32] +swizzle>"),
        ("pack<outer=[0, 1] inner=[0:4, 1:4]>", "pack<outer=[0, 1] inner=[0:8, 1:32]>"),
    ],
)
def test_padding_becomes_zeros(source, destination):
    shape, old, new = (37, 70), PackedLayout.parse(source), PackedLayout.parse(destination)
    array = random_bits(shape, "float32", np.random.default_rng(2))
    assert same_bits(moved(shape, "float32", old, new, array), new.pack(array))
    actual = moved(shape, "float32", old, new, array, dynamic=True)
    assert same_bits(new.unpack(actual, shape), array)


def test_compensation_is_read_over_and_never_written():
    layout = PackedLayout.parse("pack<outer=[1, 0] inner=[1:16, 0:4] +compensation>")
    array = random_bits((37, 70), "int8", np.random.default_rng(4))
    out = poisoned(array.shape, "int8").numpy().copy()
    run(
        relayout_kernel((37, 70), "int8", layout, PackedLayout.identity(2), GPU),
        np.ascontiguousarray(layout.pack(array)),
        out,
    )
    assert same_bits(out, array)
    with pytest.raises(EncodingError, match="expected none with compensation"):
        relayout_kernel((64, 64), "int8", PackedLayout.identity(2), layout, GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_on_a_gpu(dynamic):
    for shape, dtype, layout in CASES:
        plain, packed = PackedLayout.identity(len(shape)), PackedLayout.parse(layout)
        array = np.random.default_rng(sum(shape)).integers(-50, 50, shape).astype(numpy_dtype(dtype))
        dims = [f"s{i}" for i in range(len(shape))] if dynamic else list(shape)
        stored_shape = packed.packed_shape(shape)
        actual = run_on_gpu(relayout_kernel(dims, dtype, plain, packed, GPU), [array], stored_shape, dtype)
        assert same_bits(actual, packed.pack(array))
        back = run_on_gpu(relayout_kernel(dims, dtype, packed, plain, GPU), [stored(array, packed)], shape, dtype)
        assert same_bits(back, array)
