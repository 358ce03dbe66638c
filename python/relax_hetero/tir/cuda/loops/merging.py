"""How the parts of a reduction that several threads, or several lanes of one, have computed become one.

A sum or a maximum is one value combined with what is there so far. Reductions of several values at once, such as the
index of the largest element, choose: each new value is either its own or its term, and a term may as well be what
another thread found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm_ffi import structural_equal, structural_map, structural_walk

from ...core.builder import Expr
from ...loops.nests import Sum
from ...loops.reduce_box import combined
from ...loops.stages import Load, node_count, replaced, sources, with_loads
from .arithmetic import accumulator_type


@dataclass(frozen=True)
class Merge:
    """Reductions that are computed together, in parts.

    Attributes
    ----------
    types : tuple of str
        Types that partial results are kept in.
    starts : tuple of PrimExpr
        Values that a partial result starts from.
    terms : tuple of PrimExpr
        Values of a point that join a partial result.
    finals : tuple of PrimExpr or None
        Values that the whole starts from, where they are not those of partial results.
    """

    sums: tuple[Sum, ...]
    types: tuple[str, ...]
    starts: tuple[Expr, ...]
    terms: tuple[Expr, ...]
    finals: tuple[Expr | None, ...]
    own: tuple[tirx.Var, ...]
    new: tuple[tirx.Var, ...]
    joined: tuple[Expr, ...]

    def join(self, one: Sequence[Expr], other: Sequence[Expr]) -> list[Expr]:
        """Two parts as one."""
        values = dict(zip((*self.own, *self.new), (*one, *other), strict=True))
        return [replaced(value, values) for value in self.joined]


def merge_of(sums: Sequence[Sum]) -> Merge | None:
    """How the parts of reductions are joined; None where they must be computed in order, by one thread."""
    apart = [combined(replace(s, value=_with_narrow_bits(s.value))) for s in sums]
    if all(part is not None for part in apart):
        types = [accumulator_type(str(s.buffer.dtype)) for s in sums]
        own = tuple(tirx.Var(f"own{i}", dtype) for i, dtype in enumerate(types))
        new = tuple(tirx.Var(f"new{i}", dtype) for i, dtype in enumerate(types))
        joined, starts, terms, finals = [], [], [], []
        for i, (part, dtype) in enumerate(zip(apart, types, strict=True)):
            assert part is not None
            joined.append(part.combine(own[i], new[i]))
            starts.append(_as(part.neutral, dtype))
            terms.append(_as(part.term, dtype))
            is_same = structural_equal(part.neutral, part.sum.initial)
            finals.append(None if is_same else _as(part.sum.initial, dtype))
        return Merge(tuple(sums), tuple(types), tuple(starts), tuple(terms), tuple(finals), own, new, tuple(joined))
    return _of_choices(sums)


def _with_narrow_bits(value: Expr) -> Expr:
    """`value` with masks of a number's bits as `math.extremes.is_nan` writes them.

    TVM widens them where it makes PrimFuncs of expressions with 64-bit extents.
    """

    def change(node: tirx.GT) -> Expr:
        mask = node.a
        if not isinstance(mask, tirx.BitwiseAnd) or not isinstance(node.b, tirx.IntImm):
            return node
        wide, bits = mask.a, mask.b
        if not isinstance(wide, tirx.Cast) or not isinstance(bits, tirx.IntImm):
            return node
        raw, dtype = wide.value, str(wide.value.ty.dtype)
        return tirx.bitwise_and(raw, tirx.const(int(bits), dtype)) > tirx.const(int(node.b), dtype)

    return structural_map(value, (tirx.GT, change))


def _of_choices(sums: Sequence[Sum]) -> Merge | None:
    """Reductions whose values each choose between what is there and a term."""
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

    def own_part(load: Load) -> Expr:
        return by_buffer.get(load.source, load)

    joined = []
    for s in sums:
        value = with_loads(_exchanged(s.value, terms, new), own_part)
        if sources(value) or not _variables(value) <= {*own, *new}:
            return None
        joined.append(value)
    starts = tuple(s.initial for s in sums)
    return Merge(tuple(sums), types, starts, tuple(terms), (None,) * len(types), own, new, tuple(joined))


def _buffers(sums: Sequence[Sum]) -> list[tirx.Buffer]:
    return [s.buffer for s in sums]


def _term(value: Expr, buffer: tirx.Buffer) -> Expr | None:
    if not isinstance(value, tirx.Select):
        return None
    for one, other in ((value.true_value, value.false_value), (value.false_value, value.true_value)):
        if isinstance(one, Load) and one.source.same_as(buffer):
            return other
    return None


def _exchanged(value: Expr, terms: Sequence[Expr], new: Sequence[tirx.Var]) -> Expr:
    """`value` with variables for the terms, wherever these stand in it; larger terms first, as others are in them."""
    for term, var in sorted(zip(terms, new, strict=True), key=lambda pair: -node_count(pair[0])):

        def change(node: Expr, term: Expr = term, var: tirx.Var = var) -> Expr:
            return var if structural_equal(node, term) else node

        value = structural_map(value, (type(term), change))
    return value


def _variables(value: Expr) -> set[tirx.Var]:
    found: list[tirx.Var] = []
    structural_walk(value, (tvm.ir.Var, found.append))
    return set(found)


def _as(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
