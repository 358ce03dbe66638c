"""Helpers of tests for modules: what they parse is what TVMScript parses, and a check of a pass can fail."""

import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from modules import callees, calls_of, check_pass, ir_module, ops_of

V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@I.ir_module
class Plain:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("c", 1), I.vdevice(V2, 2)]})

    @R.function(pure=False)
    def main(x: R.Tensor((2,), "float32", "llvm:1")):
        y = R.exp(x)
        return y


def test_a_function_is_the_main_of_its_module():
    @ir_module("llvm", "c:1", (V2, 2), pure=False)
    def Function(x: R.Tensor((2,), "float32", "llvm:1")):
        y = R.exp(x)
        return y

    assert_structural_equal(Function, Plain)


def test_ops_calls_and_callees():
    @ir_module("llvm")
    class Module:
        @R.function(private=True)
        def twice(x: R.Tensor((2,), "float32", "llvm")) -> R.Tensor((2,), "float32", "llvm"):
            y = R.add(x, x)
            return y

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm"), flag: R.Tensor((), "bool", "llvm")):
            cls = Module
            if flag:
                y = cls.twice(cls.twice(x))
            else:
                y = R.exp(x)
            return y

    assert ops_of(Module["twice"]) == ["relax.add"] and "relax.exp" in ops_of(Module)
    assert [call.args[0].name for call in calls_of("relax.exp", Module)] == ["x"]
    assert callees(Module["main"].body) == ["twice", "twice"]


def renamed(mod):
    """A pass whose result is never left alone by a second run."""
    return mod.with_attr("runs", (mod.attrs or {}).get("runs", 0) + 1)


@pytest.mark.parametrize(
    "transform, expected", [(renamed, Plain.with_attr("runs", 1)), (relax.transform.Normalize(), renamed(Plain))]
)
def test_a_check_of_a_pass_can_fail(transform, expected):
    with pytest.raises((AssertionError, ValueError)):
        check_pass(transform, Plain, expected)
    assert check_pass(lambda mod: mod, Plain, Plain).same_as(Plain)
