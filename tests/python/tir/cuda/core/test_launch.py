"""Building blocks of GPU kernels: shared memory, launches, aligned runs of parameters."""

from __future__ import annotations

import pytest
from tvm.script.ir_builder import tirx as T

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import Operand
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.cuda.core import ptx
from relax_hetero.tir.cuda.core.launch import SWIZZLED_ALIGN, SharedMemory, launch
from relax_hetero.tir.cuda.core.operand import GlobalView


def test_parts_of_shared_memory_are_aligned_and_disjoint():
    shared = SharedMemory()
    tiles, barrier, more = (
        shared.reserve(3000, SWIZZLED_ALIGN),
        shared.reserve(8, 8),
        shared.reserve(100, SWIZZLED_ALIGN),
    )
    assert (tiles, barrier, more) == (0, 3000, 3072)
    assert shared.size == 3172


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_launch_is_one_nest_of_loops(cluster):
    function = Function("kernel", registers="local")
    with function:
        out = function.argument("out", [256], "int32")
        with function.body(), launch(8, 32, cluster) as place:
            ptx.block_barrier()
            T.buffer_store(out, place.rank, [place.block * 32 + place.thread])
    assert is_one_launch(function.result)


@pytest.mark.parametrize(
    ("shape", "along", "aligned"),
    [((6, 40), "k", 16), ((6, 36), "k", 8), ((6, 33), "k", 2), (("s0", 40), "k", 16), ((6, "s0"), "k", 2)],
)
def test_how_runs_of_a_parameter_are_aligned(shape, along, aligned):
    function = Function("kernel", registers="local")
    with function:
        view = GlobalView(function, "lhs", Operand(shape, "float16", ("m", "k"), PackedLayout.identity(2)))
        with function.body():
            view.open()
            assert view.is_contiguous(along)
            assert not view.is_contiguous("m")
            assert view.alignment(along, 16) == aligned
            T.evaluate(0)
