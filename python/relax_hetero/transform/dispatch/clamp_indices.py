"""ClampIndices: kernels access no memory but their tensors, and divide by no zero, whatever numbers they read.

Before::

    y[i] = x[index[i]]
    z[i] = a[i] // b[i]
    counts[index[i]] = 1

After::

    y[i] = x[T.max(T.min(index[i], 9), 0)]
    z[i] = a[i] // T.Select(b[i] == 0 or b[i] == -1, 1, b[i]) * T.Select(b[i] == 0, 0, T.Select(b[i] == -1, -1, 1))
           # multiplied as unsigned numbers
    if 0 <= index[i] and index[i] < 10: counts[index[i]] = 1

An index is clamped if it depends on data: on an element of a tensor, or on a float. Indices computed from positions and
extents alone are trusted, and so are those that TVM's analyzer proves to be inside. A load from an axis that is empty
gives 0. A quotient by 0 is 0, and so is a remainder; the least integer divided by -1 is itself, as in numpy (the
processor would end the process). Shifts by a negative number, or by the type's width or more, shift everything out.

This is the last line of defence, on every device and in every fused form. `CheckValues` raises errors for such numbers.
Kernels from a generator of this library bound their own indices; those that bind the threads of a GPU are left as
written.

Assumes legalized ops (within FormDispatches, before anything is fused or folded). A second run changes nothing.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import sym, tirx
from tvm.ir.expr import TensorLoad, TensorRegion
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...tir.core.bounds import BOUNDED, clamped, inside
from ...tir.core.walks import any_node, binds_threads, nodes
from ..ir.declare import declare_pass
from ..ir.kernels import OPS
from ..ir.rewriting import with_functions

_DIVISIONS = (tirx.Div, tirx.FloorDiv)
_REMAINDERS = (tirx.Mod, tirx.FloorMod)
_SHIFTS = (tirx.LShift, tirx.RShift)


def clamp_indices(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; returns the same module where nothing changes."""
    functions = {
        gv: _clamped(func)
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and OPS not in func.attrs and BOUNDED not in func.attrs
    }
    return with_functions(mod, functions)


ClampIndices = declare_pass("ClampIndices", clamp_indices)


def _clamped(func: tirx.PrimFunc) -> tirx.PrimFunc:
    data = _Data(func)
    if not data.matters(func.body) or binds_threads(func.body):
        return func
    body = structural_map(
        func.body,
        [
            (TensorLoad, data.load),
            (tirx.BufferStore, data.store),
            (TensorRegion, data.region),
            (_DIVISIONS, data.quotient),
            (_REMAINDERS, data.remainder),
            (_SHIFTS, data.shift),
        ],
    )
    if not data.has_changed:
        return func
    changed = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs, func.span)
    return changed.with_attr(BOUNDED, True)


class _Data:
    """Indices of a kernel that depend on data, and their bounds."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.has_changed = False  # True if an index or a divisor was bounded
        self._analyzer = sym.Analyzer()
        shapes = [param.ty.shape for param in filter(is_buffer_var, func.params)]
        extents = {var for shape in shapes for extent in shape for var in nodes(extent, tvm.ir.Var)}
        for var in extents:  # if one is 0, nothing is read
            minimum, count = tirx.const(1, _type(var)), tirx.const(2**31 - 2, _type(var))
            self._analyzer.bind(var, tvm.ir.Range.from_min_extent(minimum, count))
        # Scalar arguments of a kernel are sizes or indices within them, but any of them may be 0.
        self._scalars = {param for param in func.params if not is_buffer_var(param) and param not in extents}
        self._variables: set[tirx.Var] = set()
        for bound in nodes(func.body, tirx.Bind, tirx.LetStmt, tirx.Let):
            if self.depends(bound.value):
                self._variables.add(bound.var)

    def depends(self, expr: Any, on_scalars: bool = False) -> bool:
        """Return whether an expression depends on data, or (`on_scalars`) on scalar arguments of the kernel."""
        data = self._variables | self._scalars if on_scalars else self._variables

        def is_data(node: Any) -> bool:
            if isinstance(node, tirx.Cast):
                return _type(node.value).startswith(("float", "bfloat"))
            return isinstance(node, TensorLoad) or node in data

        return isinstance(expr, tirx.Expr) and any_node(expr, (TensorLoad, tirx.Cast, tvm.ir.Var), is_data)

    def matters(self, body: tirx.Stmt) -> bool:
        """Return whether a body has an index or a divisor that depends on data."""
        return any_node(
            body, (TensorLoad, tirx.BufferStore), lambda access: any(map(self.depends, access.indices))
        ) or any_node(body, (*_DIVISIONS, *_REMAINDERS, *_SHIFTS), self._is_unsafe)

    def load(self, load: Any) -> Any:
        """Load the element at the nearest valid index."""
        shape = load.source.ty.shape
        pairs = list(zip(load.indices, shape, strict=False))
        indices = [clamped(index, extent) if self._may_be_outside(index, extent) else index for index, extent in pairs]
        empty = [extent for index, extent in pairs if self.depends(index) and not isinstance(extent, tirx.IntImm)]
        if not empty and all(new is old for new, (old, _) in zip(indices, pairs, strict=True)):
            return load
        self.has_changed = True
        nothing = tirx.const(0, _type(load))
        if any(_is_zero(extent) for extent in shape):
            return nothing
        inner = tirx.BufferLoad(load.source, indices)
        not_empty = [extent > tirx.const(0, _type(extent)) for extent in empty]
        return tirx.if_then_else(tirx.all(*not_empty), inner, nothing) if not_empty else inner

    def store(self, store: tirx.BufferStore) -> tirx.Stmt:
        """Store only if the index is inside of the tensor."""
        pairs = list(zip(store.indices, store.buffer.ty.shape, strict=False))
        dependent = [(index, extent) for index, extent in pairs if self.depends(index) and _lanes(index) == 1]
        if not dependent:
            return store
        self.has_changed = True
        return tirx.IfThenElse(tirx.all(*(inside(index, extent) for index, extent in dependent)), store, None)

    def region(self, region: TensorRegion) -> TensorRegion:
        """Region that a block declares to access: the whole axis where its index depends on data."""
        if not any(self.depends(bounds.min) for bounds in region.region):
            return region
        shape = region.source.ty.shape
        widened = [
            tvm.ir.Range.from_min_extent(tirx.const(0, _type(extent)), extent) if self.depends(bounds.min) else bounds
            for bounds, extent in zip(region.region, shape, strict=True)
        ]
        return tirx.BufferRegion(region.source, widened)

    def quotient(self, division: Any) -> Any:
        """A quotient that is 0 where the divisor is 0, and wraps where the divisor is -1."""
        if not self._is_unsafe(division):
            return division
        dtype = _type(division)
        zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
        safe = type(division)(division.a, _safe_divisor(division.b))
        self.has_changed = True
        if dtype.startswith("uint"):
            return tirx.Select(division.b == zero, zero, safe)
        minus = tirx.const(-1, dtype)
        factor = tirx.Select(division.b == zero, zero, tirx.Select(division.b == minus, minus, one))
        # Unsigned, since the product of the least integer and -1 overflows. TVM would assume that a cast back is not
        # negative: reinterpret.
        unsigned = f"u{dtype}"
        return tirx.reinterpret(dtype, tirx.Mul(tirx.Cast(unsigned, safe), tirx.Cast(unsigned, factor)))

    def remainder(self, division: Any) -> Any:
        """A remainder that is 0 where the divisor is 0, or -1."""
        if not self._is_unsafe(division):
            return division
        self.has_changed = True
        return type(division)(division.a, _safe_divisor(division.b))

    def shift(self, shift: Any) -> Any:
        """A shift that is defined for any number of bits."""
        if not self._is_unsafe(shift):
            return shift
        dtype = _type(shift)
        zero, width = tirx.const(0, dtype), tvm.DataType(dtype).bits
        # TVM's simplifier fails on comparisons of unsigned numbers; a shift tests the range, as width is a power of 2.
        is_in_range = tirx.EQ(tirx.RShift(shift.b, tirx.const(width.bit_length() - 1, dtype)), zero)
        in_range = type(shift)(shift.a, tirx.Select(is_in_range, shift.b, zero))
        shifted_out: Any = zero
        if isinstance(shift, tirx.RShift) and not dtype.startswith("uint"):
            shifted_out = tirx.RShift(shift.a, tirx.const(width - 1, dtype))  # only the sign is left
        self.has_changed = True
        return tirx.Select(is_in_range, in_range, shifted_out)

    def _is_unsafe(self, division: Any) -> bool:
        return _is_integer(division) and self.depends(division.b, on_scalars=True)

    def _may_be_outside(self, index: Any, extent: Any) -> bool:
        """Return whether an index may be outside of an axis that has an element."""
        is_data = self.depends(index) and _lanes(index) == 1
        return is_data and not self._analyzer.can_prove(inside(index, extent))


def _safe_divisor(divisor: Any) -> Any:
    dtype = _type(divisor)
    is_zero = divisor == tirx.const(0, dtype)
    is_special = is_zero if dtype.startswith("uint") else tirx.any(is_zero, divisor == tirx.const(-1, dtype))
    return tirx.Select(is_special, tirx.const(1, dtype), divisor)


def _is_integer(value: Any) -> bool:
    return _type(value).startswith(("int", "uint")) and _lanes(value) == 1


def _is_zero(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 0


def _type(value: Any) -> str:
    return str(value.ty.dtype)


def _lanes(value: Any) -> int:
    return int(tvm.DataType(_type(value)).lanes)
