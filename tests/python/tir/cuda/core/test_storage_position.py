"""Places in storage and positions in tensors; vectors of elements; rounding by the GPU's instruction."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from cuda_reports import sources_of
from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.core.packed_storage import PackedStorage
from relax_hetero.tir.core.view import View
from relax_hetero.tir.cuda.core.expression import emit
from relax_hetero.tir.cuda.core.launch import at_least_one
from relax_hetero.tir.cuda.core.storage_position import common_lanes, innermost, position_of, run_length
from relax_hetero.tir.cuda.core.vectors import VectorRegisters

SWIZZLED = PackedLayout.parse("pack<outer=[1, 0] inner=[1:64, 0:64] +swizzle>")


def test_neighbours_in_storage():
    assert innermost(PackedLayout.identity(3), (4, 5, 1)) == 1
    assert innermost(SWIZZLED, (100, 70)) == 0
    assert run_length(PackedLayout.identity(2), (7, 24), "float16") == 24
    assert run_length(PackedLayout.identity(2), (7, "n"), "float16") == 1
    assert run_length(SWIZZLED, (100, 70), "float16") == 8  # a chunk of 16 bytes
    assert common_lanes(8, [24, 100]) == 4
    assert at_least_one(0) == 1 and at_least_one(7) == 7


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("layout", [SWIZZLED, PackedLayout((1, 0)), PackedLayout((0, 1), (0, 1), (4, 8))], ids=str)
def test_a_thread_finds_the_position_of_its_vector(layout, lanes):
    """Each storage position gets the row-major number of its element, as numpy lays it out."""
    shape = (64, 64)
    numbers = np.arange(64 * 64, dtype="int32").reshape(shape)
    function = Function("numbers", registers="local")
    with function:
        storage = PackedStorage(function, "out", shape, "float16", layout, set())
        out = View(function, "numbers", [tirx.const(64 * 64, "int64")], "int32")
        with function.body(), T.thread_binding(64 * 64 // lanes, thread="blockIdx.x") as block:
            with T.thread_binding(1, thread="threadIdx.x"):
                out.open()
                row, column = position_of(storage, tirx.Cast("int64", block), lanes)
                for lane in range(lanes):
                    element = [row, column]
                    element[innermost(layout, shape)] += lane
                    T.buffer_store(out.data, tirx.Cast("int32", element[0] * 64 + element[1]), [block * lanes + lane])
    actual = np.zeros(64 * 64, "int32")
    run(function.result, np.zeros(layout.packed_shape(shape), "float16"), actual)
    # As storage of 16-bit elements, which the numbers fit into.
    np.testing.assert_array_equal(actual, layout.pack(numbers.astype("uint16")).reshape(-1))


def test_vectors_of_sixteen_bytes():
    """Eight halves are loaded and stored as four words; elements outside read as zeros and are not written."""
    function = Function("copy", registers="local")
    with function:
        source, out = (View(function, name, [tirx.const(64, "int64")], "float16") for name in ("source", "out"))
        with function.body(), T.thread_binding(1, thread="blockIdx.x"), T.thread_binding(8, thread="threadIdx.x") as t:
            source.open()
            out.open()
            vector = VectorRegisters(source, tirx.const(0, "int64"), 8, 1)
            vector.load(0, t, t < 6)
            vector.set(0, vector.get(0) + tirx.const(1, "float16"))
            vector.store_to(out, tirx.Cast("int64", t))
    x, actual = np.arange(64, dtype="float16"), np.full(64, np.nan, "float16")
    run(function.result, x, actual)
    expected = np.where(np.arange(64) < 48, x, 0)
    expected[::8] += 1
    np.testing.assert_array_equal(actual, expected)


def test_bfloat16_is_rounded_by_an_instruction():
    function = Function("rounded", registers="local")
    with function:
        x = View(function, "x", [tirx.const(32, "int64")], "float32")
        y = View(function, "y", [tirx.const(32, "int64")], "bfloat16")
        with function.body(), T.thread_binding(1, thread="blockIdx.x"), T.thread_binding(32, thread="threadIdx.x") as t:
            x.open()
            y.open(raw=True)
            T.buffer_store(
                y.data, y.bits(emit(Expression.parse("cast(x0, 'bfloat16')"), [x.data[t]], ["float32"])), [t]
            )
    (source,) = sources_of(function.result, Target({"kind": "cuda", "arch": "sm_90a"}))
    body = source.text[source.text.rindex("__launch_bounds__") :]
    assert "(nv_bfloat16)" in body and "32767" not in body
