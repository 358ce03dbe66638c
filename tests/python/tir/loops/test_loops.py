"""The steps of scheduling a kernel for a CPU: stages, nests, boxes and flat loops."""

from __future__ import annotations

import pytest
from tvm import relax, tirx
from tvm.relax import op

from relax_hetero.tir.loops.boxes import analyzer_of, cut, split_axes
from relax_hetero.tir.loops.flat import flatten
from relax_hetero.tir.loops.nests import Nest, form_nests
from relax_hetero.tir.loops.stages import Axis, NotStages, Stage, read_stages, sources
from relax_hetero.transform.dispatch.schedule_cpu import schedule_cpu
from tir.kernel_runs import VECTOR_NAMES
from transform.scheduled_ops import Build, Operands, f32, formed, i32, kernels, pool


def stages_of(build: Build, operands: Operands) -> tuple[tirx.PrimFunc, list[Stage]]:
    (func,) = kernels(formed(build, operands, VECTOR_NAMES[0]))
    return func, read_stages(func)


def nests_of(build: Build, operands: Operands) -> list[Nest]:
    func, stages = stages_of(build, operands)
    return form_nests(stages, list(func.params))


def counts(nest: Nest) -> list[list[int]]:
    """Trip counts of each box's spatial loops."""
    views: dict[tirx.Buffer, tirx.Buffer] = {}

    def view(buffer: tirx.Buffer) -> tirx.Buffer:
        size = 1
        for extent in buffer.shape:
            size *= int(extent)
        return views.setdefault(buffer, tirx.decl_buffer((size,), buffer.dtype))

    return [[loop.count for loop in flatten(box, None, view).spatial] for box in cut(nest)]


def test_stages_of_a_pool():
    _, (padded, largest) = stages_of(pool("max", "NHWC", 3, 2, 1), [f32(1, 9, 9, 20)])
    assert not padded.initial and not padded.reduced
    assert [axis.extent for axis in largest.spatial] == [1, 5, 5, 20]
    assert [axis.extent for axis in largest.reduced] == [3, 3]
    assert len(largest.initial) == 1


def test_positions_of_axes_of_one_element_keep_their_type():
    """Analyzers put the begin of such an axis in its variable's place; int32 in int64 comparisons corrupted memory."""
    var, limit = tirx.Var("i", "int64"), tirx.Var("limit", "int64")
    one = tirx.IntImm("int64", 1)
    analyzer = analyzer_of(Nest((Axis(var, one),), (var,)), [(0, one)])
    chosen = analyzer.simplify(tirx.Select(var < limit, limit - var - 1, var))
    assert chosen.condition.a.ty.dtype == chosen.false_value.ty.dtype == "int64"


def test_scheduled_kernels_are_not_stages():
    (func,) = kernels(schedule_cpu(formed(op.exp, [f32(20)], VECTOR_NAMES[0])))
    with pytest.raises(NotStages, match="a loop contains more than one block"):
        read_stages(func)


def test_padding_is_read_where_it_is_used():
    """The padded copy is gone; the average is taken where the sum is."""
    (nest,) = nests_of(pool("avg", "NHWC", 3, 1, 1), [f32(1, 9, 9, 20)])
    assert len(nest.sums) == 1 and len(nest.steps) == 1
    assert nest.stored == [nest.steps[0][0]]


def test_softmax_keeps_no_tensor_of_its_own_but_two_rows():
    """exp is computed once, in the storage of the result."""
    nests = nests_of(lambda x: op.nn.softmax(x, 1), [f32(2, 9, 37)])
    buffers = {buffer for nest in nests for buffer in nest.stored}
    assert sorted(len(buffer.shape) for buffer in buffers) == [2, 2, 3]
    assert nests[-1].in_place


def test_expensive_broadcast_values_are_computed_once():
    def build(x: relax.Var, v: relax.Var) -> relax.Expr:
        return op.multiply(x, op.exp(op.exp(v)))

    small, large = nests_of(build, [f32(90, 40), f32(40)])
    assert [axis.extent for axis in small.axes] == [40]
    assert small.stored[0] in sources(large.expressions()[0])


def test_a_chain_of_values_that_a_sum_reads_is_inlined():
    """The weighted rows are read by the masked ones only, which are inlined into the sum."""

    def build(x: relax.Var, shares: relax.Var, ids: relax.Var) -> relax.Expr:
        mask = op.expand_dims(op.greater_equal(ids, relax.const(0, "int32")), 2)
        return op.sum(op.where(mask, op.multiply(x, shares), relax.const(0.0)), [1])

    (nest,) = nests_of(build, [f32(5, 3, 40), f32(5, 3, 1), i32(5, 3)])
    assert len(nest.sums) == 1 and not nest.steps


def test_a_chain_of_values_that_are_read_twice_is_not_inlined():
    """Each of them would double what the sum computes."""

    def build(x: relax.Var) -> relax.Expr:
        for _ in range(8):
            x = op.multiply(x, op.add(x, relax.const(1.0)))
        return op.sum(x, [1])

    values, total = nests_of(build, [f32(5, 300)])
    assert len(values.steps) == 14 and len(total.sums) == 1  # two are inlined into the sum


def test_loops_that_advance_alike_become_one():
    (nest,) = nests_of(lambda x, y: op.add(x, y), [f32(3, 5, 7), f32(3, 5, 7)])
    assert counts(nest) == [[105]]
    (nest,) = nests_of(lambda x, y: op.add(x, y), [f32(3, 5, 7), f32(7)])
    assert counts(nest) == [[15, 7]]
    (nest,) = nests_of(lambda x, y: op.add(x, y), [f32(3, 5, 7), f32(5, 1)])
    assert counts(nest) == [[3, 5, 7]]


def test_boxes_of_a_concat_and_of_padding():
    (nest,) = nests_of(lambda x, y: op.concat([x, y], 1), [f32(4, 6), f32(4, 10)])
    assert counts(nest) == [[4, 6], [4, 10]]
    (nest,) = nests_of(lambda x: op.nn.pad(x, [0, 0, 1, 1, 1, 1, 0, 0]), [f32(1, 8, 8, 20)])
    assert counts(nest) == [[200], [8, 20], [8, 160], [8, 20], [200]]


def test_decomposed_positions_split_loops():
    def build(x: relax.Var) -> relax.Expr:
        return op.reshape(op.permute_dims(op.reshape(x, (10, 3, 8)), [0, 2, 1]), (10, 24))

    (nest,) = nests_of(build, [f32(10, 24)])
    assert [axis.extent for axis in split_axes(nest).axes] == [10, 8, 3]
    assert counts(split_axes(nest)) == [[10, 8, 3]]
