"""``match_cast`` of branches in blocks of their own, because stock FuseOps fails at one in a branch's dataflow block.

Before::

    if c:
        with R.dataflow():
            lv = R.exp(x)
            rows = R.match_cast(lv, R.Tensor((m,), "float32"))
            gv = R.add(rows, rows)
            R.output(gv)

After, where ops are fused before and behind it::

    if c:
        with R.dataflow():
            lv = R.exp(x)
            R.output(lv)
        rows = R.match_cast(lv, R.Tensor((m,), "float32"))
        with R.dataflow():
            gv = R.add(rows, rows)
            R.output(gv)
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.rewriting import relax_functions, typed, with_body, with_functions
from ..ir.split_blocks import split_block, with_shared_variables


def with_matches_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with each ``match_cast`` of a branch outside of dataflow blocks; those of a function's own stay."""
    functions = {}
    for gv, func in relax_functions(mod):
        body = _sequence(func.body, is_branch=False)
        if not body.same_as(func.body):
            functions[gv] = with_body(func, body)
    return with_functions(mod, functions) if functions else mod


def _sequence(expr: relax.Expr, is_branch: bool) -> relax.Expr:
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    for block in expr.blocks:
        is_dataflow = isinstance(block, relax.DataflowBlock)
        bindings = list(block.bindings) if is_dataflow else [_nested(binding) for binding in block.bindings]
        matches = {binding.var for binding in bindings if isinstance(binding, relax.MatchCast)}
        if is_branch and is_dataflow and matches:
            blocks += split_block(bindings, matches, is_dataflow)
        elif all(new.same_as(old) for new, old in zip(bindings, block.bindings, strict=True)):
            blocks.append(block)
        else:
            blocks.append(type(block)(bindings, block.span))
    if len(blocks) == len(expr.blocks) and all(a.same_as(b) for a, b in zip(blocks, expr.blocks, strict=True)):
        return expr
    return typed(relax.SeqExpr(with_shared_variables(blocks), expr.body, expr.span), expr.ty)


def _nested(binding: relax.Binding) -> relax.Binding:
    value = binding.value
    if not isinstance(value, relax.If):
        return binding
    then, other = (_sequence(branch, is_branch=True) for branch in (value.true_branch, value.false_branch))
    if then.same_as(value.true_branch) and other.same_as(value.false_branch):
        return binding
    return relax.VarBinding(binding.var, typed(relax.If(value.cond, then, other, value.span), value.ty), binding.span)
