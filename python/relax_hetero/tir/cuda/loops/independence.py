"""Loops with independent iterations: what one writes, no other reads or writes.

That is so where every access of a buffer that the loop writes has, in one and the same dimension, an index that only
this iteration has: ``step * i + rest`` with a rest that is never negative and less than the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import VisitInterrupt, structural_equal, structural_walk

from ...core.builder import Expr
from ...loops.stages import Load, variables

# What a statement may call without touching memory that nobody sees.
_OPAQUE_CALLS = tuple(
    f"tirx.{name}" for name in ("call_packed", "call_extern", "address_of", "tvm_call_packed", "tvm_access_ptr")
)


def is_independent(loop: tirx.For) -> bool:
    """Return whether the iterations of a loop may run in any order, and at once."""
    if loop.kind == tirx.ForKind.THREAD_BINDING or loop.step is not None:
        return False
    if loop.kind == tirx.ForKind.PARALLEL:
        return True
    if _has_opaque(loop.body):
        return False
    own = _allocated(loop.body)
    stores: list[tirx.BufferStore] = []
    loads: list[Any] = []
    structural_walk(loop.body, [(tirx.BufferStore, stores.append), (Load, loads.append)])
    written: dict[tirx.Buffer, list[Sequence[Expr]]] = {}
    for store in stores:
        if store.buffer not in own:
            written.setdefault(store.buffer, []).append(list(store.indices))
    for load in loads:
        if load.source in written:
            written[load.source].append(list(load.indices))
    inner = _Inner(loop)
    return all(inner.are_apart(accesses) for accesses in written.values())


def _has_opaque(body: tirx.Stmt) -> bool:
    def call(node: tvm.ir.Call) -> VisitInterrupt | None:
        is_op = isinstance(node.op, tvm.ir.Op)
        return VisitInterrupt(node) if not is_op or node.op.name in _OPAQUE_CALLS else None

    def stop(node: Any) -> VisitInterrupt:
        return VisitInterrupt(node)

    return structural_walk(body, [(tvm.ir.Call, call), (tirx.DeclBuffer, stop), (tirx.While, stop)]) is not None


def _allocated(body: tirx.Stmt) -> set[tirx.Var]:
    found: list[tirx.Var] = []
    structural_walk(body, (tirx.AllocBuffer, lambda a: found.append(a.buffer)))
    return set(found)


class _Inner:
    """Facts that hold inside of a loop."""

    def __init__(self, loop: tirx.For) -> None:
        self.var = loop.loop_var
        self._analyzer = Analyzer()
        self._inside: set[tirx.Var] = set()  # variables that are bound within the loop
        self._ranged: set[tirx.Var] = set()
        structural_walk(loop.body, [(tirx.For, self._loop), ((tirx.Bind, tirx.LetStmt, tirx.Let), self._bound)])

    def _loop(self, loop: tirx.For) -> None:
        self._inside.add(loop.loop_var)
        self._ranged.add(loop.loop_var)
        self._analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))

    def _bound(self, bound: Any) -> None:
        self._inside.add(bound.var)

    def are_apart(self, accesses: Sequence[Sequence[Expr]]) -> bool:
        """Return whether accesses of one buffer are at places of one iteration each."""
        ranks = {len(indices) for indices in accesses}
        return len(ranks) == 1 and any(self._apart_in([a[d] for a in accesses]) for d in range(ranks.pop()))

    def _apart_in(self, indices: Sequence[Expr]) -> bool:
        step: Expr | None = None
        base: Expr | None = None
        for index in indices:
            terms = detect_linear_equation(index, [self.var])
            if not terms or self.var in variables(terms[1]):
                return False
            factor, rest = terms
            if variables(factor) & self._inside or _reads(factor) or _reads(rest):
                return False
            if not self._analyzer.can_prove(factor > tirx.const(0, factor.ty.dtype)):
                return False
            free, own = self._split(rest)
            if free is None:
                return False
            if step is None:
                step, base = factor, free
            elif not (structural_equal(step, factor) and structural_equal(base, free)):
                return False
            zero = tirx.const(0, own.ty.dtype)
            if not (self._analyzer.can_prove(own >= zero) and self._analyzer.can_prove(own < step)):
                return False
        return step is not None

    def _split(self, rest: Expr) -> tuple[Expr | None, Expr]:
        """Split into a term that is the same in every iteration, and one that loops inside add to it."""
        names = [var for var in variables(rest) if var in self._inside]
        zero = tirx.const(0, rest.ty.dtype)
        if not names:
            return self._analyzer.simplify(rest), zero
        if any(var not in self._ranged for var in names):
            return None, zero
        terms = detect_linear_equation(rest, names)
        if not terms or variables(terms[-1]) & self._inside:
            return None, zero
        free = self._analyzer.simplify(terms[-1])
        return free, self._analyzer.simplify(rest - terms[-1])


def _reads(expr: Expr) -> bool:
    return structural_walk(expr, (Load, VisitInterrupt)) is not None
