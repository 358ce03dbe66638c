"""Merges: which name stays where two variables have become one value."""

from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.transform.encode.replaced_bindings import Merges
from relax_hetero.transform.ir.rewriting import map_bindings


def merged(mod):
    """Every alias ``y = x`` of the function merged, as passes do it."""
    merges = Merges()

    def change(binding):
        return merges.alias(binding.var, binding.value) if isinstance(binding.value, relax.Var) else binding

    return merges.apply(map_bindings(mod["main"], change))


def test_the_program_s_name_takes_over():
    @ir_module()
    def Before(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        with R.dataflow():
            a = R.exp(x)
            b = a
            c = R.add(a, b)
            y = c
            R.output(y)
        return y

    @ir_module()
    def Expected(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        with R.dataflow():
            b = R.exp(x)
            y = R.add(b, b)
            R.output(y)
        return y

    after = merged(Before)
    assert_structural_equal(after, Expected["main"])
    assert [binding.var.name for binding in after.body.blocks[0].bindings] == ["b", "y"]


def test_parameters_keep_theirs():
    @ir_module()
    def Before(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        with R.dataflow():
            a = x
            b = R.exp(a)
            R.output(b)
        return b

    after = merged(Before)
    (binding,) = after.body.blocks[0].bindings
    assert binding.value.args[0].same_as(after.params[0])


def test_two_results_of_one_value():
    """One name takes over; the other becomes an alias."""

    @ir_module()
    def Before(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            a = R.exp(x)
            y = a
            z = a
            R.output(y, z)
        return (y, z)

    after = merged(Before)
    (binding,) = after.body.blocks[0].bindings
    assert binding.var.name == "y"
    assert [field.same_as(binding.var) for field in after.body.body.fields] == [True, True]


def test_a_branch_does_not_rename_what_is_outside():
    @ir_module()
    def Before(x: R.Tensor((4,), "float32"), p: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        a = R.exp(x)
        if p:
            b = a
            y = R.negative(b)
        else:
            y = R.add(a, a)
        return y

    after = merged(Before)
    first, branch = after.body.blocks[0].bindings
    assert first.var.name == "a"
    (negative,) = branch.value.true_branch.blocks[0].bindings
    assert negative.value.args[0].same_as(first.var)


def test_dropped_variables_are_replaced_in_chains():
    merges = Merges()
    x, y, z = (relax.Var(name, relax.TensorType((4,), "float32")) for name in "xyz")
    assert merges.drop(y, x) == [] and merges.drop(z, y) == []
    assert merges.resolve(z).same_as(x)


def test_bindings_that_export_a_value_stay():
    merges = Merges()
    ty = relax.TensorType((4,), "float32")
    inner, outer = relax.DataflowVar("inner", ty), relax.Var("outer", ty)
    (alias,) = merges.drop(outer, inner)
    assert alias.var.same_as(outer) and alias.value.same_as(inner)
    assert merges.resolve(outer).same_as(outer)


def test_nothing_to_merge():
    @ir_module()
    def Mod(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return R.exp(x)

    func = Mod["main"]
    assert Merges().apply(func) is func
