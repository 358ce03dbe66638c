"""Convolutions of bytes and halves: every product of the table, signs, padding, channels in any number, groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marks import in_turns
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, Window
from relax_hetero.errors import EncodingError
from relax_hetero.target.dot_instructions import dot_instruction_for
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.convolutions_of import assert_near, check, conv_problem, random_operands, reference, run, with_epilogue
from tir.kernel_runs import HOST_ARCH, LOW_PRECISION_TARGETS, NAMES, cpu_named, runs_here

pytestmark = pytest.mark.sampled(4)

TYPES = {
    "u8s8": ("uint8", "int8", "int32"),
    "s8s8": ("int8", "int8", "int32"),
    "bf16": ("bfloat16", "bfloat16", "float32"),
    "f16": ("float16", "float16", "float32"),
}
if HOST_ARCH == "x86_64":  # AArch64 has no products of int16 by bytes
    TYPES["s16s8"] = ("int16", "int8", "int32")
MACHINES = [*filter(runs_here, LOW_PRECISION_TARGETS), *NAMES]
SAME = Window(3, before=1, after=1)
CASES = {
    "same": ((20, 70), (5, 17), (SAME, SAME), 1),
    "channels left over": ((23, 33), (5, 15), (SAME, Window(3, 2, 2, 2, 1)), 1),
    "more padding than data": ((8, 40), (3, 2), (Window(7, 1, 1, 6, 2), Window(4, 1, 1, 3, 3)), 1),
    "pointwise": ((30, 50), (3, 5), (Window(1), Window(1)), 1),
    "pointwise, some skipped": ((32, 50), (7, 9), (Window(1, 2), Window(1, 3)), 1),
    "sequence": ((7, 21), (40,), (Window(5, 2, 1, 2, 2),), 1),
    "depthwise": ((37, 37), (5, 19), (SAME, SAME), 37),
    "groups of 4": ((12, 12), (5, 11), (SAME, SAME), 3),
    "groups of 20": ((12, 40), (5, 11), (SAME, SAME), 2),
    "groups of 32": ((70, 64), (5, 11), (SAME, SAME), 2),
}


# Cases in which machines differ: left-over channels, pointwise products, groups that straddle vectors.
ELSEWHERE = ("channels left over", "pointwise", "depthwise", "groups of 20")


@pytest.mark.parametrize(
    ("where", "kind"),
    in_turns([(name, case) for name in MACHINES for case in (CASES if name == MACHINES[0] else ELSEWHERE)], TYPES),
)
def test_windows_and_groups(where: tuple[str, str], kind: str, tmp_path: Path) -> None:
    (name, case), types = where, TYPES[kind]
    if name == "c" and types[0] == "float16":
        pytest.skip("TVM writes no C of float16")
    channels, extents, windows, groups = CASES[case]
    check(conv_problem(name, channels, extents, windows, groups, dtype=types), name, tmp_path)


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("ins", [1, 3, 4])
@pytest.mark.parametrize("name", MACHINES[:1])
def test_an_image_of_few_channels_is_padded_to_whole_steps(
    name: str, ins: int, types: tuple[str, str, str], tmp_path: Path
) -> None:
    window, k0 = Window(7, 2, 1, 3, 3), dot_instruction_for(cpu_named(name), *types).k0
    layout = PackedLayout((0, 2, 3, 1), (1,), (k0,)) if k0 > 1 else PackedLayout.identity(4)
    check(conv_problem(name, (ins, 33), (21, 35), (window, window), 1, 2, types, layout), name, tmp_path)


@pytest.mark.parametrize("types", ["u8s8", "s8s8"])
@pytest.mark.parametrize("name", MACHINES)
def test_integers_at_the_ends_of_their_range(name: str, types: str, tmp_path: Path) -> None:
    """Sums that saturate in 16 bits."""
    problem = conv_problem(name, (24, 33), (4, 6), (SAME, SAME), dtype=TYPES[types])
    data, weight = (np.zeros(operand.shape, operand.dtype) for operand in problem.parameters[:2])
    data[:], weight[:] = np.iinfo(data.dtype).min or 255, -128
    assert_near(problem, run(problem, name, tmp_path, [data, weight]), reference(problem, data, weight))


def test_requantized_in_the_epilogue(tmp_path: Path) -> None:
    """Bias, scale, residual in bytes, bytes out; 37 channels have a masked end. The scale is exact, fused or not."""
    for groups, window in ((1, SAME), (1, Window(1)), (37, SAME)):
        problem = conv_problem(MACHINES[0], (37, 37), (5, 17), (window, window), groups, dtype=TYPES["u8s8"])
        problem = with_epilogue(problem, 'multiply(cast(add(x0, x1), "float32"), 0.00390625)', "n")
        text = f'cast(clip(round(add({problem.epilogue.expression}, cast(x2, "float32"))), 0.0, 255.0), "uint8")'
        residual = replace(problem.result, dtype="uint8")
        epilogue = Epilogue(Expression.parse(text), (*problem.epilogue.operands, residual))
        problem = replace(problem, epilogue=epilogue, result=residual)
        arrays = random_operands(problem, fresh_rng())
        sums = (reference(problem, *arrays[:2]) + arrays[2]) * 0.00390625
        want = np.clip(np.round(sums + arrays[3]), 0, 255)
        np.testing.assert_array_equal(run(problem, MACHINES[0], tmp_path, arrays), want)


def test_a_symbolic_batch(tmp_path: Path) -> None:
    for window in (SAME, Window(1)):
        problem = conv_problem(MACHINES[0], (10, 40), (9, 15), (window, window), batch="s0", dtype=TYPES["s8s8"])
        for batch in (0, 1, 3):
            check(problem, MACHINES[0], tmp_path, batch)


def test_nan_beyond_a_group_of_halves_is_not_read(tmp_path: Path) -> None:
    """Seven channels of a group are not a whole number of k-steps: the channels after them are another group's."""
    problem = conv_problem(MACHINES[0], (14, 64), (4, 6), (SAME, SAME), 2, dtype=TYPES["bf16"])
    data, weight = random_operands(problem, fresh_rng())
    data[:, 7:] = np.nan
    got = run(problem, MACHINES[0], tmp_path, [data, weight])
    assert np.isfinite(got[:, :32]).all() and np.isnan(got[:, 32:]).all()


side = st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(0, 3))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.sampled_from([1, 1, 2, 5, 40]),
    ins=st.integers(1, 9),
    outs=st.integers(1, 35),
    sides=st.lists(side, min_size=1, max_size=2),
    types=st.sampled_from([*TYPES.values(), ("uint8", "uint8", "int32"), ("int8", "uint8", "int32")]),
    name=st.sampled_from([name for name in MACHINES if name != "c"]),
)
def test_any_convolution(
    groups: int, ins: int, outs: int, sides: list[tuple], types: tuple[str, str, str], name: str, tmp_path: Path
) -> None:
    windows = tuple(Window(size, stride, dilation, pad, 1) for _, size, stride, dilation, pad in sides)
    extents = tuple(max(extent, window.dilated_extent) for (extent, *_), window in zip(sides, windows, strict=True))
    outs = min(outs, 70 // groups)
    problem = conv_problem(name, (groups * ins, groups * outs), extents, windows, groups, dtype=types)
    check(problem, name, tmp_path)


def test_layouts_that_the_kernel_does_not_read() -> None:
    problem = conv_problem("vnni", (8, 32), (8, 8), (SAME, SAME), dtype=TYPES["s8s8"])
    plain = replace(problem.weight, layout=replace(problem.weight.layout, compensation=False))
    with pytest.raises(EncodingError, match="found the weight stored as .*1:4\\]>, expected .*1:4\\] \\+compensation>"):
        conv_kernel(replace(problem, weight=plain), cpu_named("vnni"))
    tiled = replace(problem.data, layout=PackedLayout((0, 2, 3, 1), (1,), (8,)))
    with pytest.raises(EncodingError, match="found data stored as .*expected no tiles but those of .*1:4"):
        conv_kernel(replace(problem, data=tiled), cpu_named("vnni"))
