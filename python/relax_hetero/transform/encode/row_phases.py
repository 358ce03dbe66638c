"""Which work on rows the kernel of a matrix product does itself, once the rows of its result are complete."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import RowsProblem
from ...encoding.resolver import solves
from ...op.encoded import ELEMENTWISE, MATMUL, UNSET, encoded_op
from ...op.rows import ROWS
from ..ir.blocks import same_shape
from ..ir.rewriting import op_name, walk_scopes
from .encoding_layouts import target_of
from .epilogues import may_write, user_counts
from .stored_tensors import shape_of

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
        What the kernels of products take in already (`fused_variables`).
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
        and same_shape(shape_of(arg.ty), shape_of(result))
        and solves(target_of(result.vdevice), RowsProblem)
    )
