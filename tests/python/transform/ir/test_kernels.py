"""Kernels say how much they compute and move, as far as the executable and its profile."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from relax_hetero.target.element_types import numpy_dtype


def product(rows: object, dtype: str = "float32", sums: str = "float32", buffers: bool = True) -> rh.vm.Executable:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 24), dtype))
    weight = relax.const(np.ones((24, 40), numpy_dtype(dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = relax.op.astype(relax.op.matmul(x, weight, out_dtype=sums), "float32")
            y = builder.emit_output(relax.op.nn.softmax(builder.emit(y)))
        builder.emit_func_output(y)
    return rh.compile(builder.get(), command_buffers=buffers)


def test_the_executable_has_counts_and_its_metadata_keeps_them() -> None:
    metadata = product(6).metadata
    dispatches = list(metadata.dispatches.values())
    assert sum(one.operations for one in dispatches) == 2 * 6 * 24 * 40
    assert sum(one.bytes for one in dispatches) >= 4 * (6 * 24 + 24 * 40 + 6 * 40)
    assert type(metadata).from_json(metadata.to_json()).dispatches == metadata.dispatches


def test_symbolic_extents_count_nothing() -> None:
    from tvm import tirx

    dispatches = product(tirx.Var("n", "int64")).metadata.dispatches.values()
    assert all(one.operations == one.bytes == 0 for one in dispatches if one.ops)


def test_profiles_have_the_counts() -> None:
    profile = rh.vm.VirtualMachine(product(6)).profile("main", np.ones((6, 24), "float32"))
    assert sum(row.operations for row in profile.rows) == 2 * 6 * 24 * 40


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize(
    "dtype, sums, text",
    [("float32", "float32", "f32"), ("bfloat16", "float32", "bf16"), ("int8", "int32", "s8*s8->s32")],
)
def test_kernels_say_their_precision(dtype: str, sums: str, text: str, buffers: bool) -> None:
    metadata = product(6, dtype, sums, buffers).metadata
    (precision,) = [one.precision for one in metadata.dispatches.values() if "matmul" in one.ops]
    (reported,) = [one["precision"] for one in metadata.fusions["dispatches"] if "matmul" in one["ops"]]
    assert precision == reported == text


@pytest.mark.parametrize("buffers", [True, False])
def test_kernels_without_products_name_the_types_of_their_arguments(buffers: bool) -> None:
    x = relax.Var("x", relax.TensorType((3, 5), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.astype(x, "float32"))
        builder.emit_func_output(y)
    metadata = rh.compile(builder.get(), command_buffers=buffers).metadata
    assert [one.precision for one in metadata.dispatches.values() if one.ops] == ["s64, f32"]
