"""Sizes that torch.export leaves open: its symbols, and arithmetic on them, as TVM's expressions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from tvm import relax, tirx

from ...errors import FrontendError
from ..symbolic_sizes import simplified

# A size beyond every tensor: torch writes no bound as its infinity.
_NO_BOUND = 2**48


class Sizes:
    """The variables of one exported program.

    Parameters
    ----------
    names: Symbol of torch -> the name that the user gave.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._variables: dict[str, tirx.Var] = {}
        self.known: set[str] = set()
        """Symbols that inputs have, or nodes before."""

    def variable(self, symbol: Any) -> tirx.Var:
        """The variable of a symbol."""
        key = str(symbol)
        if key not in self._variables:
            self._variables[key] = tirx.Var(self._names.get(key, key), "int64")
        return self._variables[key]

    def dim(self, size: Any) -> Any:
        """A size of torch, an int or a SymInt, as an int or an expression.

        Raises
        ------
        FrontendError: If it is computed by something else than integer arithmetic.
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
            return self.variable(value)
        kind = type(value).__name__
        if kind == "Pow" and value.args[1].is_Integer and int(value.args[1]) > 0:
            return reduce(lambda a, b: a * b, [self.expr(value.args[0])] * int(value.args[1]))
        operation = _OPERATIONS.get(kind)
        if operation is None:
            raise FrontendError(f"the size {value} is computed by {kind}, which cannot be imported")
        return reduce(operation, map(self.expr, value.args))

    def ranges(self, constraints: Mapping[Any, Any]) -> list[tuple[Any, str]]:
        """What calls have to meet of the ranges of an exported program: conditions, and their texts.

        Torch traces with sizes of 2 and more and checks no lower bound up to 2; neither do we.
        """
        found = []
        for symbol, bounds in constraints.items():
            if any(str(part) not in self.known for part in symbol.free_symbols):
                continue
            size = self.expr(symbol)
            if bounds.lower.is_Integer and int(bounds.lower) > 2:
                found.append((_wide(size) >= _wide(int(bounds.lower)), f"{size} is at least {bounds.lower}"))
            if bounds.upper.is_Integer and int(bounds.upper) < _NO_BOUND:
                found.append((_wide(size) <= _wide(int(bounds.upper)), f"{size} is at most {bounds.upper}"))
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
    "CeilToInt": lambda a: a,
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


def as_shape(dims: Any) -> relax.ShapeExpr:
    """Sizes as a shape."""
    return relax.ShapeExpr([_wide(dim) for dim in dims])
