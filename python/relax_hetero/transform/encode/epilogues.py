"""Fusion into the kernel of a product or convolution: epilogues and row phases.

Elementwise ops after the product become its epilogue, applied to accumulators in registers (`fused_variables`). A row
program (softmax, a norm, other row reductions) becomes a second phase of the kernel, which runs once the rows of the
result are complete (`find_row_phases`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import RowPhase
from ...encoding.resolver import resolver_or_default
from ...op.encoded import ELEMENTWISE, MATMUL, PRODUCTS, UNSET, encoded_op
from ...op.rows import ROWS
from ...tir.core.walks import nodes
from ..ir.blocks import same_shape, used_vars
from ..ir.callee_devices import target_of
from ..ir.op_names import IN_PLACE
from ..ir.rewriting import op_name, walk_bindings, walk_scopes
from .encoded_values import extents_of


@dataclass(frozen=True)
class Chain:
    """A product and a sequence of elementwise ops, each the only user of the one before."""

    product: relax.Call  # the matmul or conv
    # All elementwise ops as one expression, with the product as ``x0``; ``x0`` without ops.
    expression: Expression = Expression.operand(0)
    epilogue_operands: tuple[relax.Expr, ...] = ()  # Operands x1, x2, ... of `expression`.

    def then(self, call: relax.Call) -> Chain:
        """The chain with one more op, whose first operand is the chain's end."""
        end, operands = call.args[0], list(self.epilogue_operands)
        replacements = []
        for arg in call.args:
            if arg.same_as(end):
                replacements.append(self.expression)
                continue
            index = next((i for i, operand in enumerate(operands) if operand.same_as(arg)), len(operands))
            if index == len(operands):
                operands.append(arg)
            replacements.append(Expression.operand(1 + index))
        expression = Expression.parse(str(call.attrs.expression)).substitute(replacements)
        return Chain(self.product, expression, tuple(operands))


def fused_variables(func: relax.Function) -> set[relax.Var]:
    """Products and elementwise results that exist only inside a kernel: their only user is the next op of their chain.

    A product is computed at the end of its chain; it is not moved past an op that may write into an operand. The
    resolver of its device may want none (`EncodingResolver.fuses_elementwise`).
    """
    users = user_counts(func)
    scopes: dict[relax.Var, int] = {}
    chain_ends: set[relax.Var] = set()
    fused: set[relax.Var] = set()
    for scope, bindings in enumerate(walk_scopes(func)):
        for binding in bindings:
            if may_write(binding.value):
                chain_ends.clear()
            var, call = binding.var, binding.value
            scopes[var] = scope
            name = encoded_op(call)
            if name in PRODUCTS:
                if resolver_or_default(target_of(var.ty.vdevice)).fuses_elementwise:
                    chain_ends.add(var)
            elif name == ELEMENTWISE:
                first = call.args[0]
                if first in chain_ends and users.get(first, 0) == 1 and scopes[first] == scope:
                    fused.add(first)
                    chain_ends.add(var)
    return fused


def may_write(value: relax.Expr) -> bool:
    """Return whether a value may write to a tensor: an in-place op, or a call of a global or packed function."""
    if not isinstance(value, relax.Call):
        return False
    name = op_name(value)
    return name in IN_PLACE or (name is None and not isinstance(value.op, relax.Var))


def user_counts(func: relax.Function) -> dict[relax.Var, int]:
    """Number of bindings, and results of sequences, that use each variable."""
    counts: dict[relax.Var, int] = {}

    def count(expr: relax.Expr) -> None:
        for var in set(nodes(expr, relax.Var)):
            counts[var] = counts.get(var, 0) + 1

    for binding in walk_bindings(func):
        if isinstance(binding.value, relax.Call):
            for var in used_vars(binding.value):
                counts[var] = counts.get(var, 0) + 1
        else:
            count(binding.value)
    count(func.body.body)
    return counts


_ROW_PHASE_TYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class RowPhases:
    """Row programs of one function that kernels of products compute as their second phase."""

    # Variable of the product's plain result, an operand of the row program, by the row program's variable.
    products: dict[relax.Var, relax.Var]
    plain: set[relax.Var]  # the values of `products`, which exist only inside a kernel
    encoded: set[relax.Var]  # encoded results from which `plain` are unpacked; they, too, exist only inside a kernel


def find_row_phases(func: relax.Function, fused: set[relax.Var]) -> RowPhases:
    """Find row programs with an operand that is the row-major result of a product and has no other use.

    `func`: function with layouts. `fused`: variables that exist only inside kernels of products (`fused_variables`).
    """
    phases = RowPhases({}, set(), set())
    users = user_counts(func)
    for bindings in walk_scopes(func):
        values: dict[relax.Var, relax.Expr] = {}
        for binding in bindings:
            if may_write(binding.value):
                values.clear()
            values[binding.var] = binding.value
            if op_name(binding.value) == ROWS:
                args = binding.value.args
                product = next((arg for arg in args if _can_fuse(arg, binding, values, users, fused)), None)
                if product is not None:
                    phases.products[binding.var] = product
                    phases.plain.add(product)
                    phases.encoded.add(values[product].args[0])
    return phases


def _can_fuse(
    arg: relax.Expr,
    rows: relax.Binding,
    values: dict[relax.Var, relax.Expr],
    users: dict[relax.Var, int],
    fused: set[relax.Var],
) -> bool:
    """Return whether `arg` is the result of a product whose kernel can compute `rows`, the only user."""
    unset = values.get(arg) if isinstance(arg, relax.Var) else None
    if unset is None or encoded_op(unset) != UNSET or users.get(arg, 0) != 1 or users.get(unset.args[0], 0) != 1:
        return False
    producer = values.get(unset.args[0])
    while producer is not None and encoded_op(producer) == ELEMENTWISE and producer.args[0] in fused:
        producer = values.get(producer.args[0])
    if producer is None or encoded_op(producer) != MATMUL or not PackedLayout.parse(unset.attrs.layout).is_identity:
        return False
    dtypes = [str(operand.ty.dtype) for operand in rows.value.args]
    result = rows.var.ty
    index_map = Encoding.parse(unset.attrs.encoding).index_map
    return (
        str(arg.ty.dtype) == str(result.dtype)
        and all(dtype in _ROW_PHASE_TYPES for dtype in dtypes)
        and index_map[-1] == "n"
        and same_shape(extents_of(arg.ty), extents_of(result))
        and RowPhase in resolver_or_default(target_of(result.vdevice)).problems
    )
