"""Sizes that an import joins, and what it knows of them.

Two dimensions of different names may be equal, or one of them 1: where they broadcast, a symbol stands for the size of
both. Its value is written once, where it is made. As an expression it would hold each of the two several times, and as
much again wherever a later node joins it. For the same reason an expression of more than `MAX_TERMS` terms gets a
symbol. So a size is of few terms however many nodes have handed it on, and simplifying one takes as long in the last
layer of a model as in the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any, TypeAlias

import tvm
from tvm import sym, tirx
from tvm_ffi import StructuralKey, structural_map

from ..errors import FrontendError
from ..transform.ir.named_sizes import is_long

Bounds: TypeAlias = Mapping[tirx.Var, int]
"""Upper bounds of symbolic sizes."""


class SizeIsBounded(FrontendError):
    """A model works only where a symbolic size is at most some number; the import starts again with that bound."""

    def __init__(self, size: tirx.Var, bound: int) -> None:
        super().__init__(f"{size} is at most {bound}")
        self.size, self.bound = size, bound


class JoinedSizes:
    """The symbols of one import that stand for joined sizes or for long expressions, and bounds of sizes.

    Parameters
    ----------
    bounds : Bounds, optional
        Upper bounds of the inputs' sizes that earlier attempts of this import found.
    inputs : Set of tirx.Var
        The symbolic sizes of the inputs.
    """

    def __init__(self, bounds: Bounds | None = None, inputs: Set[tirx.Var] = frozenset()) -> None:
        self.bounds = dict(bounds or {})
        self._inputs = inputs
        self._atoms: dict[tirx.Var, dict[StructuralKey, Any]] = {}
        # What is known where the importer stands: it ends with a branch, or a loop's body.
        self._symbols: dict[frozenset[StructuralKey], tirx.Var] = {}
        self._facts: dict[StructuralKey, int] = {}
        self._extents: set[StructuralKey] = set()
        self._is_top = True

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget, when left, the symbols and bounds found inside."""
        with self.trial():
            self._is_top = False
            yield

    @contextmanager
    def trial(self) -> Iterator[list[bool]]:
        """Forget, when left, the symbols and bounds found inside, unless True was appended to what this yields."""
        kept = dict(self._symbols), dict(self._facts), set(self._extents), self._is_top
        is_kept = [False]
        try:
            yield is_kept
        finally:
            if not is_kept[-1]:
                self._symbols, self._facts, self._extents, self._is_top = kept

    def bound_of(self, size: Any) -> int | None:
        """The known upper bound of a size."""
        if isinstance(size, tirx.Var) and size in self.bounds:
            return self.bounds[size]
        return self._facts.get(StructuralKey(size))

    def bound_by(self, minimum: Any, size: Any) -> int | None:
        """A number that bounds `size` if it broadcasts with `minimum`, which is the minimum of the two.

        Exporters slice a table of positions by the sequence they are given, ``table[:sequence]``, which has
        ``min(sequence, 512)`` rows, and add it to something of ``sequence`` rows. That works for at most 512 only: more
        are as many as neither. One row, or none, goes with any number of them.
        """
        if not isinstance(minimum, tirx.Min):
            return None
        for bound, other in ((minimum.a, minimum.b), (minimum.b, minimum.a)):
            if isinstance(bound, tirx.IntImm) and int(bound) > 1 and _is_same(other, size):
                return int(bound)
        return None

    def note_bound(self, size: Any, bound: int) -> None:
        """Have a size be at most `bound` from here on, as calls are required to meet.

        Raises
        ------
        SizeIsBounded
            The size is one of an input, and every call needs the bound.
        """
        if self._is_top and size in self._inputs:
            raise SizeIsBounded(size, bound)
        for part in (size, *_summands(size)):
            key = StructuralKey(part)
            self._facts[key] = min(bound, self._facts.get(key, bound))

    def note_extents(self, sizes: Iterable[Any]) -> None:
        """Note the sizes of a tensor as not negative, which calls require."""
        self._extents.update(StructuralKey(size) for size in sizes if not isinstance(size, (int, tirx.Var)))

    def within_bounds(self, value: Any) -> Any:
        """An expression without minima of a size and its bound, and maxima of a tensor's size and 0."""
        if not (self._facts or self._extents):
            return value

        def least(part: Any) -> Any:
            bound = self._facts.get(StructuralKey(part.a)) if isinstance(part.b, tirx.IntImm) else None
            return part if bound is None or bound > int(part.b) else part.a

        def largest(part: Any) -> Any:
            is_zero = isinstance(part.b, tirx.IntImm) and int(part.b) == 0
            return part.a if is_zero and StructuralKey(part.a) in self._extents else part

        return structural_map(structural_map(value, (tirx.Min, least)), (tirx.Max, largest))

    def one_of(self, own: Any, wanted: Any) -> Any:
        """The size of two that is the broadcast size of both, if types tell; else None."""
        for one, other in ((own, wanted), (wanted, own)):
            atoms = self._atoms_of(one)
            if all(key in atoms or any(_is_equal(part, atom) for atom in atoms.values())
                   for key, part in self._atoms_of(other).items()):  # fmt: skip
                return one
        return None

    def joined(self, own: Any, wanted: Any) -> tuple[tirx.Var, Any]:
        """The symbol of two sizes that broadcast, and its value; None for the value if the symbol was made before."""
        atoms = {**self._atoms_of(own), **self._atoms_of(wanted)}
        key = frozenset(atoms)
        if key in self._symbols:
            return self._symbols[key], None
        names = [str(atom.name) for atom in atoms.values() if isinstance(atom, tirx.Var)]
        symbol = tirx.Var("_or_".join(names) if len(names) == len(atoms) <= 3 else "joined", "int64")
        self._atoms[symbol] = atoms
        self._symbols[key] = symbol
        return symbol, _larger(*atoms.values())

    def shortened(self, size: Any) -> tuple[Any, Any]:
        """A size in few terms (itself, or a symbol), and the symbol's value, None unless it is new."""
        if isinstance(size, int) or not is_long(size):
            return size, None
        key = frozenset([StructuralKey(size)])
        if key in self._symbols:
            return self._symbols[key], None
        self._symbols[key] = tirx.Var("size", "int64")
        return self._symbols[key], size

    def _atoms_of(self, size: Any) -> dict[StructuralKey, Any]:
        """The sizes that a symbol joins, or the size itself."""
        return self._atoms[size] if size in self._atoms else {StructuralKey(size): size}


_SIZES: ContextVar[JoinedSizes | None] = ContextVar("_SIZES", default=None)


@contextmanager
def joining_sizes(sizes: JoinedSizes) -> Iterator[None]:
    """Have the import that runs inside join its sizes in `sizes`."""
    token = _SIZES.set(sizes)
    try:
        yield
    finally:
        _SIZES.reset(token)


def known_sizes() -> JoinedSizes:
    """The sizes of the import that runs; outside of one, nothing is known."""
    return _SIZES.get() or JoinedSizes()


def analyzer_for(*values: Any, minimum: int = 0) -> sym.Analyzer:
    """An analyzer that knows sizes are at least `minimum`, and their bounds."""
    analyzer, sizes = sym.Analyzer(), known_sizes()
    for value in values:
        if not isinstance(value, int):
            for var in tirx.analysis.undefined_vars(value):
                bound = sizes.bound_of(var)
                analyzer.update(var, sym.ConstIntBound(minimum, sym.ConstIntBound.POS_INF if bound is None else bound))
    return analyzer


def simplified(value: tvm.tirx.Expr) -> Any:
    """An expression of sizes in fewer terms, an int where it is one."""
    if isinstance(value, tirx.Var):
        return value
    analyzer = analyzer_for(value)
    simple = analyzer.simplify(value)
    if isinstance(simple, (tirx.IntImm, tirx.Var)):
        return int(simple) if isinstance(simple, tirx.IntImm) else simple
    bounded = known_sizes().within_bounds(simple)
    simple = simple if bounded is simple else analyzer.simplify(bounded)
    return int(simple) if isinstance(simple, tirx.IntImm) else simple


def _larger(*sizes: Any) -> Any:
    """The larger of sizes that are equal or 1, but 0 where one is 0 and the others 1."""
    return reduce(tirx.max, sizes) * tirx.min(reduce(tirx.min, sizes), 1)


def _is_same(one: Any, other: Any) -> bool:
    return bool(one.same_as(other)) or StructuralKey(one) == StructuralKey(other)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two expressions of sizes are proven equal; symbols of two names never are."""
    if isinstance(one, tirx.Var) and isinstance(other, tirx.Var):
        return False
    return bool(analyzer_for(one, other).can_prove_equal(one, other))


def _summands(size: Any) -> list[Any]:
    """The symbols of a sum of symbols, none of which is larger than it; nothing for another expression."""
    pending, symbols = [size], []
    while pending:
        part = pending.pop()
        if isinstance(part, tirx.Add):
            pending += [part.a, part.b]
        elif isinstance(part, tirx.Var):
            symbols.append(part)
        else:
            return []
    return symbols
