"""Wrong modules are refused before their passes run, in terms of their own names."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.driver.compile import check_module
from relax_hetero.target.vdevice import lookup, parse_vdevices, with_vdevices

OF_TVM = ("Check failed", "InternalError", "TVMError", ".cc:", "metadata[", "ir.Op(", "T.int64")
N = tirx.Var("n", "int64")


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def main(value, result, *params, **others):
    """A module whose one binding is `y = value(*params)`, declared to be `result`; TVM checks nothing of it."""
    variables = [relax.Var(name, ty) for name, ty in zip("xw", params, strict=False)]
    y = relax.Var("y", result)
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, value(*variables))])], y)
    func = relax.Function(variables, body, result).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": func, **others})


@T.prim_func(s_tir=True)
def kernel(a: T.Buffer((2, 3), "float32"), b: T.Buffer((2, 3), "float32")):
    for i, j in T.grid(2, 3):
        with T.sblock("b"):
            vi, vj = T.axis.remap("SS", [i, j])
            b[vi, vj] = a[vi, vj] + T.float32(1)


def called(args, out, x=None):
    """A module that calls the kernel with x several times."""
    gv = relax.GlobalVar("f")
    mod = main(lambda x: relax.call_tir(gv, [x] * args, out), out, x or tensor(2, 3))
    return tvm.IRModule({**dict(mod.functions.items()), gv: kernel})


def calls_function(count, columns):
    """A module that gives a function of float32[2, 3] `count` tensors of `columns` columns."""
    a, gv = relax.Var("a", tensor(2, 3)), relax.GlobalVar("sub")
    sub = relax.Function([a], relax.SeqExpr([], a), a.ty)
    relax.expr._update_type(gv, sub.ty)
    mod = main(lambda x: relax.Call(gv, [x] * count), tensor(2, 3), tensor(2, columns))
    return tvm.IRModule({**dict(mod.functions.items()), gv: sub})


def bound_twice():
    x, y = relax.Var("x", tensor(2)), relax.Var("y", tensor(2))
    bindings = [relax.VarBinding(y, relax.op.exp(x)), relax.VarBinding(y, relax.op.negative(x))]
    func = relax.Function([x], relax.SeqExpr([relax.BindingBlock(bindings)], y), y.ty)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


T23, T45 = tensor(2, 3), tensor(4, 5)
ANY = relax.TensorType(ndim=-1, dtype="")
BIG = relax.const(np.ones((50, 60), "float32"))
OP, NN = relax.op, relax.op.nn


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: main(OP.matmul, T23, T23, T45), ["relax.matmul 'y' of x: float32[2, 3], w: float32[4, 5]", "3 and 4"]),
        (lambda: main(lambda x: OP.matmul(x, BIG), T23, T23), ["a constant: float32[50, 60]"]),
        (lambda: main(OP.add, T23, T23, T45), ["relax.add 'y'", "not broadcastable"]),
        (lambda: main(OP.add, T23, T23, tensor(2, 3, dtype="int32")), ["w: int32[2, 3]", "same datatype"]),
        (lambda: main(OP.add, T23, relax.ObjectType(), T23), ["x: Any"]),
        (lambda: main(lambda *of: OP.concat(of, 0), T23, T23, T45), ["relax.concat 'y'", "3 and 5"]),
        (lambda: main(lambda x: OP.reshape(x, (4, 5)), T45, T23), ["relax.reshape 'y'", "20"]),
        (lambda: main(lambda x: OP.permute_dims(x, [0, 0]), T23, T23), ["relax.permute_dims 'y'"]),
        (lambda: main(lambda x: NN.softmax(x, 5), T23, T23), ["relax.nn.softmax 'y'", "axis 5"]),
        (lambda: main(lambda x: OP.take(x, relax.const([0]), 7), T23, T23), ["relax.take 'y'", "axis 7"]),
        (lambda: main(NN.conv2d, T23, T23, T45), ["relax.nn.conv2d 'y'", "4-dim"]),
        (lambda: main(lambda x: NN.attention(x, x, x), T23, T23), ["relax.nn.attention 'y'"]),
        (lambda: main(lambda x: NN.layer_norm(x, x, x, axes=[9]), T23, T23), ["relax.nn.layer_norm 'y'", "axis 9"]),
        (lambda: main(lambda x: OP.where(x, x, x), T23, T23), ["relax.where 'y'", "boolean"]),
        (lambda: main(lambda x: OP.topk(x, axis=8), T23, T23), ["relax.topk 'y'", "8"]),
        (lambda: main(OP.exp, tensor(7, 7, dtype="int8"), T23), ["declared as int8[7, 7]", "float32[2, 3]"]),
        (lambda: main(OP.exp, ANY, ANY), ["lacks a known element type", "R.match_cast"]),
        (lambda: main(lambda x: OP.zeros((N, 3), "float32"), tensor(N, 3), T23), ["symbolic size 'n'", "R.match_cast"]),
        (lambda: called(1, T45), ["kernel 'f' result 0: float32[4, 5] for its buffer 'b', float32[2, 3]"]),
        (lambda: called(1, tensor(2, 3, dtype="int8")), ["result 0: int8[2, 3]"]),
        (lambda: called(1, tensor(6)), ["result 0: float32[6]"]),
        (lambda: called(1, T23, tensor(9, 9)), ["x: float32[9, 9] for its buffer 'a'"]),
        (lambda: called(3, T23), ["3 operands, 1 results and 0 sizes, and it takes 2 parameters"]),
        (
            lambda: main(lambda x: relax.Call(relax.GlobalVar("mian"), [x]), T23, T23),
            ["'mian'", "did you mean 'main'?"],
        ),
        (lambda: calls_function(2, 3), ["gives function 'sub' 2 arguments, and it takes 1"]),
        (lambda: calls_function(1, 4), ["x: float32[2, 4] for parameter 'a' of function 'sub'"]),
        (lambda: main(lambda x: relax.If(x, relax.SeqExpr([], x), relax.SeqExpr([], x)), T23, T23), ["branches on x"]),
        (bound_twice, ["relax.negative 'y'", "a second time"]),
        (lambda: tvm.IRModule({}), ["no function that could be called (found nothing)"]),
        (lambda: tvm.IRModule({"f": kernel.without_attr("global_symbol")}), ["found PrimFunc 'f'"]),
        (
            lambda: tvm.IRModule({"main": main(OP.exp, T23, T23)["main"].without_attr("global_symbol")}),
            ["found Function"],
        ),
    ],
)
def test_wrong_modules(make, texts):
    with pytest.raises(rh.BuildError) as error:
        check_module(make())
    message = str(error.value)
    assert all(text in message for text in texts), message
    assert not any(text in message for text in OF_TVM), message


def test_two_devices_that_meet_are_left_to_placement():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((4,), "float32", "llvm:0"), w: R.Tensor((4,), "float32", "llvm:1")):
        y = R.matmul(x, w)
        return y

    with pytest.raises(rh.PlacementError, match="llvm:1"):
        rh.compile(Mod)


def test_devices_that_contradict_are_named():
    devices = parse_vdevices(["llvm", "llvm"])
    mesh = lookup("llvm[0:2]", devices)
    placed = [relax.TensorType([2, 3], "float32", vdevice) for vdevice in (devices[1], mesh)]
    mod = with_vdevices(main(relax.op.exp, *placed), devices)
    with pytest.raises(rh.BuildError, match=r"float32\[2, 3\] on llvm:1, .* float32\[2, 3\] on llvm:0\+llvm:1"):
        check_module(mod)


def test_errors_of_a_pass_name_it():
    mod = main(lambda x: relax.op.cumsum(x, axis=8), T23, T23)
    with pytest.raises(
        rh.BuildError, match="op relax.cumsum of variable 'y' in function 'main' .*: Index out of range"
    ):
        rh.compile(mod)
    a, fn = relax.Var("a", T23), relax.Var("fn", relax.FuncType([T23], T23))
    x, y = relax.Var("x", T23), relax.Var("y", T23)
    local = relax.VarBinding(fn, relax.Function([a], relax.SeqExpr([], a), T23))
    body = relax.SeqExpr([relax.BindingBlock([local, relax.VarBinding(y, relax.Call(fn, [x]))])], y)
    func = relax.Function([x], body, T23).with_attr("global_symbol", "main")
    with pytest.raises(rh.BuildError, match="this module cannot be lowered by LowerToVM: VMShapeLower do not work"):
        rh.compile(tvm.IRModule({"main": func}))


@I.ir_module
class OfNoElementType:
    @R.function(private=True)
    def same(x: R.Tensor) -> R.Tensor:
        return x

    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = OfNoElementType
        y = cls.same(x)
        z = R.match_cast(y, R.Tensor((4,), "float32"))
        return R.add(z, z)


@ir_module()
def Copies(x: R.Tensor(("n", "m"), "float32")):
    n, m = T.int64(), T.int64()
    y = R.call_pure_packed("vm.builtin.copy", x, ty_args=R.Tensor((n, m), "float32"))
    shape = R.call_pure_packed("vm.builtin.copy", R.shape([n]), ty_args=R.Shape(ndim=1))
    _ = R.match_cast(shape, R.Shape([4]))
    return R.add(y, y)


def test_calls_without_element_types_run():
    run = rh.vm.VirtualMachine(rh.compile(OfNoElementType, cache=False))["main"]
    np.testing.assert_array_equal(run(np.arange(4, dtype="float32")).numpy(), 2 * np.arange(4))


def test_copies_of_others_are_not_names_of_sizes():
    run = rh.vm.VirtualMachine(rh.compile(Copies, cache=False))["main"]
    np.testing.assert_array_equal(run(np.ones((4, 3), "float32")).numpy(), np.full((4, 3), 2))
    with pytest.raises(rh.HeteroError, match="4"):
        run(np.ones((3, 3), "float32"))
