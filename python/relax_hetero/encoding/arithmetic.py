"""Arithmetic of problems: the number of multiplications and additions, and their element types."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from ..target.element_types import short_name
from .problem import (
    APPEND,
    AttentionProblem,
    CachedAttentionProblem,
    ConvProblem,
    Dim,
    MatmulProblem,
    QuantizedMatmulProblem,
)

FP16_PARTIAL_SUMS = "relax_hetero.short_sums"
"""Attribute of a PrimFunc: the operand type in which it adds products a few at a time, before float32."""


def operations(problem: Any) -> int:
    """Multiplications and additions of a problem's products, a multiply-add being two.

    Filter taps in the padding count, as is usual; epilogues and softmax do not. The count is 0 for a problem without
    products, and where an extent is symbolic.
    """
    if isinstance(problem, MatmulProblem):
        return (4 if problem.second else 2) * _count(*problem.result.shape, problem.lhs.size("k"))
    if isinstance(problem, ConvProblem):
        return 2 * _count(*problem.result.shape, *problem.weight.shape[1:])
    if isinstance(problem, QuantizedMatmulProblem):
        used = 1 if problem.shares is None else problem.shares.shape[1]
        return 2 * problem.products * _count(*problem.result.shape, used, problem.depth)
    if isinstance(problem, AttentionProblem):
        sizes = dict(problem.sizes)
        scores = _count(*(sizes[name] for name in ("b", "h", "m", "n")))
        return 2 * scores * (_count(sizes["d"]) + _count(sizes["e"]))
    return 0


def _count(*extents: Dim) -> int:
    """The product of extents; 0 if one is symbolic."""
    return prod(extent if isinstance(extent, int) else 0 for extent in extents)


def precision(problem: Any) -> str:
    """The element types of a problem's products; empty for a problem without products.

    ``f32`` or ``bf16`` where both operands are of one such type and sums have 32 bits or more; ``u8*s8->s32`` with the
    sums' type otherwise; ``int4*f32`` and ``int8*f32`` for block-quantized weights of 4 and 8 bits, ``q5_0*f32`` for
    those of a file's format.
    """
    if isinstance(problem, MatmulProblem):
        return _product(problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype)
    if isinstance(problem, ConvProblem):
        return _product(problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    if isinstance(problem, QuantizedMatmulProblem):
        form = problem.form
        weight = form.name if form is not None and form.superblock_bytes else f"int{problem.bits}"
        return f"{weight}*{short_name(problem.lhs_type)}"
    if isinstance(problem, AttentionProblem):
        return _product(problem.query.dtype, problem.key.dtype, "float32")
    if isinstance(problem, CachedAttentionProblem) and problem.rows != APPEND:
        return _product(problem.out.dtype, problem.page_type, "float32")
    return ""


def with_fp16_partial_sums(text: str, dtype: str) -> str:
    """The text of `precision` for a kernel with fp16 partial accumulation: ``f16*f16->f16+f32``."""
    short = short_name(dtype)
    return f"{short}*{short}->{short}+f32" if text == short else text


def precision_of_arguments(dtypes: Iterable[str]) -> str:
    """The element types of any other kernel's arguments, each once: ``f32, s64``."""
    return ", ".join(dict.fromkeys(map(short_name, dtypes)))


def _product(lhs: str, rhs: str, sums: str) -> str:
    if lhs == rhs and "float" in lhs and "float" in sums:
        return short_name(lhs)
    return f"{short_name(lhs)}*{short_name(rhs)}->{short_name(sums)}"
