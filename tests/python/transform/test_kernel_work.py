"""Kernels say how much they compute and move, as far as the executable and its profile."""

from __future__ import annotations

import numpy as np
from tvm import relax

import relax_hetero as rh


def product(rows: object) -> rh.vm.Executable:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 24), "float32"))
    weight = relax.const(np.ones((24, 40), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.softmax(relax.op.matmul(x, weight)))
        builder.emit_func_output(y)
    return rh.compile(builder.get())


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
