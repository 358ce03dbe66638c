"""Direct convolutions: windows, strides, dilation, padding, ragged sizes, epilogues, machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marks import in_turns
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import Window
from relax_hetero.errors import EncodingError
from relax_hetero.tir.conv.conv_products import as_product
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.convolutions_of import assert_near, check, conv_problem, random_operands, reference, run, with_epilogue
from tir.kernel_runs import NAMES, VECTOR_NAMES, assembly, cpu_named, runs_here

pytestmark = pytest.mark.sampled(4)

SAME = Window(3, before=1, after=1)
CASES = {
    "same": ((20, 70), (11, 13), (SAME, SAME)),
    "one tile": ((5, 33), (7, 7), (SAME, SAME)),
    "stride": ((9, 16), (12, 29), (Window(3, 2, 1, 1, 1), Window(3, 2, 1, 0, 1))),
    "dilation": ((5, 24), (17, 33), (Window(3, 1, 4, 4, 4), Window(3, 1, 5, 5, 5))),
    "asymmetric": ((3, 40), (9, 31), (Window(2, 1, 1, 0, 1), Window(4, 3, 1, 3, 0))),
    "more padding than data": ((5, 40), (3, 2), (Window(7, 1, 1, 6, 2), Window(4, 1, 1, 3, 3))),
    "rows of padding": ((5, 8), (2, 5), (Window(3, 1, 1, 5, 5), Window(3, 2, 1, 4, 3))),
    "pointwise": ((37, 50), (6, 5), (Window(1), Window(1))),
    "pointwise, some skipped": ((37, 50), (7, 9), (Window(1, 2), Window(1, 3))),
    "flat windows": ((6, 18), (9, 10), (Window(1), Window(7, before=3, after=3))),
    "tall windows": ((6, 18), (9, 10), (Window(7, before=3, after=3), Window(1))),
    "sequence": ((7, 21), (40,), (Window(5, 2, 1, 2, 2),)),
    "volume": ((9, 20), (5, 6, 7), (SAME, Window(2, 2), SAME)),
}


@pytest.mark.parametrize(("case", "name"), in_turns(CASES, NAMES))
def test_windows(name: str, case: str, tmp_path: Path) -> None:
    check(conv_problem(name, *CASES[case]), name, tmp_path)


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_first_layer_reads_channels_first(name: str, size: int, tmp_path: Path) -> None:
    window = Window(size, 2, 1, size // 2, size // 2)
    problem = conv_problem(name, (3, 33), (21, 35), (window, window), batch=2, data_layout=PackedLayout.identity(4))
    check(problem, name, tmp_path)


@pytest.mark.parametrize("outs", [1, 16, 31, 48, 100])
@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_output_channels(name: str, outs: int, tmp_path: Path) -> None:
    check(conv_problem(name, (6, outs), (5, 9), (SAME, SAME)), name, tmp_path)


@pytest.mark.parametrize("case", [((6, 20), (8, 9), (SAME, SAME)), ((6, 20), (8, 9), (Window(1), Window(1)))])
@pytest.mark.parametrize("name", NAMES)
def test_float64(name: str, case: tuple, tmp_path: Path) -> None:
    check(conv_problem(name, *case, dtype="float64"), name, tmp_path)


def test_large_weights_and_rows_at_strides_of_a_cache_way(tmp_path: Path) -> None:
    problem = conv_problem("avx512", (1024, 40), (4, 13), (SAME, SAME))
    if not runs_here("avx512"):
        pytest.skip("needs AVX-512")
    assert "prefetch" in assembly(conv_kernel(problem, cpu_named("avx512")), "avx512")
    check(problem, "avx512", tmp_path)


@pytest.mark.parametrize("window", [SAME, Window(1)], ids=["direct", "product"])
@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_symbolic_batch(name: str, window: Window, tmp_path: Path) -> None:
    problem = conv_problem(name, (10, 40), (9, 15), (window, window), batch="s0")
    for batch in (0, 1, 3):
        check(problem, name, tmp_path, batch)


EPILOGUES = {
    "bias": ("add(x0, x1)", ["n"], lambda x, bias: x + bias),
    "bias, residual, relu": (
        "relu(add(add(x0, x1), x2))",
        ["n", "bny"],
        lambda x, bias, more: np.maximum(x + bias + more, 0),
    ),
    "gate": ("multiply(x0, x1)", ["bn"], lambda x, gate: x * gate),
    "place": ("add(x0, x1)", ["by"], lambda x, place: x + place),
    "silu": ("silu(add(x0, x1))", ["n"], lambda x, bias: (x + bias) / (1 + np.exp(-(x + bias)))),
}


@pytest.mark.parametrize("window", [SAME, Window(1)], ids=["direct", "product"])
@pytest.mark.parametrize(("epilogue", "name"), in_turns(EPILOGUES, VECTOR_NAMES))
def test_epilogues(name: str, epilogue: str, window: Window, tmp_path: Path) -> None:
    text, shown, function = EPILOGUES[epilogue]
    problem = with_epilogue(conv_problem(name, (9, 37), (6, 15), (window, window), batch=2), text, *shown)
    arrays = random_operands(problem, fresh_rng())
    want = function(reference(problem, *arrays[:2]), *(array.astype("float64") for array in arrays[2:]))
    assert_near(problem, run(problem, name, tmp_path, arrays), want)


def test_infinite_data_does_not_reach_neighbouring_elements(tmp_path: Path) -> None:
    """Padding is left out, not multiplied; NaN and infinity stay where windows see them."""
    problem = conv_problem(NAMES[0], (2, 5), (1, 30), (Window(1), SAME))
    data, weight = random_operands(problem, fresh_rng())
    data[0, 0, 0, 0], data[0, 1, 0, 29] = np.inf, np.nan
    got = run(problem, NAMES[0], tmp_path, [data, weight])
    assert not np.isfinite(got[..., [0, 1, 28, 29]]).any()
    assert np.isfinite(got[..., 2:28]).all()


side = st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ins=st.integers(1, 20),
    outs=st.integers(1, 70),
    sides=st.lists(side, min_size=1, max_size=3),
    after=st.integers(0, 3),
    batch=st.integers(1, 2),
    name=st.sampled_from(VECTOR_NAMES),
)
def test_any_convolution(
    ins: int, outs: int, sides: list[tuple], after: int, batch: int, name: str, tmp_path: Path
) -> None:
    windows = tuple(Window(size, stride, dilation, pad, after) for _, size, stride, dilation, pad in sides)
    extents = tuple(max(extent, window.dilated_extent) for (extent, *_), window in zip(sides, windows, strict=True))
    check(conv_problem(name, (ins, outs), extents, windows, batch=batch), name, tmp_path)


def test_a_window_of_one_element_is_a_product() -> None:
    problem = conv_problem("avx2", (6, 40), (5, 7), (Window(1), Window(1)))
    product = as_product(problem)
    assert product is not None
    for operand, stored in zip(problem.parameters, product.parameters, strict=True):
        assert operand.layout.packed_shape(operand.shape) == stored.layout.packed_shape(stored.shape)
    assert as_product(conv_problem("avx2", (6, 40), (5, 7), (Window(1, 2), Window(1)))) is None
    assert as_product(conv_problem("avx2", (6, 40), (5, 7), (Window(1), Window(1)), groups=2)) is None


def _stored(operand, layout: PackedLayout):
    return replace(operand, layout=layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, acc_dtype="int32"), "found element types float32 \\* float32 -> int32"),
        (lambda p: replace(p, windows=(SAME, Window(3))), "found 8 pixels along spatial dimension 1, expected 6"),
        (
            lambda p: replace(p, data=_stored(p.data, PackedLayout((0, 1, 2, 3), (1,), (16,)))),
            "found data stored as .*, expected no tiles",
        ),
        (
            lambda p: replace(p, weight=_stored(p.weight, PackedLayout.identity(4))),
            "found the weight stored as identity<4>, expected pack<outer=\\[0, 2, 3, 1\\] inner=\\[0:1\\]>",
        ),
    ],
)
def test_convolutions_without_a_kernel(change, message: str) -> None:
    problem = conv_problem("avx2", (4, 20), (8, 8), (SAME, SAME))
    with pytest.raises(EncodingError, match=message):
        conv_kernel(change(problem), cpu_named("avx2"))


@pytest.mark.skipif(not runs_here("avx512"), reason="needs AVX-512")
def test_accumulators_stay_in_registers() -> None:
    text = assembly(
        conv_kernel(conv_problem("avx512", (64, 64), (28, 28), (SAME, SAME)), cpu_named("avx512")), "avx512"
    )
    adds = [line for line in text.splitlines() if "vfmadd" in line and "zmm" in line]
    assert len(adds) >= 27 * 4
    assert not any("(%rsp)" in line for line in adds)
