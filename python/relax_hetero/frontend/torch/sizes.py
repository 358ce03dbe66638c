"""Sizes that torch.export leaves open: its symbols, and arithmetic on them, as TVM's expressions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from tvm import relax, tirx

from ...errors import FrontendError
from ...op.require import as_condition
from ..joined_sizes import simplified

# A size beyond every tensor: torch writes no bound as its infinity.
_NO_BOUND = 2**48


class Sizes:
    """The variables of one exported program.

    Parameters
    ----------
    names : mapping of str to str
        Symbol of torch -> the name that the user gave.
    constraints : mapping of object to object
        Symbol of torch -> its range.
    """

    def __init__(self, names: Mapping[str, str], constraints: Mapping[Any, Any]) -> None:
        self._names = names
        self._signed = {str(symbol) for symbol, bounds in constraints.items() if not bounds.lower >= 0}
        self._variables: dict[str, tirx.Var] = {}
        self._bound: dict[str, Any] = {}
        self._given = 0
        self.known: set[str] = set()
        """Symbols that inputs have, or nodes before."""
        self.read: dict[str, tuple[Any, relax.Expr]] = {}
        """Symbol of a number that the model reads -> its size (None for a float), and the tensor that holds it."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Symbols that are found inside mean nothing outside, and are others the next time."""
        kept = dict(self._variables), dict(self._bound), set(self.known), dict(self.read)
        try:
            yield
        finally:
            self._variables, self._bound, self.known, self.read = kept

    def variable(self, symbol: Any) -> tirx.Var:
        """The variable of a symbol."""
        key = str(symbol)
        if key not in self._variables:
            name = self._names.get(key, key)
            if name[0] in "uz" and name == key:  # found by the model, perhaps once in each trip of a loop
                name, self._given = f"{name}_{self._given}", self._given + 1
            self._variables[key] = tirx.Var(name, "int64")
        return self._variables[key]

    def is_new(self, size: Any) -> bool:
        """Return whether a size of torch is a symbol that has no meaning yet."""
        expr = getattr(getattr(size, "node", None), "expr", None)
        return expr is not None and bool(expr.is_Symbol) and str(expr) not in self.known

    def bind(self, size: Any, value: Any) -> None:
        """Have a size of torch that is a new symbol mean this value, an int or an expression."""
        if self.is_new(size):
            key = str(size.node.expr)
            self._bound[key] = value
            self.known.add(key)

    def may_be_negative(self, value: Any) -> bool:
        """Return whether an expression contains a number that the model reads and that torch allows to be negative."""
        signed = [size for symbol, (size, _) in self.read.items() if symbol in self._signed and size is not None]
        used = tirx.analysis.undefined_vars(value)
        return any(size.same_as(variable) for size in signed for variable in used)

    def dim(self, size: Any) -> Any:
        """A size of torch, an int or a SymInt, as an int or an expression.

        Raises
        ------
        FrontendError
            If it is computed by something else than integer arithmetic.
        """
        if isinstance(size, int):
            return int(size)
        expr = self.expr(size.node.expr)
        return expr if isinstance(expr, int) else simplified(expr)

    def shape(self, dims: Any) -> list[Any]:
        """The sizes of a tensor of torch."""
        return [self.dim(dim) for dim in dims]

    def expr(self, value: Any) -> Any:
        """Sympy's arithmetic as TVM's; FrontendError as `dim`."""
        if value.is_Integer:
            return int(value)
        if value.is_Symbol:
            return self._bound[str(value)] if str(value) in self._bound else self.variable(value)
        kind = type(value).__name__
        if kind in _ROUNDINGS:
            return self._rounded(value.args[0], _ROUNDINGS[kind])
        if kind == "Pow" and value.args[1].is_Integer and int(value.args[1]) > 0:
            return reduce(lambda a, b: a * b, [self.expr(value.args[0])] * int(value.args[1]))
        if kind == "Piecewise":
            (*others, (last, _)) = value.args
            found = _wide(self.expr(last))
            for part, condition in others[::-1]:
                found = tirx.Select(self._truth(condition), _wide(self.expr(part)), found)
            return found
        operation = _OPERATIONS.get(kind)
        if kind in _OF_SIZES and self._signed & set(map(str, value.free_symbols)):
            raise FrontendError(f"{kind} of a number that may be negative, {value}, cannot be imported")
        if operation is None:
            raise FrontendError(f"the size {value} is computed by {kind}, which cannot be imported")
        return reduce(operation, map(self.expr, value.args))

    def _rounded(self, value: Any, rounding: str) -> Any:
        """A quotient of sizes, or a size times a fraction, as a whole number.

        Fractions are exact where floats hold them: halves, thirds of multiples of 3, but not 0.1 times a size.
        """
        top, bottom = self._fraction(value)
        if isinstance(top, int):
            return -(-top // bottom) if rounding == "ceil" else top // bottom
        if isinstance(bottom, int) and bottom == 1:
            return top
        up = _wide(bottom) - 1 if rounding == "ceil" else _wide(0)
        return tirx.floordiv(top + up, _wide(bottom))

    def _fraction(self, value: Any) -> tuple[Any, Any]:
        """Numerator and denominator of a float that sizes, which are not negative, are computed with."""
        kind = type(value).__name__
        if value.is_Integer or value.is_Symbol or kind in _OPERATIONS or kind == "Pow":
            if kind not in ("Mul", "Add") or value.is_integer:
                return self.expr(value), 1
        if kind in ("ToFloat", "Identity"):
            return self.expr(value.args[0]), 1
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            (a, b), (c, d) = map(self._fraction, value.args)
            return a * d, b * c
        if kind in ("Float", "Rational", "Half"):
            top, bottom = float(value).as_integer_ratio()
            if 0 <= top < 2**20 and bottom <= 2**20:
                return top, bottom
        if kind == "Mul":
            top, bottom = 1, 1
            for part in value.args:
                a, b = self._fraction(part)
                top, bottom = a * top, b * bottom
            return top, bottom
        raise FrontendError(f"the size {value} is computed by {kind}, which cannot be imported")

    def condition(self, value: Any) -> Any:
        """A condition of torch over sizes that are known, a SymBool, as an expression; else None."""
        expr = value.node.expr
        if any(str(symbol) not in self.known for symbol in expr.free_symbols):
            return None
        try:
            return self._truth(expr)
        except FrontendError:
            return None

    def _truth(self, expr: Any) -> Any:
        kind = type(expr).__name__
        if kind in ("BooleanTrue", "BooleanFalse"):
            return tirx.IntImm("bool", int(kind == "BooleanTrue"))
        if kind in ("And", "Or"):
            return (tirx.all if kind == "And" else tirx.any)(*map(self._truth, expr.args))
        if kind == "Not":
            return tirx.Not(self._truth(expr.args[0]))
        return as_condition(self.expr(expr))

    def ranges(self, constraints: Mapping[Any, Any]) -> list[tuple[Any, str]]:
        """Conditions on calls from the ranges of an exported program, and their texts.

        Torch traces with sizes of 2 and more and checks no lower bound up to 2; neither do we.
        """
        found = []
        for symbol, bounds in constraints.items():
            if any(str(part) not in self.known for part in symbol.free_symbols):
                continue
            size = self.expr(symbol)
            found += [(condition, f"{size} {text}") for condition, text in self.within(size, bounds, above=2)]
        return found

    def within(self, size: Any, bounds: Any, above: int = -_NO_BOUND) -> list[tuple[Any, str]]:
        """The conditions that a size is in a range of torch, and their texts; lower bounds up to `above` are none."""
        found = []
        if bounds.lower.is_Integer and int(bounds.lower) > above:
            found.append((_wide(size) >= _wide(int(bounds.lower)), f"is at least {bounds.lower}"))
        if bounds.upper.is_Integer and int(bounds.upper) < _NO_BOUND:
            found.append((_wide(size) <= _wide(int(bounds.upper)), f"is at most {bounds.upper}"))
        return found


def _wide(value: Any) -> Any:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def _both(operation: Any) -> Any:
    return lambda a, b: operation(_wide(a), _wide(b))


_OPERATIONS: dict[str, Any] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": _both(tirx.floordiv),
    "CleanDiv": _both(tirx.floordiv),
    "Mod": _both(tirx.floormod),
    "PythonMod": _both(tirx.floormod),
    "Max": _both(tirx.max),
    "Min": _both(tirx.min),
    "Equality": _both(tirx.EQ),
    "Unequality": _both(tirx.NE),
    "GreaterThan": _both(lambda a, b: a >= b),
    "LessThan": _both(lambda a, b: a <= b),
    "StrictGreaterThan": _both(lambda a, b: a > b),
    "StrictLessThan": _both(lambda a, b: a < b),
}


# How whole numbers are made of floats; sizes are not negative, so that truncating is rounding down.
_ROUNDINGS = {"CeilToInt": "ceil", "FloorToInt": "floor", "TruncToInt": "floor"}

# Simplified as sizes are: as if they were not negative.
_OF_SIZES = frozenset("FloorDiv CleanDiv Mod PythonMod Max Min".split()) | _ROUNDINGS.keys()


def as_shape(dims: Any) -> relax.ShapeExpr:
    """Sizes as a shape."""
    return relax.ShapeExpr([_wide(dim) for dim in dims])
