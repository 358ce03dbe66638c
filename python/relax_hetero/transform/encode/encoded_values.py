"""Which variables of a function hold encoded tensors, and how those are stored."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.packed_layout import PackedLayout
from ...op.encoded import UNSET, encoded_op
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name, walk_bindings


@dataclass(frozen=True)
class EncodedValue:
    """What is known of an encoded tensor.

    Attributes
    ----------
    encoding : Encoding
    layout : PackedLayout or None
        None before SpecializeEncodings.
    """

    encoding: Encoding
    layout: PackedLayout | None


def encoded_values(func: relax.Function) -> dict[relax.Var, EncodedValue]:
    """The variables of `func` that hold encoded tensors, in program order.

    Those are the results of every encoded op but `unset_encoding`, and what `to_vdevice` or another name makes of
    them: a transfer keeps encoding and layout.
    """
    found: dict[relax.Var, EncodedValue] = {}
    for binding in walk_bindings(func):
        value = encoded_value(binding.value, found)
        if value is not None:
            found[binding.var] = value
    return found


def encoded_value(expr: relax.Expr, known: dict[relax.Var, EncodedValue]) -> EncodedValue | None:
    """What `expr` is as an encoded tensor, None if it is none; `known` are the variables before it."""
    if isinstance(expr, relax.Var):
        return known.get(expr)
    name = encoded_op(expr)
    if name is not None:
        return None if name == UNSET else EncodedValue(Encoding.parse(expr.attrs.encoding), layout_of(expr))
    if op_name(expr) == TRANSFER and isinstance(expr.args[0], relax.Var):
        return known.get(expr.args[0])
    return None


def layout_of(call: relax.Call) -> PackedLayout | None:
    """The layout an encoded op names, None where it names none yet."""
    return PackedLayout.parse(call.attrs.layout) if call.attrs.layout else None
