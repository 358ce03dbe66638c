"""Rules of `ToMixedPrecision`: the roles of Relax ops, from `op.traits`, and the rounding of products."""

from __future__ import annotations

from math import prod

import numpy as np
import tvm
from tvm import relax, tirx

from ...op.traits import TRAITS, ops_where, traits_of
from ...target.element_types import numpy_dtype
from ..ir.blocks import shape_of
from ..ir.rewriting import op_name, tensor_types, with_args

LOW_TYPES = ("bfloat16", "float16")
WIDE_TYPE = "float32"

MIN_TERMS = 8
"""Minimum number of terms of a product that is rounded. Shorter ones gain nothing, and their operands may be positions,
as in a rotary embedding, which eight bits do not represent."""


PRODUCTS = {op: 3 if row.kind == "attention" else 2 for op, row in TRAITS.items() if row.precision == "product"}
"""Ops that are computed in low precision, with the number of their leading operands that are rounded."""

MOVING = ops_where(lambda traits: traits.precision == "moved")
"""Ops whose results are elements of their operands: rounding commutes with them."""

STORED_ANYWAY = ops_where(lambda traits: traits.precision == "stored")
"""Ops in float32 whose operand is always stored in memory, because they are separate kernels; rounding is harmless."""

READ_EXACTLY = ops_where(lambda traits: traits.precision == "exact")
"""Norms, softmax and reductions: float32 ops read their exact results, even if products read them rounded.

In a residual stream between norms this halves the error (BERT-base in bfloat16: 0.4 % of the result instead of 0.9 %),
for 0.6 % of the time.
"""
ROUNDED_ON_GPUS = ("float16",)
"""Types in which GPUs read even these results rounded. An exact result of a norm between two layers takes a second
kernel there for the rounded one: 24 of BERT-base's kernels. Eleven significant bits suffice for that, eight do not."""

NORMS = ops_where(lambda traits: traits.kind in ("row_norm", "channel_norm"))
"""Norms whose operand, in the types of `ROUNDED_ON_GPUS`, is stored rounded on GPUs if they are its only reader. A sum
with other readers, as in pre-norm networks, is not rounded."""


def is_wide(ty: tvm.ir.Type) -> bool:
    """Return whether a type has at least one tensor, and only float32 ones."""
    tensors = list(tensor_types(ty))
    if not tensors or not all(t.dtype is not None and str(t.dtype) == WIDE_TYPE for t in tensors):
        return False
    return isinstance(ty, relax.TensorType) or all(isinstance(field, relax.TensorType) for field in ty.fields)


def with_dtype(ty: tvm.ir.Type, dtype: str) -> tvm.ir.Type:
    """The type with another element type; `is_wide` must hold."""
    if isinstance(ty, tvm.ir.TupleType):
        return tvm.ir.TupleType([with_dtype(field, dtype) for field in ty.fields])
    return relax.TensorType(ty.shape, dtype, ty.vdevice, -1 if ty.shape is not None else int(ty.ndim))


def is_product(call: relax.Expr) -> bool:
    """Return whether a call is a product of float32 tensors with enough terms to gain from low precision."""
    name = op_name(call)
    if name not in PRODUCTS or not is_wide(call.ty) or not all(is_wide(arg.ty) for arg in call.args):
        return False
    shape = shape_of(call.args[1])
    if shape is None or traits_of(name).kind == "attention":
        return True
    reduced = shape[-2:][:1] if name == "relax.matmul" else _window(shape, str(call.attrs.kernel_layout))
    return prod(int(extent) if isinstance(extent, tirx.IntImm) else MIN_TERMS for extent in reduced) >= MIN_TERMS


def _window(shape: list[tirx.Expr], layout: str) -> list[tirx.Expr]:
    return [extent for extent, letter in zip(shape, layout, strict=False) if letter != "O"]


def low_product(call: relax.Call, operands: list[relax.Expr], dtype: str) -> tuple[relax.Expr, tvm.ir.Type]:
    """A product of rounded operands, and its type: float32 if the op has an out_dtype, else the low type."""
    name = op_name(call) or ""
    if name == "relax.matmul" or traits_of(name).kind == "conv":
        return with_args(call, operands, out_dtype=WIDE_TYPE), call.ty
    return with_args(call, operands), with_dtype(call.ty, dtype)


def low_constant(constant: tvm.ir.GenericConst, dtype: str) -> tvm.ir.GenericConst | None:
    """A float32 constant rounded at compile time; None if a finite number would become infinite."""
    array = constant.value.numpy()
    with np.errstate(over="ignore"):
        rounded = array.astype(numpy_dtype(dtype))
    if np.isinf(rounded.astype(WIDE_TYPE)).sum() > np.isinf(array).sum():
        return None
    return tvm.ir.GenericConst(tvm.runtime.tensor(rounded), with_dtype(constant.ty, dtype))
