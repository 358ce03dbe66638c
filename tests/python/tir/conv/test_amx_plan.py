"""How tile registers go over convolutions, as plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.target.amx_instructions import amx_instruction_for
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.conv.amx_conv import BLOCK_BYTES, Copy, RunSteps, TilePlan, even_steps, plan_tiles
from tir.convolutions_of import conv_problem

CPU = cpu_target_of(tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2}))
BF16, U8S8, S8S8 = ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"), ("int8", "int8", "int32")
SAME = Window(3, before=1, after=1)


def _plan(problem: ConvProblem, parts: int = 1) -> TilePlan | None:
    types = problem.data.dtype, problem.weight.dtype, problem.acc_dtype
    return plan_tiles(problem, amx_instruction_for(CPU, *types), parts)


def _square(channels: tuple[int, int], size: int, window: Window, types=BF16, **options) -> ConvProblem:
    return conv_problem(CPU, channels, (size, size), (window, window), dtype=types, **options)


def test_steps_of_equal_numbers_of_groups():
    assert [even_steps(groups) for groups in (1, 16, 20, 23, 33, 64)] == [1, 1, 2, 23, 3, 4]


@pytest.mark.parametrize(
    ("channels", "types", "steps"),
    [
        (64, BF16, RunSteps(3, 2, 16)),
        (48, BF16, RunSteps(3, 2, 12)),
        (40, U8S8, RunSteps(1, 2, 15)),  # 30 groups of three places are two steps, of one place one step each
        (46, BF16, RunSteps(3, 2, 12, shared=1)),  # 23 groups
        (40, S8S8, RunSteps(3, 1, 10)),  # compensation stands between the places of the weight
    ],
    ids=str,
)
def test_channels_of_a_copy_divide_among_steps(channels, types, steps):
    assert _plan(_square((channels, 64), 28, SAME, types)).run == steps


def test_an_image_of_three_channels_takes_a_row_of_the_window_a_step():
    layout = PackedLayout((0, 2, 3, 1), (1,), (2,))
    plan = _plan(_square((3, 64), 224, Window(7, 2, 1, 3, 3), data_layout=layout))
    assert plan.run == RunSteps(1, 1, 14)
    assert (plan.height, plan.row_tiles, plan.copy.pixel_stride, plan.copy.width) == (16, 7, 8, 229)


def test_data_without_padding_are_read_where_they_lie():
    assert _plan(_square((64, 64), 29, Window(3))).copy is None
    assert _plan(_square((64, 64), 29, Window(1, 2))).copy is None
    # Seven channels beyond the last whole group have to be told from the next pixel.
    assert _plan(_square((45, 64), 29, Window(3))).copy is not None


def test_a_copy_is_an_odd_number_of_lines_a_pixel_and_fits_the_cache():
    plan = _plan(_square((256, 256), 112, SAME))
    assert plan.copy == Copy(9 * 64, 114, 1)
    assert plan.copy.rows(plan.rows, SAME) * plan.copy.row_bytes <= BLOCK_BYTES
    assert plan.rows * plan.blocks >= 112 > plan.rows * (plan.blocks - 1)


def test_rows_between_places_of_a_dilated_window_are_not_copied():
    plan = _plan(_square((1024, 64), 33, Window(3, 1, 12, 12, 12)))
    assert plan.rows > 1
    plan = _plan(_square((2048, 64), 65, Window(3, 1, 36, 36, 36)))
    assert plan is None or plan.copy.rows(plan.rows, Window(3, 1, 36)) * plan.copy.row_bytes <= 1 << 24
    assert Copy(64, 10, 36).rows(1, Window(3, 1, 36)) == 3


def test_blocks_are_shared_evenly():
    assert _plan(_square((64, 64), 56, SAME), 4).blocks == 4
    assert _plan(_square((64, 64), 7, SAME), 16).blocks <= 7


def test_vectors_are_better():
    assert _plan(_square((64, 64), 1, SAME)) is None  # places
    assert _plan(conv_problem(CPU, (2, 64), (9, 20), (SAME, Window(1)), dtype=BF16)) is None  # bytes of a step
    depthwise = conv_problem(CPU, (64, 64), (9, 20), (SAME, SAME), 64, dtype=BF16)
    assert _plan(depthwise) is None
    grouped = conv_problem(CPU, (64, 48), (9, 20), (SAME, SAME), 2, dtype=BF16)
    assert _plan(grouped) is None  # 24 channels of a group are not a whole number of tiles
    data = replace(depthwise.data, layout=PackedLayout.identity(4))
    assert _plan(replace(_square((64, 64), 28, SAME), data=replace(data, shape=(1, 64, 28, 28)))) is None
