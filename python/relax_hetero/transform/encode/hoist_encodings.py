"""HoistEncodings: constants are laid out at compile time.

Before::

    b = R.hetero.set_encoding(metadata["relax.expr.Constant"][0], "matmul[1]<...>", layout="pack<...>")

After::

    b = R.hetero.prepacked(metadata["relax.expr.Constant"][0], "768x768", "matmul[1]<...>", layout="pack<...>")

There is one packed copy for each distinct (constant, layout), shared by all its users, functions included, and placed
once on each device that uses it; the source goes with its last user. A transfer or relayout of a packed constant is a
constant packed for where it goes.

Assumes SpecializeEncodings. A second run changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from ...encoding.packed_layout import PackedLayout
from ...op import encoded as ops
from ...op.encoded import PREPACKED, RELAYOUT, SET, encoded_op
from ...target.element_types import numpy_dtype
from ..ir.blocks import Block, rewrite_blocks, without_unused
from ..ir.declare import declare_pass
from ..ir.op_names import CAST, PERMUTE, RESHAPE, TRANSFER
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, with_functions
from .encoded_values import Stored, physical_type

_COMPUTED = (PERMUTE, RESHAPE, CAST, TRANSFER)
"""Ops on a constant that are computed here, where an encoding is all they are for."""


@dataclass(frozen=True)
class _Source:
    """A constant, and what the program does to it before it is encoded."""

    data: tvm.runtime.Tensor
    steps: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[int, tuple[tuple[str, Any], ...]]:
        """Equal for the same constant treated alike; the module keeps the constant alive, so its identity will do."""
        return hash(self.data), self.steps

    def then(self, op: str, call: relax.Call) -> _Source:
        """With one more step."""
        if op == CAST:
            parameter: Any = str(call.attrs.dtype)
        elif op == PERMUTE:
            axes = call.attrs.axes
            rank = len(call.args[0].ty.shape.values)
            parameter = tuple(reversed(range(rank))) if axes is None else tuple(int(axis) % rank for axis in axes)
        else:
            parameter = tuple(int(extent) for extent in call.ty.shape.values)
        return _Source(self.data, (*self.steps, (op, parameter)))

    def array(self) -> np.ndarray:
        """Its elements."""
        array = _array(self.data)
        for step, parameter in self.steps:
            if step == CAST:
                array = array.astype(numpy_dtype(parameter))
            else:
                array = array.transpose(parameter) if step == PERMUTE else array.reshape(parameter)
        return array


@dataclass(frozen=True)
class _Encoded:
    """A constant under an encoding and a layout, as text."""

    source: _Source
    encoding: str
    layout: str


def hoist_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    packer = _Packer()
    changed = with_functions(mod, {gv: map_bindings(func, packer.change) for gv, func in relax_functions(mod)})
    if not packer.packed:
        return mod
    return mod if changed.same_as(mod) else rewrite_blocks(changed, _without_sources)


HoistEncodings = declare_pass("HoistEncodings", hoist_encodings)


def _without_sources(block: Block) -> list[relax.Binding] | None:
    def is_source(value: relax.Expr) -> bool:
        return encoded_op(value) == PREPACKED or op_name(value) in _COMPUTED

    kept = without_unused(block.bindings, block, is_source)
    return kept if len(kept) < len(block.bindings) else None


class _Packer:
    """Constants among variables, plain and encoded, and those that have been packed."""

    def __init__(self) -> None:
        self.sources: dict[relax.Var, _Source] = {}
        self.encoded: dict[relax.Var, _Encoded] = {}
        self.packed: dict[tuple[Any, PackedLayout], tvm.runtime.Tensor] = {}

    def change(self, binding: relax.Binding) -> relax.Binding:
        """The binding with its constant packed, if it is one that an encoding wants packed."""
        var, value = binding.var, binding.value
        known = self._encoded(value)
        if known is None:
            source = self._source(value)
            if source is not None:
                self.sources[var] = source
            return binding
        self.encoded[var] = known
        layout = PackedLayout.parse(known.layout)
        if layout.is_identity and encoded_op(value) != RELAYOUT:
            return binding
        shape = [int(extent) for extent in var.ty.shape.values]
        data = tvm.ir.GenericConst(self._pack(known.source, layout), physical_type(Stored(var.ty, layout)))
        call = ops.prepacked(data, shape, known.encoding, layout)
        return relax.VarBinding(var, typed(call, var.ty), binding.span)

    def _encoded(self, value: relax.Expr) -> _Encoded | None:
        """Encoded, specialized constant that `value` is; None if it is none."""
        name = encoded_op(value)
        if name == SET and value.attrs.layout:
            source = self._source(value.args[0])
            return None if source is None else _Encoded(source, str(value.attrs.encoding), str(value.attrs.layout))
        known = self.encoded.get(value.args[0]) if name == RELAYOUT or op_name(value) == TRANSFER else None
        if known is None or name is None:
            return known
        return _Encoded(known.source, str(value.attrs.encoding), str(value.attrs.layout))

    def _source(self, value: relax.Expr) -> _Source | None:
        """Plain constant that `value` is, None if it is none."""
        if isinstance(value, relax.Var):
            return self.sources.get(value)
        if isinstance(value, tvm.ir.GenericConst):
            return _Source(value.value) if isinstance(value.value, tvm.runtime.Tensor) else None
        name = op_name(value) or ""
        source = self._source(value.args[0]) if name in _COMPUTED else None
        if source is None or name == TRANSFER:
            return source
        shape = value.ty.shape
        if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(dim, tirx.IntImm) for dim in shape.values):
            return None  # reshaped to sizes that only a call knows
        return source.then(name, value)

    def _pack(self, source: _Source, layout: PackedLayout) -> tvm.runtime.Tensor:
        key = (source.key, layout)
        if key not in self.packed:
            self.packed[key] = tvm.runtime.tensor(layout.pack(source.array()))
        return self.packed[key]


def _array(data: tvm.runtime.Tensor) -> np.ndarray:
    """The elements of a tensor in host memory, not copied where numpy knows the type."""
    try:
        return np.from_dlpack(data)
    except (BufferError, RuntimeError, TypeError):  # bfloat16 and its kin, other devices
        return data.numpy()
