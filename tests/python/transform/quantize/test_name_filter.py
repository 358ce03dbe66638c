"""ToMixedPrecision: values that a user keeps in float32, by the names of ops, variables and functions."""

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import calls_of, ir_module, ops_of
from relax_hetero.encoding import Encoding
from relax_hetero.errors import BuildError
from relax_hetero.transform import SetEncoding, ToMixedPrecision
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.quantize.to_mixed_precision import to_mixed_precision


def dtypes(mod, op):
    return [str(b.value.args[0].ty.dtype) for b in walk_bindings(mod["main"]) if op_name(b.value) == op]


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        with R.dataflow():
            first = R.matmul(x, w)
            second = R.matmul(first, w)
            third = R.matmul(second, w)
            y = R.add(third, second)
            R.output(y)
        return y

    @R.function(private=True)
    def other(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        y = R.matmul(x, w)
        return y


def test_a_kept_variable_is_computed_in_float32_and_rounded_for_products_alone():
    after = ToMixedPrecision("bfloat16", keep=["second"])(Chain)
    assert dtypes(after, "relax.matmul") == ["bfloat16", "float32", "bfloat16"]
    (add,) = calls_of("relax.add", after["main"])
    assert [arg.name for arg in add.args] == ["third", "second"]


@pytest.mark.parametrize("keep", [["relax.matmul"], ["matmul"], "matmul", ["main", "other"], ["m*n", "o*r"]])
def test_kept_ops_and_functions(keep):
    assert to_mixed_precision(Chain, "bfloat16", keep) is Chain


def test_a_kept_function():
    after = ToMixedPrecision("bfloat16", keep=("main",))(Chain)
    assert after["main"].same_as(Chain["main"])
    assert "relax.astype" in ops_of(after["other"])


@pytest.mark.parametrize(
    ("keep", "text"),
    [("sofmax", "'nn.softmax'"), (["thrid"], "'third'"), (["zz*"], "no name is near"), ([3], "has 3"), (3, "is 3")],
)
def test_wrong_names_are_refused_with_near_ones(keep, text):
    with pytest.raises(BuildError, match=text):
        ToMixedPrecision("bfloat16", keep)(Chain)


def test_other_types_are_refused():
    with pytest.raises(BuildError, match="'int8', expected one of"):
        ToMixedPrecision("int8")


def test_tfloat32_marks_products_and_changes_no_type():
    after = ToMixedPrecision("tfloat32", keep=["second"])(Chain)
    assert dtypes(after, "relax.matmul") == ["float32"] * 3
    assert ToMixedPrecision("tfloat32")(after).same_as(after)
    encoded = SetEncoding()(after)
    products = calls_of("relax.hetero.matmul", encoded["main"])
    types = [Encoding.parse(call.attrs.encoding).element_types[0] for call in products]
    assert types == ["tfloat32", "float32", "tfloat32"]


@ir_module()
def Convolution(x: R.Tensor((1, 8, 5, 5), "float32"), w: R.Tensor((16, 8, 3, 3), "float32")):
    with R.dataflow():
        y = R.nn.conv2d(x, w)
        R.output(y)
    return y


@pytest.mark.parametrize("keep", [[], ["y"]])
def test_tfloat32_marks_convolutions(keep):
    encoded = SetEncoding()(ToMixedPrecision("tfloat32", keep=keep)(Convolution))
    (call,) = calls_of("relax.hetero.conv", encoded["main"])
    multiplied = "float32" if keep else "tfloat32"
    assert Encoding.parse(call.attrs.encoding).element_types == (multiplied, multiplied, "float32")


def test_tfloat32_is_exact_on_cpus():
    random = np.random.default_rng(0)
    args = random.random((8, 16), "float32"), random.random((16, 16), "float32")
    modules = Chain, ToMixedPrecision("tfloat32")(Chain)
    results = [rh.vm.VirtualMachine(rh.compile(mod))["main"](*args).numpy() for mod in modules]
    np.testing.assert_array_equal(*results)
