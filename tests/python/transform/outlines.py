"""Functions after FormCommandBuffers, as short texts or compared with the expected ones; small kernels to call."""

import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_walk

from modules import ir_module
from relax_hetero.transform import FormCommandBuffers
from relax_hetero.transform.ir.module_attrs import COMMANDS

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def outline(mod, function="main"):
    """Outline of a function: kernels by name, command buffers as `name: kernels`, ops and kinds of others."""
    after = FormCommandBuffers()(mod)
    relax.analysis.well_formed(after)  # raises
    assert FormCommandBuffers()(after).same_as(after)
    return list(lines(after, after[function].body))


def lines(mod, body):
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield [list(lines(mod, branch)) for branch in (value.true_branch, value.false_branch)]
            elif isinstance(binding, relax.MatchCast):
                yield "match_cast"
            elif isinstance(value, relax.Call):
                yield _called(mod, value)


def _called(mod, call):
    if isinstance(call.op, tvm.ir.GlobalVar):
        return call.op.name_hint
    if not isinstance(call.op, tvm.ir.Op):
        return call.op.global_symbol
    if call.op.name != "relax.call_tir":
        return call.op.name.removeprefix("relax.")
    name = call.args[0].name_hint
    steps: list[str] = []
    structural_walk(mod[name].body, (tvm.ir.GlobalVar, lambda gv: steps.append(gv.name_hint.split("_")[0])))
    return f"{name}: {' '.join(steps)}" if steps else name.split("_")[0]  # the rest names a device


@ir_module(V4, (V2, 1))
class Kernels:
    """Kernels of the modules below."""

    @T.prim_func(private=True, s_tir=True)
    def one(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def two(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def strided(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (4,), "float32", strides=(T.int64(),))
        B = T.match_buffer(b, (4,), "float32")
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def bump(A: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @R.function
    def callee(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
        return x


D0, D1 = Kernels.global_infos["vdevice"]
ONE, TWO, STRIDED, BUMP, CALLEE = map(Kernels.get_global_var, ("one", "two", "strided", "bump", "callee"))
FIRST = R.Tensor((4,), "float32", D0)
SECOND = R.Tensor((4,), "float32", D1)


def with_main(main):
    """The kernels, and a function that calls them."""
    functions = {**dict(Kernels.functions.items()), tvm.ir.GlobalVar("main"): main}
    return tvm.IRModule(functions, global_infos=Kernels.global_infos)


def check(before, expected):
    """The module after the pass, whose `main` and parameters of host functions are the expected ones."""
    after = FormCommandBuffers()(before)
    relax.analysis.well_formed(after)  # raises
    assert_structural_equal(after["main"], expected["main"], map_free_vars=True)
    hosts = [gv for gv, func in after.functions.items() if COMMANDS in func.attrs]
    assert {gv.name_hint for gv in hosts} == {
        gv.name_hint for gv in expected.get_global_vars() if gv.name_hint.startswith("main_commands")
    }
    for gv in hosts:
        bodiless = [after[gv].with_body(tirx.Evaluate(0)), expected[gv.name_hint].with_body(tirx.Evaluate(0))]
        plain = [tirx.PrimFunc(func.params, func.body) for func in bodiless]
        assert_structural_equal(*plain)
    assert FormCommandBuffers()(after).same_as(after)
    return after


def called(mod, host):
    """The kernels that a host function calls, in order."""
    names = []
    structural_walk(mod[host].body, (tvm.ir.GlobalVar, lambda gv: names.append(gv.name_hint)))
    return names
