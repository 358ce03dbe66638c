"""What stands between the two products of an attention: elementwise work, softmax, zeros in place of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from ...encoding.expression import Expression, Term
from ..ir.blocks import Block, same_shape, shape_of
from ..ir.op_names import CAST
from ..ir.relax_expressions import scalar_of, to_expression
from ..ir.rewriting import op_name

_MATMUL = "relax.matmul"
HALVES = ("bfloat16", "float16")
"""Types that products round their operands to; what comes between two products is of float32."""


@dataclass
class Scores:
    """What stands before softmax: the product, the bindings between, and what they compute."""

    product: relax.Call
    inside: list[int]
    expression: Expression
    operands: list[relax.Expr]


@dataclass
class Weighted:
    """What stands after softmax: the product with values."""

    index: int
    inside: list[int]
    nan_to_zero: bool


def scores_before(block: Block, value: relax.Expr) -> Scores | None:
    """Elementwise work from a product to `value`, which has no other users."""
    if not isinstance(value, relax.Var) or block.sole_user(value) is None or value not in block.definitions:
        return None
    call = block.definitions[value]
    here = block.positions[value]
    if op_name(call) == _MATMUL:
        return Scores(call, [here], Expression.operand(0), [])
    if op_name(call) == "relax.where":
        step: tuple[Expression, list[relax.Expr]] | None = _choice(call)
    else:
        step = to_expression(call)
    if step is None:
        return None
    expression, operands = step
    for position, operand in enumerate(operands):
        shape = shape_of(operand)
        if shape is None or not same_shape(shape, shape_of(value) or []):
            continue
        before = scores_before(block, operand)
        if before is not None:
            terms = [Expression.operand(0)] * len(operands)
            masks = list(before.operands)
            for other, expr in enumerate(operands):
                terms[other] = before.expression if other == position else _operand(expr, masks)
            return Scores(before.product, [*before.inside, here], expression.substitute(terms), masks)
    return None


def _operand(expr: relax.Expr, masks: list[relax.Expr]) -> Expression:
    for index, known in enumerate(masks):
        if known.same_as(expr):
            return Expression.operand(index + 1)
    masks.append(expr)
    return Expression.operand(len(masks))


def _choice(call: relax.Call) -> tuple[Expression, list[relax.Expr]] | None:
    """``where`` as an expression; numbers, infinite ones too, stand in it."""
    operands: list[relax.Expr] = []
    terms = []
    for arg in call.args:
        number = _number(arg)
        if number is None:
            terms.append(Term("operand", (), (len(operands),)))
            operands.append(arg)
        else:
            terms.append(Term("number", (), (number,)))
    if terms[0].op == "number" or (terms[1].op, terms[2].op) == ("number", "number"):
        return None
    return Expression(Term("where", tuple(terms))), operands


def _number(expr: relax.Expr) -> float | None:
    if isinstance(expr, tvm.ir.GenericConst) and "float" in str(expr.ty.dtype):
        array = expr.value.numpy()
        return float(array.reshape(-1)[0]) if array.size == 1 else None
    return None


def weighted_after(block: Block, index: int) -> Weighted | None:
    """The product that softmax, perhaps with zeros in place of NaN, is the left operand of."""
    var = block.bindings[index].var
    inside = [index]
    passed = _no_choice(block, var)
    if passed is not None:
        inside.append(passed)
        var = block.bindings[passed].var
    guard = _zero_for_nan(block, var)
    if guard is not None:
        inside += guard
        var = block.bindings[guard[-1]].var
    user = block.sole_user(var)
    if user is not None and rounds(block.bindings[user].value):
        inside.append(user)
        var = block.bindings[user].var
        user = block.sole_user(var)
    if user is None:
        return None
    call = block.bindings[user].value
    if op_name(call) != _MATMUL or not call.args[0].same_as(var) or call.args[1].same_as(var):
        return None
    return Weighted(user, [*inside, user], guard is not None)


def rounds(value: relax.Expr) -> bool:
    """Whether this is a cast from float32 to half precision."""
    is_cast = op_name(value) == CAST and str(value.args[0].ty.dtype) == "float32"
    return is_cast and str(value.attrs.dtype) in HALVES


def _zero_for_nan(block: Block, var: relax.Var) -> list[int] | None:
    """The bindings of ``where(isnan(x), 0, x)`` where they are all that use x."""
    users = block.users.get(var, [])
    if len(users) != 2 or not block.stays(var):
        return None
    test, choice = (block.bindings[user] for user in users)
    if op_name(test.value) != "relax.isnan" or op_name(choice.value) != "relax.where":
        return None
    condition, then, otherwise = choice.value.args
    is_guard = condition.same_as(test.var) and scalar_of(then) == 0 and otherwise.same_as(var)
    return users if is_guard and block.sole_user(test.var) == users[1] else None


def _no_choice(block: Block, var: relax.Var) -> int | None:
    """The binding of ``where(condition, y, x)`` of a constant condition that holds nowhere, the only user of x."""
    user = block.sole_user(var)
    if user is None or op_name(block.bindings[user].value) != "relax.where":
        return None
    condition, _, otherwise = block.bindings[user].value.args
    is_never = isinstance(condition, tvm.ir.GenericConst) and not condition.value.numpy().any()
    is_same = same_shape(shape_of(var) or [], shape_of(block.bindings[user].var) or [])
    return user if is_never and is_same and otherwise.same_as(var) else None
