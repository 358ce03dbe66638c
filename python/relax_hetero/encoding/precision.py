"""In which element types a problem's products are computed, as people write it: ``u8*s8->s32``, ``bf16``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..target.element_types import short_name
from .problem import AttentionProblem, BlockProductProblem, ConvProblem, MatmulProblem


def precision(problem: Any) -> str:
    """The element types of a problem's products.

    Parameters
    ----------
    problem : MatmulProblem, ConvProblem, BlockProductProblem, AttentionProblem or anything else

    Returns
    -------
    str
        ``f32`` or ``bf16`` where both operands are of one such type, which have sums of 32 bits or more;
        ``u8*s8->s32`` with the sums' type for others; ``int4*f32`` for weights of 4 bits that are unpacked in the
        kernel; empty where the problem has no products.
    """
    if isinstance(problem, MatmulProblem):
        return _product(problem.lhs.dtype, problem.rhs.dtype, problem.acc_dtype)
    if isinstance(problem, ConvProblem):
        return _product(problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    if isinstance(problem, BlockProductProblem):
        return f"int4*{short_name(problem.lhs.dtype)}"
    if isinstance(problem, AttentionProblem):
        return _product(problem.query.dtype, problem.key.dtype, "float32")
    return ""


def precision_of_arguments(dtypes: Iterable[str]) -> str:
    """The element types of what other kernels take, each once: ``f32, s64``."""
    return ", ".join(dict.fromkeys(map(short_name, dtypes)))


def _product(lhs: str, rhs: str, sums: str) -> str:
    if lhs == rhs and "float" in lhs and "float" in sums:
        return short_name(lhs)
    return f"{short_name(lhs)}*{short_name(rhs)}->{short_name(sums)}"
