"""Symbolic dimensions at run time: expressions, and the values of names in a call."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import BindingError
from .signature import Dim

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_DEPTH = 200  # maximum nesting of operators in a dimension
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


@dataclass(frozen=True)
class DimExpression:
    """A parsed dimension text: its names, and a function of their values.

    `evaluate` is None for text outside the grammar, which counts as a name.
    """

    text: str
    names: frozenset[str]
    evaluate: Callable[[Mapping[str, int]], int] | None


@functools.lru_cache(maxsize=4096)
def parse_dim(text: str) -> DimExpression:
    """Parse a dimension text; never fails (see `DimExpression.evaluate`)."""
    try:
        tree = ast.parse(text, mode="eval").body
        evaluate = _compile(tree, _MAX_DEPTH)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return DimExpression(text, frozenset({text}), None)
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - _CALLS.keys()
    return DimExpression(text, names, evaluate)


def _compile(node: ast.expr, depth: int) -> Callable[[Mapping[str, int]], int]:
    if depth == 0:  # evaluation recurses as deep
        raise ValueError("nested too deep")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
        return lambda env: value
    if isinstance(node, ast.Name):
        name = node.id
        return lambda env: env[name]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        apply, left, right = _BINARY[type(node.op)], _compile(node.left, depth - 1), _compile(node.right, depth - 1)
        return lambda env: apply(left(env), right(env))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _compile(node.operand, depth - 1)
        return lambda env: -operand(env)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _CALLS and node.args:
            function, arguments = _CALLS[node.func.id], [_compile(argument, depth - 1) for argument in node.args]
            return lambda env: function(*[argument(env) for argument in arguments])
    raise ValueError(f"not a dimension: {ast.dump(node)}")


# An argument and its dimension (None: the value itself), formatted only for messages.
Origin: TypeAlias = tuple[str, int | None]


def _text(origin: Origin) -> str:
    where, axis = origin
    return where if axis is None else f"{where} dimension {axis}"


@dataclass
class DimValues:
    """The values of names in one call, and the arguments that determined them.

    Expressions are checked in `settle`, because later arguments may determine their names.
    """

    values: dict[str, int] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    _waiting: list[tuple[DimExpression, int, Origin]] = field(default_factory=list)

    def copy(self) -> DimValues:
        """An independent copy for another call."""
        return DimValues(dict(self.values), dict(self.origins))

    def match(self, dim: Dim, found: int, where: str, axis: int | None = None) -> None:
        """Require that `dim` equals `found` at `where` (``argument 'x'``); BindingError otherwise."""
        if not isinstance(dim, str):
            if dim != found:
                raise BindingError(f"{_text((where, axis))} is {found}, expected {dim}")
        elif dim.isidentifier():
            self._bind(dim, found, (where, axis))
        else:
            self._waiting.append((parse_dim(dim), found, (where, axis)))

    def _bind(self, name: str, found: int, origin: Origin) -> None:
        value = self.values.get(name)
        if value is None:
            self.values[name] = found
            self.origins[name] = origin
        elif value != found:
            raise BindingError(
                f"{_text(origin)} is {found}, expected {value}: {name} is {value} by {_text(self.origins[name])}"
            )

    def check_bounds(self, bounds: Mapping[str, int]) -> None:
        """Require that names do not exceed the module's upper bounds; BindingError otherwise."""
        for name, bound in bounds.items():
            value = self.values.get(name, 0)
            if value > bound:
                raise BindingError(
                    f"{name} is {value} by {_text(self.origins[name])}, expected at most {bound}, its upper bound: "
                    "memory is planned for it"
                )

    def settle(self) -> None:
        """Check the pending expressions; an expression with undetermined names counts as a name itself."""
        waiting, self._waiting = self._waiting, []
        for expression, found, origin in waiting:
            if expression.evaluate is None or not expression.names <= self.values.keys():
                self._bind(expression.text, found, origin)
                continue
            try:
                expected = expression.evaluate(self.values)
            except ZeroDivisionError:
                continue  # the machine's own check of the shape reports it
            if expected != found:
                values = ", ".join(f"{name} is {self.values[name]}" for name in sorted(expression.names))
                raise BindingError(f"{_text(origin)} is {found}, expected {expression.text} = {expected} ({values})")
