"""Merging the partial results of a reduction that threads, or lanes of a thread, have computed.

A sum or a maximum combines the accumulator with a term. Reductions of several values at once, such as argmax, select:
each new value is either the accumulator or the term, and another thread's accumulator can stand for the term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm_ffi import structural_equal, structural_map

from ...core.builder import Expr, as_type
from ...core.walks import replaced
from ...loops.nests import Sum
from ...loops.reduce_box import combined
from ...loops.stages import Load, node_count, sources, variables, with_loads
from ...math.extremes import is_nan
from .arithmetic import accumulator_type


@dataclass(frozen=True)
class Merge:
    """Reductions that are computed together as partial results."""

    sums: tuple[Sum, ...]
    types: tuple[str, ...]  # types of partial results
    starts: tuple[Expr, ...]  # initial values of partial results
    terms: tuple[Expr, ...]  # values of a point that a partial result is combined with
    finals: tuple[Expr | None, ...]  # initial values of the complete result, where they differ from `starts`
    # Variables for two partial results.
    own: tuple[tirx.Var, ...]
    new: tuple[tirx.Var, ...]
    joined: tuple[Expr, ...]  # the combination of `own` and `new`
    selects: bool = False  # whether one partial result is selected, all its values together

    def join(self, one: Sequence[Expr], other: Sequence[Expr]) -> list[Expr]:
        """Combine two partial results."""
        values = dict(zip((*self.own, *self.new), (*one, *other), strict=True))
        return [replaced(value, values) for value in self.joined]


def merge_of(sums: Sequence[Sum]) -> Merge | None:
    """Merge of some reductions; None if one thread must compute their terms in order."""
    combinations = [combined(replace(s, value=_with_narrow_bits(s.value))) for s in sums]
    if all(combination is not None for combination in combinations):
        types = [accumulator_type(str(s.buffer.dtype)) for s in sums]
        own = tuple(tirx.Var(f"own{i}", dtype) for i, dtype in enumerate(types))
        new = tuple(tirx.Var(f"new{i}", dtype) for i, dtype in enumerate(types))
        joined, starts, terms, finals = [], [], [], []
        for i, (combination, dtype) in enumerate(zip(combinations, types, strict=True)):
            assert combination is not None
            joined.append(combination.combine(own[i], new[i]))
            starts.append(as_type(combination.neutral, dtype))
            terms.append(as_type(combination.term, dtype))
            is_same = structural_equal(combination.neutral, combination.sum.initial)
            finals.append(None if is_same else as_type(combination.sum.initial, dtype))
        return Merge(tuple(sums), tuple(types), tuple(starts), tuple(terms), tuple(finals), own, new, tuple(joined))
    return _selection_merge(sums)


def _with_narrow_bits(value: Expr) -> Expr:
    """Narrow the bit masks of `math.extremes.is_nan` to the type of the bits.

    TVM widens them in PrimFuncs of expressions with 64-bit extents.
    """

    def narrow(node: tirx.GT) -> Expr:
        mask = node.a
        if not isinstance(mask, tirx.BitwiseAnd) or not isinstance(node.b, tirx.IntImm):
            return node
        wide, bits = mask.a, mask.b
        if not isinstance(wide, tirx.Cast) or not isinstance(bits, tirx.IntImm):
            return node
        raw, dtype = wide.value, str(wide.value.ty.dtype)
        return tirx.bitwise_and(raw, tirx.const(int(bits), dtype)) > tirx.const(int(node.b), dtype)

    return structural_map(value, (tirx.GT, narrow))


def _selection_merge(sums: Sequence[Sum]) -> Merge | None:
    """Merge of reductions whose values each select between the accumulator and a term."""
    types = tuple(str(s.buffer.dtype) for s in sums)
    own = tuple(tirx.Var(f"own{i}", dtype) for i, dtype in enumerate(types))
    new = tuple(tirx.Var(f"new{i}", dtype) for i, dtype in enumerate(types))
    terms: list[Expr] = []
    for s in sums:
        term = _term(s.value, s.buffer)
        if term is None or any(source in _buffers(sums) for source in sources(term)):
            return None
        terms.append(term)
    by_buffer = {s.buffer: var for s, var in zip(sums, own, strict=True)}
    values = [_with_narrow_comparisons(_with_narrow_bits(s.value), _buffers(sums), terms) for s in sums]

    joined = []
    for value in values:
        value = with_loads(_replace_terms(value, terms, new), lambda load: by_buffer.get(load.source, load))
        if sources(value) or not variables(value) <= {*own, *new}:
            return None
        joined.append(_without_branches(value))
    starts = tuple(s.initial for s in sums)
    finals = (None,) * len(types)
    return Merge(tuple(sums), types, starts, tuple(terms), finals, own, new, tuple(joined), selects=True)


def _with_narrow_comparisons(value: Expr, accumulators: Sequence[tirx.Buffer], terms: Sequence[Expr]) -> Expr:
    """Compare accumulators of 32 bits with their terms in this type: TVM widens such comparisons, too."""

    def narrow(node: tirx.LT | tirx.GT) -> Expr:
        a, b = node.a, node.b
        for accumulator, term in zip(accumulators, terms, strict=True):
            dtype = str(accumulator.dtype)
            narrow_term = _narrow(term, dtype)
            sides = [_narrow(side, dtype) for side in (a, b)] if str(a.ty.dtype) != dtype else []
            is_term = [structural_equal(side, narrow_term) for side in sides]
            is_own = [isinstance(side, Load) and side.source.same_as(accumulator) for side in sides]
            if sorted(zip(is_term, is_own, strict=True)) == [(False, True), (True, False)]:
                return type(node)(*(term if i else side for i, side in zip(is_term, sides, strict=True)))
        return node

    return structural_map(value, ((tirx.LT, tirx.GT), narrow))


def _narrow(value: Expr, dtype: str) -> Expr:
    """Cast an integer expression to a type, by casts of its operands."""
    if isinstance(value, tirx.Cast) and not str(value.value.ty.dtype).startswith("float"):
        return _narrow(value.value, dtype)
    if isinstance(value, tirx.Add | tirx.Sub | tirx.Mul):
        return type(value)(_narrow(value.a, dtype), _narrow(value.b, dtype))
    if isinstance(value, tirx.IntImm):
        return tirx.const(int(value), dtype)
    inner = value.value if isinstance(value, tirx.Cast) else value
    return inner if str(inner.ty.dtype) == dtype else tirx.Cast(dtype, inner)


def _without_branches(value: Expr) -> Expr:
    """Conditions of registers as bitwise operations, as C would branch to skip an operand; tests for NaN as one."""

    def test(node: tirx.GT) -> Expr:
        bits = node.a.a if isinstance(node.a, tirx.BitwiseAnd) else None
        number = bits.args[0] if isinstance(bits, tvm.ir.Call) else None
        is_test = number is not None and str(number.ty.dtype) == "float32" and structural_equal(node, is_nan(number))
        return tirx.isnan(number) if is_test else node

    both = (tirx.And, lambda node: tirx.bitwise_and(node.a, node.b))
    either = (tirx.Or, lambda node: tirx.bitwise_or(node.a, node.b))
    return structural_map(structural_map(value, (tirx.GT, test)), [both, either])


def _buffers(sums: Sequence[Sum]) -> list[tirx.Buffer]:
    return [s.buffer for s in sums]


def _term(value: Expr, buffer: tirx.Buffer) -> Expr | None:
    if not isinstance(value, tirx.Select):
        return None
    for one, other in ((value.true_value, value.false_value), (value.false_value, value.true_value)):
        if isinstance(one, Load) and one.source.same_as(buffer):
            return other
    return None


def _replace_terms(value: Expr, terms: Sequence[Expr], new: Sequence[tirx.Var]) -> Expr:
    """Replace terms in `value` by variables: larger terms first, as they may contain others."""
    for term, var in sorted(zip(terms, new, strict=True), key=lambda pair: -node_count(pair[0])):

        def substitute(node: Expr, term: Expr = term, var: tirx.Var = var) -> Expr:
            return var if structural_equal(node, term) else node

        value = structural_map(value, (type(term), substitute))
    return value
