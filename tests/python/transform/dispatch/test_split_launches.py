"""Kernels of GPUs that take several launches become kernels with tensors between them, sorts among them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal

import relax_hetero  # noqa: F401
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.transform import FormDispatches, RealizeVDevice

sys.path.insert(0, str(Path(__file__).parents[2] / "tir" / "cuda"))
from on_cpu import run

GPU = relax.VDevice({"kind": "cuda", "arch": "sm_90a"})


def formed(shape, op, dtype="float32"):
    """The module of one op after FormDispatches."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype, GPU))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(op(x)))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [GPU])
    return FormDispatches()(RealizeVDevice()(mod))


def calls(mod):
    """Name of the kernel, its operands and its result of every call of main."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [
        (b.value.args[0].name_hint, [getattr(v, "name", "") for v in b.value.args[1].fields], b.var.name)
        for b in bindings
        if isinstance(b.value, relax.Call)
    ]


def run_calls(mod, x):
    """The results of the kernels of main, run one after another as CPU code; those of its last call."""
    values = {"x": x}
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    for b in bindings:
        if isinstance(b.value, relax.TupleGetItem):
            values[b.var.name] = values[b.value.tuple_value.name][b.value.index]
            continue
        types = list(b.var.ty.fields) if isinstance(b.var.ty, tvm.ir.TupleType) else [b.var.ty]
        results = [np.full([int(e) for e in ty.shape.values], 77, str(ty.dtype)) for ty in types]
        operands = [values[v.name] for v in b.value.args[1].fields]
        run(mod[b.value.args[0]], *operands, *results)
        values[b.var.name] = results if len(results) > 1 else results[0]
    return values[bindings[-1].var.name]


def test_each_launch_is_a_kernel_and_relax_allocates_between():
    mod = formed((5, 70), lambda x: relax.op.nn.softmax(x))
    names = [name for name, _, _ in calls(mod)]
    assert names == ["softmax_1", "softmax_2", "softmax_3", "softmax_4"]
    assert calls(mod)[-1][1] == [calls(mod)[1][2], calls(mod)[2][2]]
    assert "softmax" not in [gv.name_hint for gv in mod.get_global_vars()]
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert all(map(is_one_launch, kernels))
    x = np.random.default_rng(0).standard_normal((5, 70)).astype("float32")
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(run_calls(mod, x), e / e.sum(1, keepdims=True), rtol=1e-5)
    assert_structural_equal(FormDispatches()(mod), mod)


def test_a_kernel_of_one_launch_stays():
    assert [name for name, _, _ in calls(formed((5, 70), relax.op.exp))] == ["tir_exp"]


def test_symbolic_extents_between_launches():
    n = tirx.Var("n", "int64")
    mod = formed((n, 70), lambda x: relax.op.nn.softmax(x))
    assert len(calls(mod)) == 4


@pytest.mark.parametrize("descending", [False, True])
def test_sorts_keep_the_order_of_equal_elements(descending):
    x = np.random.default_rng(0).integers(0, 9, (4, 30)).astype("float32")
    mod = formed((4, 30), lambda x: relax.op.argsort(x, -1, descending, "int64"))
    order = np.argsort(-x if descending else x, 1, kind="stable")
    np.testing.assert_array_equal(run_calls(mod, x), order)
    mod = formed((4, 30), lambda x: relax.op.sort(x, 0, descending))
    expected = np.sort(x, 0)
    np.testing.assert_array_equal(run_calls(mod, x), expected[::-1] if descending else expected)


def test_the_largest_few_and_where_they_stood():
    x = np.random.default_rng(0).standard_normal((4, 30)).astype("float32")
    x[1, 3] = np.nan
    mod = formed((4, 30), lambda x: relax.op.topk(x, 3, 1, "both", True, "int64"))
    values, indices = run_calls(mod, x)
    order = np.argsort(-np.where(np.isnan(x), np.inf, x), 1, kind="stable")[:, :3]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_cumulative_sums_of_a_constant_are_not_folded_on_the_cpu():
    mod = formed((3, 100), lambda x: relax.op.add(x, relax.op.cumsum(relax.const(np.ones((3, 100), "float32")), 1)))
    assert any(name.startswith("cumsum") for name, _, _ in calls(mod))
