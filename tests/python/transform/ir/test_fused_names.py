"""Names of what FuseOps makes."""

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.transform.ir.fused_names import with_fused_names


@ir_module()
def Chains(x: R.Tensor((4,), "float32")):
    with R.dataflow():
        a = R.exp(x)
        b = R.negative(a)
        c = R.exp(b)
        d = R.negative(c)
        both = (b, d)
        R.output(both)
    return both


@pytest.fixture(scope="module")
def fused():
    mod = relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(Chains))
    return mod, relax.transform.FuseOps()(mod)


def names(mod):
    return [binding.var.name for block in mod["main"].body.blocks for binding in block.bindings]


def test_results_have_the_names_of_their_values(fused):
    before, after = fused
    named, inside = with_fused_names(before, after)
    assert "lv" in names(after) and not {"lv", "lv1"} & set(names(named))
    assert {"b", "d"} <= set(names(named))
    assert inside == {("main", "b"): ("a", "b"), ("main", "d"): ("c", "d")}


def test_nothing_but_names_changes(fused):
    before, after = fused
    tvm.ir.assert_structural_equal(with_fused_names(before, after)[0], after)


@ir_module()
def Views(x: R.Tensor((4,), "float32")):
    with R.dataflow():
        a = R.memory.view(x, R.shape([4]), R.dtype("int32"), R.prim_value(0))
        b = R.negative(a)
        c = R.abs(b)
        R.output(c)
    return c


def test_values_that_are_not_tensors_get_distinct_names():
    mod = relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(Views))
    named, inside = with_fused_names(mod, relax.transform.FuseOps()(mod))
    assert names(named)[-1] == "c" and inside == {("main", "c"): ("b", "c")}


def test_a_module_that_has_the_names_is_the_same(fused):
    before, _ = fused
    assert with_fused_names(before, before)[0].same_as(before)
