"""Symbols for joined sizes, and known bounds of sizes, during an import.

When two dimensions of different names broadcast, a new symbol stands for the result, which is bound once to its value.
As an expression it would contain each of them several times and grow exponentially with later joins. For the same
reason long expressions (`is_long`) get a symbol. So sizes have few terms in every layer of a model, and simplifying
them takes constant time.
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

Bounds: TypeAlias = Mapping[tirx.Var, int]  # upper bounds of symbolic sizes


class SizeIsBounded(FrontendError):
    """A model works only if a symbolic size is at most `bound`; the import restarts with that bound."""

    def __init__(self, size: tirx.Var, bound: int) -> None:
        super().__init__(f"{size} is at most {bound}")
        self.size, self.bound = size, bound


class JoinedSizes:
    """Symbols of one import for joined sizes and long expressions, and bounds of sizes.

    `bounds`: upper bounds of the inputs' sizes from earlier attempts of this import; `inputs`: the symbolic sizes of
    the inputs.
    """

    def __init__(self, bounds: Bounds | None = None, inputs: Set[tirx.Var] = frozenset()) -> None:
        self.bounds = dict(bounds or {})
        self._inputs = inputs
        self._atoms: dict[tirx.Var, dict[StructuralKey, Any]] = {}
        # Facts of the current scope, which end with a branch or a loop's body.
        self._symbols: dict[frozenset[StructuralKey], tirx.Var] = {}
        self._upper_bounds: dict[StructuralKey, int] = {}
        self._non_negative: set[StructuralKey] = set()
        self._is_top_level = True

    @property
    def has_symbolic_inputs(self) -> bool:
        """True if an input has a symbolic size."""
        return bool(self._inputs)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget symbols and bounds that are defined inside on exit."""
        with self.trial():
            self._is_top_level = False
            yield

    @contextmanager
    def trial(self) -> Iterator[list[bool]]:
        """Forget symbols and bounds that are defined inside on exit, unless True was appended to the yielded list."""
        saved = dict(self._symbols), dict(self._upper_bounds), set(self._non_negative), self._is_top_level
        keep = [False]
        try:
            yield keep
        finally:
            if not keep[-1]:
                self._symbols, self._upper_bounds, self._non_negative, self._is_top_level = saved

    def bound_of(self, size: Any) -> int | None:
        """The known upper bound of a size."""
        if isinstance(size, tirx.Var) and size in self.bounds:
            return self.bounds[size]
        return self._upper_bounds.get(StructuralKey(size))

    def bound_by(self, minimum: Any, size: Any) -> int | None:
        """The number n if `minimum` is ``min(size, n)``: `size` is at most n if it broadcasts with `minimum`.

        Exporters slice a table of positions, ``table[:sequence]``, which has ``min(sequence, 512)`` rows, and add it to
        a value of ``sequence`` rows, which works for at most 512. A bound of 0 or 1 does not follow, since one row
        broadcasts with any number of rows.
        """
        if not isinstance(minimum, tirx.Min):
            return None
        for bound, other in ((minimum.a, minimum.b), (minimum.b, minimum.a)):
            if isinstance(bound, tirx.IntImm) and int(bound) > 1 and _is_structurally_equal(other, size):
                return int(bound)
        return None

    def note_bound(self, size: Any, bound: int) -> None:
        """Assume that a size is at most `bound`, which calls are required to meet.

        Raises SizeIsBounded if the size is one of an input, and every call must meet the bound.
        """
        if self._is_top_level and size in self._inputs:
            raise SizeIsBounded(size, bound)
        for part in (size, *_summands(size)):
            key = StructuralKey(part)
            self._upper_bounds[key] = min(bound, self._upper_bounds.get(key, bound))

    def note_extents(self, sizes: Iterable[Any]) -> None:
        """Assume that the sizes of a tensor are not negative, which calls are required to meet."""
        self._non_negative.update(StructuralKey(size) for size in sizes if not isinstance(size, (int, tirx.Var)))

    def within_bounds(self, value: Any) -> Any:
        """Remove minima of a size and its bound, and maxima of a tensor's size and 0, from an expression."""
        if not (self._upper_bounds or self._non_negative):
            return value

        def replace_min(part: Any) -> Any:
            bound = self._upper_bounds.get(StructuralKey(part.a)) if isinstance(part.b, tirx.IntImm) else None
            return part if bound is None or bound > int(part.b) else part.a

        def replace_max(part: Any) -> Any:
            is_zero = isinstance(part.b, tirx.IntImm) and int(part.b) == 0
            return part.a if is_zero and StructuralKey(part.a) in self._non_negative else part

        return structural_map(structural_map(value, (tirx.Min, replace_min)), (tirx.Max, replace_max))

    def one_of(self, a: Any, b: Any) -> Any:
        """The broadcast size of two if it is provably one of them, else None."""
        for size, other in ((a, b), (b, a)):
            atoms = self._atoms_of(size)
            if all(key in atoms or any(_is_provably_equal(part, atom) for atom in atoms.values())
                   for key, part in self._atoms_of(other).items()):  # fmt: skip
                return size
        return None

    def joined(self, a: Any, b: Any) -> tuple[tirx.Var, Any]:
        """The symbol of the broadcast size of two sizes, and its value, or None if the symbol is already defined."""
        atoms = {**self._atoms_of(a), **self._atoms_of(b)}
        key = frozenset(atoms)
        if key in self._symbols:
            return self._symbols[key], None
        names = [str(atom.name) for atom in atoms.values() if isinstance(atom, tirx.Var)]
        symbol = tirx.Var("_or_".join(names) if len(names) == len(atoms) <= 3 else "joined", "int64")
        self._atoms[symbol] = atoms
        self._symbols[key] = symbol
        return symbol, _larger(*atoms.values())

    def shortened(self, size: Any) -> tuple[Any, Any]:
        """Replace a long size by a symbol, and return the symbol's value if it is new, else None."""
        if isinstance(size, int) or not is_long(size):
            return size, None
        key = frozenset([StructuralKey(size)])
        if key in self._symbols:
            return self._symbols[key], None
        self._symbols[key] = tirx.Var("size", "int64")
        return self._symbols[key], size

    def _atoms_of(self, size: Any) -> dict[StructuralKey, Any]:
        """The sizes joined in a symbol, or the size itself."""
        return self._atoms[size] if size in self._atoms else {StructuralKey(size): size}


_SIZES: ContextVar[JoinedSizes | None] = ContextVar("_SIZES", default=None)


@contextmanager
def joining_sizes(sizes: JoinedSizes) -> Iterator[None]:
    """Use `sizes` for the import inside."""
    token = _SIZES.set(sizes)
    try:
        yield
    finally:
        _SIZES.reset(token)


def known_sizes() -> JoinedSizes:
    """The sizes of the current import, or empty ones."""
    return _SIZES.get() or JoinedSizes()


def analyzer_for(*values: Any, minimum: int = 0) -> sym.Analyzer:
    """An analyzer in which all symbols are at least `minimum` and have their known bounds."""
    analyzer, sizes = sym.Analyzer(), known_sizes()
    for value in values:
        if not isinstance(value, int):
            for var in tirx.analysis.undefined_vars(value):
                bound = sizes.bound_of(var)
                analyzer.update(var, sym.ConstIntBound(minimum, sym.ConstIntBound.POS_INF if bound is None else bound))
    return analyzer


def simplified(value: tvm.tirx.Expr) -> Any:
    """Simplify an expression of sizes; a constant becomes an int."""
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
    """Broadcast size of sizes that are equal or 1, including 0 with 1."""
    return reduce(tirx.max, sizes) * tirx.min(reduce(tirx.min, sizes), 1)


def _is_structurally_equal(one: Any, other: Any) -> bool:
    return bool(one.same_as(other)) or StructuralKey(one) == StructuralKey(other)


def _is_provably_equal(one: Any, other: Any) -> bool:
    """Return whether two expressions of sizes are provably equal; two different symbols are not."""
    if isinstance(one, tirx.Var) and isinstance(other, tirx.Var):
        return False
    return bool(analyzer_for(one, other).can_prove_equal(one, other))


def _summands(size: Any) -> list[Any]:
    """The symbols of a sum of symbols, which are at most the sum; empty for other expressions."""
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
