"""Expressions become functions of lanes and a mask.

A value is a numpy scalar where it is the same in all lanes, an array over lanes where it is not; of a vector type, an
array of lanes (or 1) by elements. Inactive lanes compute too, and their values mean nothing; only memory is guarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import calls
from .dtypes import cast, is_float, lanes_of, scalar_type
from .faults import KernelFault
from .names import Names

Evaluator = Callable[[Any, Any], Any]
"""Function from lanes and a mask (None: all active) to a value."""


def dtype_of(expr: Any) -> str:
    """The type of an expression, as TVM names it; "handle" for pointers."""
    return "handle" if type(expr.ty).__name__ == "PointerType" else str(expr.ty.dtype)


def merged(lanes: Any, condition: np.ndarray, then: Any, otherwise: Any) -> Any:
    """Values selected by a condition over lanes."""
    if np.ndim(condition) == 1 and max(np.ndim(then), np.ndim(otherwise)) == 2:
        condition = condition[:, None]
    return np.where(condition, then, otherwise)


def both(mask: Any, condition: Any) -> Any:
    """The mask of active lanes for which a condition holds."""
    if mask is None:
        return condition
    return mask[:, None] & condition if np.ndim(condition) == 2 and mask.ndim == 1 else mask & condition


def _truncated_quotient(left: Any, right: Any) -> Any:
    """Quotient towards zero, as in C, in the operands' type, in which the least number lacks an absolute value."""
    divisor = np.where(np.asarray(right) == 0, 1, right).astype(np.asarray(right).dtype)
    return (left - np.fmod(left, divisor)) // divisor


def _quotient(left: Any, right: Any) -> Any:
    return left / right if is_float(np.asarray(left).dtype) else _truncated_quotient(left, right)


def _extreme(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def function(left: Any, right: Any) -> Any:
        # C: `a < b ? a : b`; fmin and fmax of CUDA return the number if the other operand is NaN.
        return pick(left, right)

    return function


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _quotient,
    "Mod": np.fmod,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "Min": _extreme(np.fmin),
    "Max": _extreme(np.fmax),
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": lambda a, b: np.left_shift(a, np.asarray(b).astype(np.asarray(a).dtype)),
    "RShift": lambda a, b: np.right_shift(a, np.asarray(b).astype(np.asarray(a).dtype)),
}


class Expressions:
    """Compiles expressions of one kernel."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def compiled(self, expr: Any) -> Evaluator:
        """The function of an expression."""
        kind = type(expr).__name__
        if kind in BINARY:
            return self._binary(BINARY[kind], expr)
        method = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise NotImplementedError(f"expressions of kind {kind}: {expr}")
        return method(expr)

    def view(self, buffer: Any) -> Callable[[Any], Any]:
        """The function that gives a buffer's view."""
        slot = self.names.slot(buffer)
        return lambda lanes: lanes.slots[slot]

    def place(self, load: Any) -> tuple[Callable[[Any], Any], Evaluator]:
        """View and flat index of an element that is loaded or stored."""
        return self.element(load.source, load.indices)

    def element(self, buffer: Any, indices: Any) -> tuple[Callable[[Any], Any], Evaluator]:
        """View and flat index of ``buffer[indices]``."""
        view = self.view(buffer)
        compiled = [self.compiled(index) for index in indices]
        width = lanes_of(str(buffer.ty.dtype))[1]
        self.names.cells[self.names.slot(buffer)] = scalar_type(str(buffer.ty.dtype)).itemsize
        if str(buffer.ty.storage_scope).startswith("shared"):
            self.names.accessed(scalar_type(str(buffer.ty.dtype)).itemsize)

        def flat(lanes: Any, mask: Any) -> Any:
            if len(compiled) == 1:
                return compiled[0](lanes, mask)
            strides = view(lanes).strides
            return sum(index(lanes, mask) * stride for index, stride in zip(compiled, strides, strict=True))

        def of_vectors(lanes: Any, mask: Any) -> Any:
            start = np.asarray(flat(lanes, mask), np.int64) * width
            start = np.atleast_1d(start) if start.ndim < 2 else start
            every = start[..., None] + np.arange(width)
            return every.reshape(every.shape[0], -1)

        return view, (flat if width == 1 else of_vectors)

    def address(self, expr: Any) -> Evaluator:
        """The generic address of a pointer expression, an element or a buffer."""
        if type(expr).__name__ == "TensorLoad":
            self.names.written.add(self.names.slot(expr.source))
            cell = self.names.cell
            view, index = self.place(expr)
            self.names.cell = cell  # taking an address is not an access

            def of_element(lanes: Any, mask: Any) -> Any:
                place = view(lanes)
                offset = index(lanes, mask)
                offset = offset[..., 0] if np.ndim(offset) == 2 else offset
                return place.address + np.asarray(offset, np.int64).astype(np.uint64) * np.uint64(place.dtype.itemsize)

            return of_element
        if type(expr).__name__ == "Var" and self.names.is_buffer(expr):
            self.names.written.add(self.names.slot(expr))
            view = self.view(expr)
            return lambda lanes, mask: view(lanes).address
        return self.compiled(expr)

    def _binary(self, function: Callable[[Any, Any], Any], expr: Any) -> Evaluator:
        left, right = self.compiled(expr.a), self.compiled(expr.b)
        dtype = scalar_type(dtype_of(expr))
        if dtype.kind == "f" or dtype.kind in "iub":
            return lambda lanes, mask: function(left(lanes, mask), right(lanes, mask))
        return lambda lanes, mask: np.asarray(function(left(lanes, mask), right(lanes, mask))).astype(dtype)[()]

    def _intimm(self, expr: Any) -> Evaluator:
        value = np.asarray(expr.value).astype(scalar_type(dtype_of(expr)))[()]
        return lambda lanes, mask: value

    def _floatimm(self, expr: Any) -> Evaluator:
        value = np.asarray(expr.value, np.float64).astype(scalar_type(dtype_of(expr)))[()]
        return lambda lanes, mask: value

    def _stringimm(self, expr: Any) -> Evaluator:
        value = str(expr.value)
        return lambda lanes, mask: value

    def _var(self, expr: Any) -> Evaluator:
        slot, name = self.names.slot(expr), str(expr.name)
        if self.names.is_buffer(expr):
            return lambda lanes, mask: lanes.slots[slot].address

        def value(lanes: Any, mask: Any) -> Any:
            current = lanes.slots[slot]
            if current is None:
                raise KernelFault(f"variable {name} has no value")
            return current

        return value

    def _cast(self, expr: Any) -> Evaluator:
        value, dtype = self.compiled(expr.value), scalar_type(dtype_of(expr))
        return lambda lanes, mask: cast(value(lanes, mask), dtype)

    def _ramp(self, expr: Any) -> Evaluator:
        base, stride = self.compiled(expr.base), self.compiled(expr.stride)
        steps = np.arange(int(expr.lanes)).astype(scalar_type(dtype_of(expr)))

        def value(lanes: Any, mask: Any) -> Any:
            start, step = base(lanes, mask), stride(lanes, mask)
            return np.atleast_1d(start)[:, None] + np.atleast_1d(step)[:, None] * steps

        return value

    def _broadcast(self, expr: Any) -> Evaluator:
        value, count = self.compiled(expr.value), int(expr.lanes)
        return lambda lanes, mask: np.repeat(np.atleast_1d(value(lanes, mask))[:, None], count, axis=1)

    def _shuffle(self, expr: Any) -> Evaluator:
        vectors, indices = [self.compiled(v) for v in expr.vectors], [int(i) for i in expr.indices]

        def value(lanes: Any, mask: Any) -> Any:
            parts = [v(lanes, mask) for v in vectors]
            parts = [p if np.ndim(p) == 2 else np.atleast_1d(p)[:, None] for p in parts]
            rows = max(p.shape[0] for p in parts)
            every = np.concatenate([np.broadcast_to(p, (rows, p.shape[1])) for p in parts], axis=1)
            return every[:, indices] if len(indices) > 1 else every[:, indices[0]]

        return value

    def _select(self, expr: Any) -> Evaluator:
        return self.chosen(expr.condition, expr.true_value, expr.false_value)

    def chosen(self, condition: Any, then: Any, otherwise: Any) -> Evaluator:
        """C's ``condition ? then : otherwise``, which evaluates only one side."""
        test, first, second = self.compiled(condition), self.compiled(then), self.compiled(otherwise)

        def value(lanes: Any, mask: Any) -> Any:
            which = test(lanes, mask)
            if np.ndim(which) == 0:
                return first(lanes, mask) if which else second(lanes, mask)
            yes, no = both(mask, which), both(mask, ~which)
            if not no.any():
                return first(lanes, mask)
            if not yes.any():
                return second(lanes, mask)
            return merged(lanes, which, first(lanes, yes), second(lanes, no))

        return value

    def _and(self, expr: Any) -> Evaluator:
        left, right = self.compiled(expr.a), self.compiled(expr.b)

        def value(lanes: Any, mask: Any) -> Any:
            first = left(lanes, mask)
            if np.ndim(first) == 0:
                return right(lanes, mask) if first else np.False_
            return first & right(lanes, both(mask, first)) if both(mask, first).any() else first

        return value

    def _or(self, expr: Any) -> Evaluator:
        left, right = self.compiled(expr.a), self.compiled(expr.b)

        def value(lanes: Any, mask: Any) -> Any:
            first = left(lanes, mask)
            if np.ndim(first) == 0:
                return np.True_ if first else right(lanes, mask)
            return first | right(lanes, both(mask, ~first)) if both(mask, ~first).any() else first

        return value

    def _not(self, expr: Any) -> Evaluator:
        value = self.compiled(expr.a)
        return lambda lanes, mask: np.logical_not(value(lanes, mask))

    def _bitwisenot(self, expr: Any) -> Evaluator:
        value = self.compiled(expr.a)
        return lambda lanes, mask: np.invert(value(lanes, mask))

    def _let(self, expr: Any) -> Evaluator:
        slot, value, body = self.names.slot(expr.var), self.compiled(expr.value), self.compiled(expr.body)

        def result(lanes: Any, mask: Any) -> Any:
            lanes.slots[slot] = value(lanes, mask)
            return body(lanes, mask)

        return result

    def _tensorload(self, expr: Any) -> Evaluator:
        view, index = self.place(expr)

        def value(lanes: Any, mask: Any) -> Any:
            place = view(lanes)
            return place.memory.load(lanes, mask, place, index(lanes, mask))

        return value

    def _call(self, expr: Any) -> Evaluator:
        return calls.compiled(self, expr)
