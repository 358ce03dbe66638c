"""A block as several: some bindings outside of dataflow, and the variables that others use then."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_map

from .blocks import used_vars
from .op_names import IN_PLACE
from .rewriting import op_name, typed, with_body


def split_block(bindings: list[relax.Binding], cut: set[relax.Var], is_dataflow: bool) -> list[relax.BindingBlock]:
    """Blocks in place of one: what is cut out stands in blocks that are not dataflow, the rest in blocks that are.

    Blocks of one kind that follow each other become one whenever TVM looks at them.
    """
    stretches: list[tuple[bool, list[relax.Binding]]] = []
    for binding in bindings:
        inside = binding.var not in cut and (is_dataflow or _may_be_dataflow(binding))
        if not stretches or stretches[-1][0] != inside:
            stretches.append((inside, []))
        stretches[-1][1].append(binding)
    return [(relax.DataflowBlock if inside else relax.BindingBlock)(part) for inside, part in stretches]


def _may_be_dataflow(binding: relax.Binding) -> bool:
    value = binding.value
    if isinstance(value, (relax.If, relax.Function)) or op_name(value) in IN_PLACE:
        return False
    return not isinstance(value, relax.Call) or (isinstance(value.op, tvm.ir.Op) and bool(value.op.get_attr("FPurity")))


def with_split_blocks(expr: relax.Expr, cut: set[relax.Var]) -> relax.Expr:
    """A body, or a branch, with the bindings of some variables in blocks that are not dataflow."""
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    for block in expr.blocks:
        bindings = [_with_cuts_inside(binding, cut) for binding in block.bindings]
        if any(binding.var in cut for binding in bindings):
            blocks += split_block(bindings, cut, isinstance(block, relax.DataflowBlock))
        else:
            blocks.append(type(block)(bindings, block.span))
    return typed(relax.SeqExpr(with_shared_variables(blocks), expr.body, expr.span), expr.ty)


def _with_cuts_inside(binding: relax.Binding, cut: set[relax.Var]) -> relax.Binding:
    value = binding.value
    if isinstance(value, relax.If):
        branches = [with_split_blocks(branch, cut) for branch in (value.true_branch, value.false_branch)]
        value = typed(relax.If(value.cond, *branches, value.span), value.ty)
    elif isinstance(value, relax.Function):
        value = with_body(value, with_split_blocks(value.body, cut))
    else:
        return binding
    return relax.VarBinding(binding.var, value, binding.span)


def with_shared_variables(blocks: list[relax.BindingBlock]) -> list[relax.BindingBlock]:
    """Variables of a dataflow block that others use now, as variables that others may use."""
    home = {binding.var: number for number, block in enumerate(blocks) for binding in block.bindings}
    new: dict[relax.Var, relax.Var] = {}
    for number, block in enumerate(blocks):
        plain = not isinstance(block, relax.DataflowBlock)
        for binding in block.bindings:
            if plain and isinstance(binding.var, relax.DataflowVar):
                new[binding.var] = relax.Var(binding.var.name, binding.var.ty)
            for var in used_vars(binding.value):
                if isinstance(var, relax.DataflowVar) and home.get(var, number) != number:
                    new.setdefault(var, relax.Var(var.name, var.ty))
    if not new:
        return blocks

    def renamed(binding: relax.Binding) -> relax.Binding:
        value = structural_map(binding.value, (relax.Var, lambda var: new.get(var, var)))
        var = new.get(binding.var, binding.var)
        if isinstance(binding, relax.MatchCast):
            return relax.MatchCast(var, value, binding.ty, binding.span)
        return relax.VarBinding(var, value, binding.span)

    return [type(block)([renamed(binding) for binding in block.bindings], block.span) for block in blocks]
