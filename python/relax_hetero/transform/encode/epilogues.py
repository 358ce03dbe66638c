"""Which work behind a product or convolution its kernel takes along, before its result is ever stored.

Elementwise ops become its epilogue, applied to accumulators in registers (`fused_variables`). Work on rows becomes a
phase that runs once the rows of the result are complete (`find_row_phases`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax
from tvm_ffi import structural_walk

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import RowPhase
from ...encoding.resolver import answers_of
from ...op.encoded import ELEMENTWISE, MATMUL, PRODUCTS, UNSET, encoded_op
from ...op.rows import ROWS
from ..ir.blocks import same_shape
from ..ir.callee_devices import target_of
from ..ir.op_names import IN_PLACE
from ..ir.rewriting import op_name, walk_bindings, walk_scopes
from .encoded_values import extents_of


@dataclass(frozen=True)
class Chain:
    """A product and elementwise ops one after another, each the only user of the last.

    Attributes
    ----------
    product : relax.Call
        The matmul or conv.
    expression : Expression
        Expression of all ops together, ``x0`` the product; an operand alone where there are none.
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
    """Return whether this may change a tensor in place: by its op, or by code that is not Relax's."""
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


_TYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class RowPhases:
    """The products of one function that work on rows follows.

    Attributes
    ----------
    products : dict
        From the variable of `rows` to the operand that is the product's plain result.
    plain : set of Var
        Those operands, which exist only inside a kernel.
    encoded : set of Var
        The results that they are the plain form of, likewise.
    """

    products: dict[relax.Var, relax.Var]
    plain: set[relax.Var]
    encoded: set[relax.Var]


def find_row_phases(func: relax.Function, fused: set[relax.Var]) -> RowPhases:
    """Work on rows whose operand is the result of a product, stored row by row, that nothing else uses.

    Parameters
    ----------
    func : relax.Function
        With layouts.
    fused : set of relax.Var
        Variables that the kernels of products compute already (`fused_variables`).
    """
    phases = RowPhases({}, set(), set())
    users = user_counts(func)
    for bindings in walk_scopes(func):
        known: dict[relax.Var, relax.Expr] = {}
        for binding in bindings:
            if may_write(binding.value):
                known.clear()
            known[binding.var] = binding.value
            if op_name(binding.value) == ROWS:
                found = next((arg for arg in binding.value.args if _joins(arg, binding, known, users, fused)), None)
                if found is not None:
                    phases.products[binding.var] = found
                    phases.plain.add(found)
                    phases.encoded.add(known[found].args[0])
    return phases


def _joins(
    arg: relax.Expr,
    rows: relax.Binding,
    known: dict[relax.Var, relax.Expr],
    users: dict[relax.Var, int],
    fused: set[relax.Var],
) -> bool:
    unset = known.get(arg) if isinstance(arg, relax.Var) else None
    if unset is None or encoded_op(unset) != UNSET or users.get(arg, 0) != 1 or users.get(unset.args[0], 0) != 1:
        return False
    last = known.get(unset.args[0])
    while last is not None and encoded_op(last) == ELEMENTWISE and last.args[0] in fused:
        last = known.get(last.args[0])
    if last is None or encoded_op(last) != MATMUL or not PackedLayout.parse(unset.attrs.layout).is_identity:
        return False
    types = [str(other.ty.dtype) for other in rows.value.args]
    result = rows.var.ty
    names = Encoding.parse(unset.attrs.encoding).index_map
    return (
        str(arg.ty.dtype) == str(result.dtype)
        and all(dtype in _TYPES for dtype in types)
        and names[-1] == "n"
        and same_shape(extents_of(arg.ty), extents_of(result))
        and RowPhase in answers_of(target_of(result.vdevice)).problems
    )
