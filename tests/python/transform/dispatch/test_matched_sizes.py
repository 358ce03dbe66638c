"""Sizes that are known in a branch only: their ``match_cast`` stands outside of dataflow blocks."""

import tvm
from tvm import relax, tirx

from relax_hetero.transform.dispatch.canonical_extents import isolate_match_casts


def _module(is_nested):
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    flag, x = relax.Var("c", relax.TensorType((), "bool")), relax.Var("x", relax.TensorType((n,), "float32"))
    ty = relax.TensorType((m,), "float32")
    first = relax.DataflowVar("first", relax.TensorType((n,), "float32"))
    rows, last = relax.DataflowVar("rows", ty), relax.Var("last", ty)
    bindings = [
        relax.VarBinding(first, relax.op.exp(x)),
        relax.MatchCast(rows, first, ty),
        relax.VarBinding(last, relax.op.add(rows, rows)),
    ]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], last)
    if is_nested:
        y = relax.Var("y", relax.TensorType(dtype="float32", ndim=1))
        branches = relax.If(flag, body, relax.SeqExpr([], x))
        body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(y, branches)])], y)
    func = relax.Function([flag, x], body, relax.TensorType(dtype="float32", ndim=1))
    return relax.transform.Normalize()(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))


def test_a_match_of_a_branch_stands_between_dataflow_blocks():
    branch = isolate_match_casts(_module(is_nested=True))["main"].body.blocks[0].bindings[0].value.true_branch
    kinds = [isinstance(block, relax.DataflowBlock) for block in branch.blocks]
    assert kinds == [True, False, True]
    assert isinstance(branch.blocks[1].bindings[0], relax.MatchCast)
    used_outside = [branch.blocks[0].bindings[0].var, branch.blocks[1].bindings[0].var]
    assert not any(isinstance(var, relax.DataflowVar) for var in used_outside)


def test_matches_of_a_function_itself_stay():
    mod = _module(is_nested=False)
    assert isolate_match_casts(mod) is mod
