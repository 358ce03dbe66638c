"""Which elementwise ops the kernel of a product or convolution applies to its accumulators before it stores them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax
from tvm_ffi import structural_walk

from ...encoding.expression import Expression
from ...op.encoded import ELEMENTWISE, PRODUCTS, encoded_op
from ..ir.op_names import IN_PLACE
from ..ir.rewriting import op_name, walk_bindings, walk_scopes


@dataclass(frozen=True)
class Chain:
    """A product and elementwise ops one after another, each the only user of the last.

    Attributes
    ----------
    product : relax.Call
        The matmul or conv.
    expression : Expression
        Of all ops together, ``x0`` the product; an operand alone where there are none.
    others : tuple of relax.Expr
        Operands x1, x2, ...
    """

    product: relax.Call
    expression: Expression = Expression.operand(0)
    others: tuple[relax.Expr, ...] = ()

    def then(self, call: relax.Call) -> Chain:
        """With one more op, whose first operand is the chain's end."""
        end, operands = call.args[0], list(self.others)
        places = []
        for arg in call.args:
            if arg.same_as(end):
                places.append(self.expression)
                continue
            known = next((i for i, other in enumerate(operands) if other.same_as(arg)), len(operands))
            operands[known:] = operands[known:] or [arg]
            places.append(Expression.operand(1 + known))
        whole = Expression.parse(str(call.attrs.expression)).substitute(places)
        return Chain(self.product, whole, tuple(operands))


def fused_variables(func: relax.Function) -> set[relax.Var]:
    """Products and elementwise results that exist only inside a kernel: their one user is the next of their chain.

    A product is computed where its chain ends; none is moved past an op that may write into an operand.
    """
    users = user_counts(func)
    scopes: dict[relax.Var, int] = {}
    chained: set[relax.Var] = set()
    fused: set[relax.Var] = set()
    for number, bindings in enumerate(walk_scopes(func)):
        for binding in bindings:
            if may_write(binding.value):
                chained.clear()
            var, call = binding.var, binding.value
            scopes[var] = number
            name = encoded_op(call)
            if name in PRODUCTS:
                chained.add(var)
            elif name == ELEMENTWISE:
                first = call.args[0]
                if first in chained and users.get(first, 0) == 1 and scopes[first] == number:
                    fused.add(first)
                    chained.add(var)
    return fused


def may_write(value: relax.Expr) -> bool:
    """Whether this may change a tensor in place: by its op, or by code that is not Relax's."""
    if not isinstance(value, relax.Call):
        return False
    name = op_name(value)
    return name in IN_PLACE or (name is None and not isinstance(value.op, relax.Var))


def user_counts(func: relax.Function) -> dict[relax.Var, int]:
    """How many bindings, and results of sequences, use each variable."""
    counts: dict[relax.Var, int] = {}

    def count(expr: relax.Expr) -> None:
        found: dict[relax.Var, None] = {}
        structural_walk(expr, (relax.Var, lambda var: found.setdefault(var)))
        for var in found:
            counts[var] = counts.get(var, 0) + 1

    for binding in walk_bindings(func):
        if isinstance(binding.value, relax.Call):
            for var in dict.fromkeys(arg for arg in binding.value.args if isinstance(arg, relax.Var)):
                counts[var] = counts.get(var, 0) + 1
            for arg in binding.value.args:
                if not isinstance(arg, relax.Var):
                    count(arg)
        else:
            count(binding.value)
    count(func.body.body)
    return counts
