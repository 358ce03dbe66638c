"""`to_vdevice`: what it accepts, and that it is pure, fine in dataflow and never fused."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.errors import PlacementError, VDeviceError
from relax_hetero.target.vdevice import same_object

TENSOR = relax.TensorType((2, 3), "float32")
X = relax.Var("x", TENSOR)


def module() -> tvm.IRModule:
    return tvm.IRModule(
        {}, global_infos={"vdevice": [rh.VDevice("llvm"), rh.VDevice("c", 1), rh.VDevice("llvm", 0, "shared")]}
    )


@pytest.mark.parametrize(
    ("spec", "position"),
    [("llvm", 0), ("c:0", 1), ("vdevice:2", 2), (tvm.cpu(1), 1), (tvm.cpu(0), 0), (rh.VDevice("llvm", 0, "shared"), 2)],
)
def test_destinations(spec, position):
    builder = relax.BlockBuilder(module())
    listed = list(builder.get().global_infos["vdevice"])
    with builder.function("main", [X]):
        call = rh.op.to_vdevice(X, spec)
        tvm.ir.assert_structural_equal(call, relax.op.to_vdevice(X, listed[position]))
        result = builder.emit(call)
        builder.emit_func_output(result)
    assert same_object(call.attrs.dst_vdevice, listed[position])
    assert same_object(result.ty.vdevice, listed[position])


def test_tuples_move_field_by_field():
    @ir_module("llvm", "c:1")
    def Before(
        t: R.Tuple(R.Tensor((2,), "float32"), R.Tuple(R.Tensor((3,), "float32"), R.Shape([2]))),
        x: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            gv = R.to_vdevice((t, x), "c")
            R.output(gv)
        return gv

    @ir_module("llvm", "c:1")
    def Expected(
        t: R.Tuple(R.Tensor((2,), "float32"), R.Tuple(R.Tensor((3,), "float32"), R.Shape([2]))),
        x: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            inner = t[1]
            a = t[0]
            a_moved = R.to_vdevice(a, "c")
            b = inner[0]
            b_moved = R.to_vdevice(b, "c")
            shape = inner[1]
            x_moved = R.to_vdevice(x, "c")
            gv = ((a_moved, (b_moved, shape)), x_moved)
            R.output(gv)
        return gv

    tvm.ir.assert_structural_equal(Before, Expected)


def test_nested_calls():
    """An expression that is not a variable yet is bound first where its type is needed."""

    @ir_module("llvm", "c:1")
    def Before(x: R.Tensor((4,), "float32")):
        y = R.to_vdevice(R.split(R.exp(x), 2), "c")
        return y

    @ir_module("llvm", "c:1")
    def Expected(x: R.Tensor((4,), "float32")):
        e = R.exp(x)
        s = R.split(e, 2)
        a = s[0]
        a_moved = R.to_vdevice(a, "c")
        b = s[1]
        b_moved = R.to_vdevice(b, "c")
        y = (a_moved, b_moved)
        return y

    tvm.ir.assert_structural_equal(Before, Expected)


def test_without_a_module():
    own = rh.VDevice("llvm")
    assert same_object(rh.op.to_vdevice(X, own).attrs.dst_vdevice, own)
    assert len(rh.op.to_vdevice((X, X), own).fields) == 2
    with pytest.raises(VDeviceError, match="module under construction, and there is none"):
        rh.op.to_vdevice(X, "llvm")
    split = relax.BlockBuilder().normalize(relax.op.split(X, 3, 1))
    with pytest.raises(PlacementError, match="emit it first"):
        rh.op.to_vdevice(split, own)


@pytest.mark.parametrize("operand", [3, None, "x", [X, 3], relax.ShapeExpr([2]), relax.Var("o", relax.ObjectType())])
def test_wrong_operand(operand):
    with pytest.raises(PlacementError, match="to_vdevice needs a"):
        rh.op.to_vdevice(operand, rh.VDevice("llvm"))


def test_vdevice_of_another_module():
    builder = relax.BlockBuilder(module())
    with builder.function("main", [X]):
        with pytest.raises(VDeviceError, match="available: llvm:0, c:0, llvm:1"):
            rh.op.to_vdevice(X, rh.VDevice("llvm", 7))
        builder.emit_func_output(X)


def test_is_pure():
    assert tvm.ir.Op.get("relax.to_vdevice").get_attr("FPurity")
    assert not relax.analysis.contains_impure_call(_chain()["main"])


def test_is_never_fused():
    """Opaque to fusion: each side becomes its own kernel, and the transfer stays between them."""
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps()]
    fused = tvm.transform.Sequential(passes)(_chain())
    values = [binding.value for block in fused["main"].body.blocks for binding in block.bindings]
    assert [getattr(value.op, "name", "kernel") for value in values] == ["kernel", "relax.to_vdevice", "kernel"]
    functions = [func for gvar, func in fused.functions.items() if isinstance(func, relax.Function)]
    assert sum("relax.to_vdevice" in ops_of(func) for func in functions) == 1


def _chain() -> tvm.IRModule:
    """Two elementwise ops, a transfer in dataflow, two more."""

    @ir_module("llvm", "c:1")
    def Chain(x: R.Tensor((4,), "float32", "llvm")):
        with R.dataflow():
            a = R.exp(x)
            b = R.negative(a)
            c = R.to_vdevice(b, "c")
            d = R.exp(c)
            e = R.negative(d)
            R.output(e)
        return e

    return Chain
