"""HoistEncodings: pack constants at compile time.

Before::

    b = R.hetero.set_encoding(metadata["relax.expr.Constant"][0], "matmul[1]<...>", layout="pack<...>")

After::

    b = R.hetero.prepacked(metadata["relax.expr.Constant"][0], "768x768", "matmul[1]<...>", layout="pack<...>")

Each distinct (constant, layout) has one packed copy, shared by all its users across functions, and placed once on each
device that uses it; the unpacked constant is dropped unless something else uses it. A transfer or relayout of a packed
constant becomes a constant that is packed for the destination.

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
from ...vm.device.tensor_arrays import host_array
from ...vm.device.tensors import share_or_copy
from ..ir.blocks import Block, rewrite_blocks, without_unused
from ..ir.declare import declare_pass
from ..ir.op_names import CAST, PERMUTE, RESHAPE, TRANSFER
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, with_functions
from .encoded_values import Stored, physical_type

FOLDED_OPS = (PERMUTE, RESHAPE, CAST, TRANSFER)
"""Ops whose result on a constant is a constant: HoistEncodings computes them for encodings."""


@dataclass(frozen=True)
class _Source:
    """A constant, and the folded ops between it and its encoding."""

    data: tvm.runtime.Tensor
    ops: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[int, tuple[tuple[str, Any], ...]]:
        """Hashable key of the constant, by its identity (the module keeps it alive), and the ops."""
        return hash(self.data), self.ops

    def then(self, op: str, call: relax.Call) -> _Source:
        """The source with one more op."""
        if op == CAST:
            parameter: Any = str(call.attrs.dtype)
        elif op == PERMUTE:
            axes = call.attrs.axes
            rank = len(call.args[0].ty.shape.values)
            parameter = tuple(reversed(range(rank))) if axes is None else tuple(int(axis) % rank for axis in axes)
        else:
            parameter = tuple(int(extent) for extent in call.ty.shape.values)
        return _Source(self.data, (*self.ops, (op, parameter)))

    def array(self) -> np.ndarray:
        """The elements of the result."""
        array = host_array(self.data)
        for op, parameter in self.ops:
            if op == CAST:
                array = array.astype(numpy_dtype(parameter))
            else:
                array = array.transpose(parameter) if op == PERMUTE else array.reshape(parameter)
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
        return encoded_op(value) == PREPACKED or op_name(value) in FOLDED_OPS

    bindings = without_unused(block.bindings, block, is_source)
    return bindings if len(bindings) < len(block.bindings) else None


class _Packer:
    """Rewriter of bindings, with the plain, encoded and packed constants so far."""

    def __init__(self) -> None:
        self.sources: dict[relax.Var, _Source] = {}
        self.encoded: dict[relax.Var, _Encoded] = {}
        self.packed: dict[tuple[Any, PackedLayout], tvm.runtime.Tensor] = {}

    def change(self, binding: relax.Binding) -> relax.Binding:
        """The binding with its constant packed, if it encodes a constant."""
        var, value = binding.var, binding.value
        encoded = self._encoded(value)
        if encoded is None:
            source = self._source(value)
            if source is not None:
                self.sources[var] = source
            return binding
        self.encoded[var] = encoded
        layout = PackedLayout.parse(encoded.layout)
        if layout.is_identity and encoded_op(value) != RELAYOUT:
            return binding
        shape = [int(extent) for extent in var.ty.shape.values]
        data = tvm.ir.GenericConst(self._pack(encoded.source, layout), physical_type(Stored(var.ty, layout)))
        call = ops.prepacked(data, shape, encoded.encoding, layout)
        return relax.VarBinding(var, typed(call, var.ty), binding.span)

    def _encoded(self, value: relax.Expr) -> _Encoded | None:
        """The encoded, specialized constant that `value` is; None for any other value."""
        name = encoded_op(value)
        if name == SET and value.attrs.layout:
            source = self._source(value.args[0])
            return None if source is None else _Encoded(source, str(value.attrs.encoding), str(value.attrs.layout))
        operand = self.encoded.get(value.args[0]) if name == RELAYOUT or op_name(value) == TRANSFER else None
        if operand is None or name is None:
            return operand
        return _Encoded(operand.source, str(value.attrs.encoding), str(value.attrs.layout))

    def _source(self, value: relax.Expr) -> _Source | None:
        """The plain constant that `value` is; None for any other value."""
        if isinstance(value, relax.Var):
            return self.sources.get(value)
        if isinstance(value, tvm.ir.GenericConst):
            return _Source(value.value) if isinstance(value.value, tvm.runtime.Tensor) else None
        name = op_name(value) or ""
        source = self._source(value.args[0]) if name in FOLDED_OPS else None
        if source is None or name == TRANSFER:
            return source
        shape = value.ty.shape
        if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(dim, tirx.IntImm) for dim in shape.values):
            return None  # reshaped to symbolic sizes
        return source.then(name, value)

    def _pack(self, source: _Source, layout: PackedLayout) -> tvm.runtime.Tensor:
        key = (source.key, layout)
        if key not in self.packed:
            self.packed[key] = share_or_copy(layout.pack(source.array()))
        return self.packed[key]
