"""Packing kernels against `PackedLayout.pack` and `unpack`: every way through them, bit for bit."""

from __future__ import annotations

import re

import ml_dtypes  # noqa: F401 (numpy learns bfloat16)
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import runtime

from relax_hetero.encoding import PackedLayout
from relax_hetero.errors import EncodingError
from relax_hetero.tir.pack.pack import pack_kernel, relayout_kernel, unpack_kernel
from tir.kernel_runs import NAMES, assembly, cpu_named, kernel, poisoned, random_bits, same_bits, stored

pytestmark = pytest.mark.sampled(7)

RUNS = "pack<outer=[1, 0] inner=[1:32]>"
TRANSPOSED = "pack<outer=[0, 1] inner=[0:16]>"
GROUPED = "pack<outer=[1, 0] inner=[1:16, 0:4]>"
WORDS = "pack<outer=[0, 1] inner=[0:16, 1:4]>"
SWIZZLED = "pack<outer=[1, 0] inner=[1:64, 0:64] +swizzle>"  # of (k, n), 16 bits
SWIZZLED_ROWS = "pack<outer=[0, 1] inner=[0:8, 1:64] +swizzle>"  # of (n, k)
CASES = [
    ((37, 70), "float32", RUNS),
    ((64, 64), "float32", RUNS),
    ((37, 70), "float64", RUNS),
    ((37, 70), "bfloat16", "pack<outer=[1, 0] inner=[1:32, 0:2]>"),
    ((37, 70), "int8", GROUPED),
    ((37, 70), "int8", GROUPED[:-1] + " +compensation>"),
    ((37, 70), "float32", "pack<outer=[0, 1] inner=[0:8, 1:32]>"),
    ((37, 70), "float32", "pack<outer=[0, 1] inner=[0:3, 1:5]>"),
    ((70, 37), "float32", TRANSPOSED),
    ((64, 64), "float32", TRANSPOSED),
    ((70, 5), "float32", TRANSPOSED),
    ((70, 37), "int8", TRANSPOSED),
    ((70, 37), "float32", "pack<outer=[0, 1] inner=[0:8]>"),
    ((70, 76), "int8", WORDS),
    ((70, 77), "int8", WORDS),
    ((70, 76), "bfloat16", "pack<outer=[0, 1] inner=[0:16, 1:2]>"),
    ((2, 37, 3, 19), "float32", "pack<outer=[0, 2, 1, 3] inner=[1:16]>"),
    ((3, 37, 70), "float32", "pack<outer=[0, 2, 1] inner=[2:32]>"),
    ((300, 290), "float32", RUNS),
    ((300, 290), "float32", TRANSPOSED),
    ((0, 70), "float32", RUNS),
    ((37, 0), "float32", TRANSPOSED),
    ((1, 1), "float32", RUNS),
    ((130, 70), "bfloat16", SWIZZLED),
    ((70, 130), "float16", SWIZZLED_ROWS),
    ((64, 128), "float16", SWIZZLED_ROWS),
    ((37, 200), "int8", "pack<outer=[0, 1] inner=[0:16, 1:128] +swizzle>"),
    ((2, 37, 70), "float32", "pack<outer=[0, 2, 1] inner=[2:64, 1:32] +swizzle>"),
]


def _dims(shape, dynamic):
    return [f"s{i}" for i in range(len(shape))] if dynamic else list(shape)


def _pack_and_unpack(shape, dtype, text, target, dynamic, folder):
    layout, cpu = PackedLayout.parse(text), cpu_named(target)
    array = random_bits(shape, dtype, np.random.default_rng(sum(shape)))
    expected = layout.pack(array)
    pack = kernel(pack_kernel(_dims(shape, dynamic), dtype, layout, cpu), target, folder)
    out = poisoned(expected.shape, dtype)
    pack(runtime.tensor(array), out)
    assert same_bits(out.numpy(), expected)
    if layout.compensation or target == "c":
        return
    unpack = kernel(unpack_kernel(_dims(shape, dynamic), dtype, layout, cpu), target, folder)
    out = poisoned(shape, dtype)
    unpack(runtime.tensor(stored(array, layout)), out)
    assert same_bits(out.numpy(), array)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("shape", "dtype", "layout"), CASES)
def test_pack_and_unpack(shape, dtype, layout, dynamic, tmp_path):
    _pack_and_unpack(shape, dtype, layout, NAMES[0], dynamic, tmp_path)


@st.composite
def _layouts(draw):
    rank = draw(st.integers(1, 4))
    tiled = draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=2))
    tiles = [draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32])) for _ in tiled]
    layout = PackedLayout(tuple(draw(st.permutations(range(rank)))), tuple(tiled), tuple(tiles))
    shape = tuple(draw(st.integers(0, 40 if d in tiled or d == rank - 1 else 5)) for d in range(rank))
    return shape, layout


@settings(max_examples=20)
@given(case=_layouts(), dtype=st.sampled_from(["int8", "bfloat16", "float32", "int64"]), dynamic=st.booleans())
def test_any_layout(case, dtype, dynamic, tmp_path_factory):
    shape, layout = case
    _pack_and_unpack(shape, dtype, str(layout), NAMES[0], dynamic, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("target", NAMES[1:])
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [((37, 70), "float32", RUNS), ((70, 37), "float32", TRANSPOSED), ((37, 70), "int8", GROUPED)],
)
def test_on_other_machines(shape, dtype, layout, target, tmp_path):
    _pack_and_unpack(shape, dtype, layout, target, False, tmp_path)


@pytest.mark.parametrize("target", NAMES)
def test_unpack_on_every_machine(target, tmp_path):
    shape, layout = (37, 70), PackedLayout.parse("pack<outer=[0, 1] inner=[0:4, 1:4]>")
    array = random_bits(shape, "float32", np.random.default_rng(1))
    unpack = kernel(unpack_kernel(shape, "float32", layout, cpu_named(target)), target, tmp_path)
    out = poisoned(shape, "float32")
    unpack(runtime.tensor(stored(array, layout)), out)
    assert same_bits(out.numpy(), array)


@pytest.mark.parametrize("target", [NAMES[0], "c"])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (RUNS, "pack<outer=[1, 0] inner=[1:16]>"),
        ("pack<outer=[0, 1] inner=[0:4, 1:4]>", "pack<outer=[0, 1] inner=[0:8, 1:32]>"),
        (GROUPED, RUNS),
        ("identity<2>", RUNS),
        (RUNS, "pack<outer=[1, 0] inner=[1:64, 0:32] +swizzle>"),
        ("pack<outer=[1, 0] inner=[1:64, 0:32] +swizzle>", "pack<outer=[0, 1] inner=[0:8, 1:32] +swizzle>"),
    ],
)
def test_relayout_writes_zeros_for_what_was_padding(source, destination, target, tmp_path):
    shape, old, new = (37, 70), PackedLayout.parse(source), PackedLayout.parse(destination)
    array = random_bits(shape, "float32", np.random.default_rng(2))
    move = kernel(relayout_kernel(shape, "float32", old, new, cpu_named(target)), target, tmp_path)
    expected = new.pack(array)
    out = poisoned(expected.shape, "float32")
    move(runtime.tensor(stored(array, old)), out)
    assert same_bits(out.numpy(), expected)


@pytest.mark.parametrize("target", ["avx512", "c"])
def test_no_elements_with_a_symbolic_extent(target, tmp_path):
    layout, cpu = PackedLayout.parse("pack<outer=[0, 1] inner=[0:8, 1:4]>"), cpu_named(target)
    pack = kernel(pack_kernel(["s0", 0], "float32", layout, cpu), target, tmp_path)
    pack(runtime.tensor(np.zeros((9, 0), "float32")), runtime.tensor(np.zeros((2, 0, 8, 4), "float32")))


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("outer", [(0, 2, 3, 1), (3, 0, 1, 2), (0, 3, 4, 2, 1)])
def test_windows_are_transformed(outer, m, tmp_path):
    layout = PackedLayout(outer, outer[:1], (16,), winograd=m)
    shape = [0] * len(outer)
    for dim, extent in zip(outer, (35, 3, 3, *(2, 6)[3 - len(outer) :]), strict=True):
        shape[dim] = extent
    array = np.random.default_rng(m).standard_normal(shape).astype("float32")
    expected = layout.pack(array)
    out = poisoned(expected.shape, "float32")
    kernel(pack_kernel(shape, "float32", layout, cpu_named(NAMES[0])), NAMES[0], tmp_path)(runtime.tensor(array), out)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(EncodingError, match="expected one whose windows are not transformed"):
        unpack_kernel(shape, "float32", layout, cpu_named(NAMES[0]))


def test_relayout_of_symbolic_extents(tmp_path):
    """No buffer shows where the last tile ends: what there is moves, padding included."""
    shape, old, new = (37, 70), PackedLayout.parse(RUNS), PackedLayout.parse("pack<outer=[1, 0] inner=[1:16]>")
    array = random_bits(shape, "float32", np.random.default_rng(3))
    move = kernel(relayout_kernel(["s0", "s1"], "float32", old, new, cpu_named(NAMES[0])), NAMES[0], tmp_path)
    out = poisoned(new.packed_shape(shape), "float32")
    move(runtime.tensor(stored(array, old)), out)
    assert same_bits(new.unpack(out.numpy(), shape), array)


@pytest.mark.parametrize(
    ("layout", "dtype", "shuffle"),
    [(RUNS, "float32", False), (TRANSPOSED, "float32", True), (WORDS, "int8", True), (GROUPED, "int8", True)],
)
@pytest.mark.parametrize("target", [name for name in ("avx512", "avx2") if name in NAMES])
def test_moves_whole_vectors(layout, dtype, shuffle, target):
    """A pack loads and stores whole registers, and transposes by shuffles if at all."""
    text = assembly(pack_kernel((512, 512), dtype, PackedLayout.parse(layout), cpu_named(target)), target)
    register = {"avx512": "%zmm", "avx2": "%ymm"}[target]
    assert re.search(rf"vmov(up|ap|dq)\S*\s+{register}\d+, \S*\(", text)
    assert bool(re.search(r"v(perm|unpck|punpck|pshuf)\S*\s.*%[xyz]mm", text)) == shuffle
