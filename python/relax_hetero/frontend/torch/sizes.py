"""Symbolic sizes of torch.export (sympy expressions) as TVM expressions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from tvm import relax, tirx

from ...errors import FrontendError
from ...op.require import as_condition
from ...tir.core.builder import int64
from ..joined_sizes import simplified

_UNBOUNDED = 2**48  # larger than any size; torch uses its own infinity for a missing bound


class Sizes:
    """Symbols of an exported program and their variables.

    `names`: symbol of torch -> the user's name; `constraints`: symbol of torch -> its range.
    """

    def __init__(self, names: Mapping[str, str], constraints: Mapping[Any, Any]) -> None:
        self._names = names
        self._signed = {str(symbol) for symbol, bounds in constraints.items() if not bounds.lower >= 0}
        self._variables: dict[str, tirx.Var] = {}
        self._bound: dict[str, Any] = {}
        self._num_renamed = 0
        self.symbols: set[str] = set()
        """Symbols that inputs or previous nodes define."""
        self.read: dict[str, tuple[Any, relax.Expr]] = {}
        """Symbol of a number that the model reads from a tensor -> its size (None for a float), and the tensor."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget symbols that are defined inside on exit."""
        saved = dict(self._variables), dict(self._bound), set(self.symbols), dict(self.read)
        try:
            yield
        finally:
            self._variables, self._bound, self.symbols, self.read = saved

    def variable(self, symbol: Any) -> tirx.Var:
        """The variable of a symbol."""
        key = str(symbol)
        if key not in self._variables:
            name = self._names.get(key, key)
            if name[0] in "uz" and name == key:  # data-dependent: a loop defines a new one in each trip
                name, self._num_renamed = f"{name}_{self._num_renamed}", self._num_renamed + 1
            self._variables[key] = tirx.Var(name, "int64")
        return self._variables[key]

    def is_new(self, size: Any) -> bool:
        """Return whether a size of torch is a symbol that is not yet defined."""
        expr = getattr(getattr(size, "node", None), "expr", None)
        return expr is not None and bool(expr.is_Symbol) and str(expr) not in self.symbols

    def bind(self, size: Any, value: Any) -> None:
        """Define a new symbol of torch as an int or expression; other sizes are ignored."""
        if self.is_new(size):
            key = str(size.node.expr)
            self._bound[key] = value
            self.symbols.add(key)

    def may_be_negative(self, value: Any) -> bool:
        """Return whether an expression contains a number read from a tensor that torch allows to be negative."""
        signed = [size for symbol, (size, _) in self.read.items() if symbol in self._signed and size is not None]
        used = tirx.analysis.undefined_vars(value)
        return any(size.same_as(variable) for size in signed for variable in used)

    def dim(self, size: Any) -> Any:
        """Convert a size of torch, an int or a SymInt, to an int or an expression.

        Raises FrontendError if it is not computed by integer arithmetic.
        """
        if isinstance(size, int):
            return int(size)
        expr = self.expr(size.node.expr)
        return expr if isinstance(expr, int) else simplified(expr)

    def shape(self, dims: Any) -> list[Any]:
        """Convert the sizes of a tensor of torch."""
        return [self.dim(dim) for dim in dims]

    def expr(self, value: Any) -> Any:
        """Convert a sympy expression; raises FrontendError as `dim` does."""
        if value.is_Integer:
            return int(value)
        if value.is_Symbol:
            return self._bound[str(value)] if str(value) in self._bound else self.variable(value)
        kind = type(value).__name__
        if kind in _ROUNDINGS:
            return self._rounded_quotient(value.args[0], _ROUNDINGS[kind])
        if kind == "Pow" and value.args[1].is_Integer and int(value.args[1]) > 0:
            return reduce(lambda a, b: a * b, [self.expr(value.args[0])] * int(value.args[1]))
        if kind == "Piecewise":
            (*branches, (last, _)) = value.args
            result = int64(self.expr(last))
            for part, condition in branches[::-1]:
                result = tirx.Select(self._boolean(condition), int64(self.expr(part)), result)
            return result
        operation = _OPERATIONS.get(kind)
        if kind in _NON_NEGATIVE_OPS and self._signed & set(map(str, value.free_symbols)):
            raise FrontendError(f"{kind} of a number that may be negative, {value}, cannot be imported")
        if operation is None:
            raise FrontendError(f"the size {value} is computed by {kind}, which cannot be imported")
        return reduce(operation, map(self.expr, value.args))

    def _rounded_quotient(self, value: Any, rounding: str) -> Any:
        """Round a quotient of sizes, or a size times a fraction, to an integer.

        Fractions are exact if floats represent them: halves, thirds of multiples of 3, but not 0.1 times a size.
        """
        numerator, denominator = self._fraction(value)
        if isinstance(numerator, int):
            return -(-numerator // denominator) if rounding == "ceil" else numerator // denominator
        if isinstance(denominator, int) and denominator == 1:
            return numerator
        offset = int64(denominator) - 1 if rounding == "ceil" else int64(0)
        return tirx.floordiv(numerator + offset, int64(denominator))

    def _fraction(self, value: Any) -> tuple[Any, Any]:
        """Numerator and denominator of a non-negative float expression of sizes."""
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
            numerator, denominator = float(value).as_integer_ratio()
            if 0 <= numerator < 2**20 and denominator <= 2**20:
                return numerator, denominator
        if kind == "Mul":
            numerator, denominator = 1, 1
            for part in value.args:
                a, b = self._fraction(part)
                numerator, denominator = a * numerator, b * denominator
            return numerator, denominator
        raise FrontendError(f"the size {value} is computed by {kind}, which cannot be imported")

    def condition(self, value: Any) -> Any:
        """Convert a SymBool to an expression; None if it has undefined symbols or cannot be converted."""
        expr = value.node.expr
        if any(str(symbol) not in self.symbols for symbol in expr.free_symbols):
            return None
        try:
            return self._boolean(expr)
        except FrontendError:
            return None

    def _boolean(self, expr: Any) -> Any:
        kind = type(expr).__name__
        if kind in ("BooleanTrue", "BooleanFalse"):
            return tirx.IntImm("bool", int(kind == "BooleanTrue"))
        if kind in ("And", "Or"):
            return (tirx.all if kind == "And" else tirx.any)(*map(self._boolean, expr.args))
        if kind == "Not":
            return tirx.Not(self._boolean(expr.args[0]))
        return as_condition(self.expr(expr))

    def ranges(self, constraints: Mapping[Any, Any]) -> list[tuple[Any, str]]:
        """Conditions that calls must meet for the ranges of an exported program, and their texts.

        Torch traces with sizes of at least 2 and does not check lower bounds up to 2; neither do we.
        """
        conditions = []
        for symbol, bounds in constraints.items():
            if any(str(part) not in self.symbols for part in symbol.free_symbols):
                continue
            size = self.expr(symbol)
            conditions += [(condition, f"{size} {text}") for condition, text in self.within(size, bounds, above=2)]
        return conditions

    def within(self, size: Any, bounds: Any, above: int = -_UNBOUNDED) -> list[tuple[Any, str]]:
        """Conditions that a size is in a range, and their texts; lower bounds up to `above` are ignored."""
        conditions = []
        if bounds.lower.is_Integer and int(bounds.lower) > above:
            conditions.append((int64(size) >= int64(int(bounds.lower)), f"is at least {bounds.lower}"))
        if bounds.upper.is_Integer and int(bounds.upper) < _UNBOUNDED:
            conditions.append((int64(size) <= int64(int(bounds.upper)), f"is at most {bounds.upper}"))
        return conditions


def _on_int64(operation: Any) -> Any:
    return lambda a, b: operation(int64(a), int64(b))


_OPERATIONS: dict[str, Any] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": _on_int64(tirx.floordiv),
    "CleanDiv": _on_int64(tirx.floordiv),
    "Mod": _on_int64(tirx.floormod),
    "PythonMod": _on_int64(tirx.floormod),
    "Max": _on_int64(tirx.max),
    "Min": _on_int64(tirx.min),
    "Equality": _on_int64(tirx.EQ),
    "Unequality": _on_int64(tirx.NE),
    "GreaterThan": _on_int64(lambda a, b: a >= b),
    "LessThan": _on_int64(lambda a, b: a <= b),
    "StrictGreaterThan": _on_int64(lambda a, b: a > b),
    "StrictLessThan": _on_int64(lambda a, b: a < b),
}


# Conversions of floats to integers; sizes are not negative, so truncation is floor.
_ROUNDINGS = {"CeilToInt": "ceil", "FloorToInt": "floor", "TruncToInt": "floor"}

# Functions that TVM simplifies as if their operands were not negative.
_NON_NEGATIVE_OPS = frozenset("FloorDiv CleanDiv Mod PythonMod Max Min".split()) | _ROUNDINGS.keys()


def as_shape(dims: Any) -> relax.ShapeExpr:
    """Convert sizes to a shape."""
    return relax.ShapeExpr([int64(dim) for dim in dims])
