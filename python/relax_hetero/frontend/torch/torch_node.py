"""An ATen op during conversion: its arguments, the result type that torch inferred, and helpers that emit Relax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from ...errors import FrontendError
from ...tir.core.builder import int64
from ..onnx.control_flow.subgraphs import Importer
from ..onnx.node_names import NodeInfo
from ..ops.elementwise import cast
from ..ops.node import Node, as_constant, const
from ..ops.run_time.numbers import dims_at_run_time
from ..ops.table import convert_node
from .sizes import Sizes, as_shape

_OPSET = 22

Converter: TypeAlias = "Callable[..., Any]"
"""Function from a `TorchNode` and the op's arguments, in schema order, to a result or a list of results."""

TABLE: dict[str, Converter] = {}
"""Converters by name of the op, with an overload ("add.Tensor") or for all overloads ("add")."""


def converts(*names: str) -> Callable[[Converter], Converter]:
    """Register a function as the converter of these ops."""

    def register(function: Converter) -> Converter:
        for name in names:
            assert name not in TABLE, name
            TABLE[name] = function
        return function

    return register


def dtype_name(dtype: Any, subject: str = "a tensor") -> str:
    """TVM's name of a dtype of torch.

    `subject`: name of the owner of the dtype in the error. Raises FrontendError if the dtype is not supported.
    """
    name = str(dtype)[6:]
    if name not in _DTYPES:
        raise FrontendError(f"{subject} is of {dtype}, which cannot be imported; expected one of {sorted(_DTYPES)}")
    return name


_DTYPES = frozenset("float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split())


class Walk(Importer, Protocol):
    """Importer as ops with nested graphs see it."""

    def graph_of(self, module: Any, arguments: Sequence[Any]) -> list[Any]:
        """Convert a nested graph at the builder's position and return its results."""


@dataclass
class TorchNode:
    """An op of an exported program."""

    op: str  # name with overload, "add.Tensor"
    info: NodeInfo  # its names
    value: Any  # fake tensor of its result, or a list of them
    tensors: Sequence[Any]  # fake tensors (or numbers) of its arguments, in schema order
    walk: Walk
    sizes: Sizes
    used: frozenset[int] = frozenset()  # indices of the results that are read

    @property
    def name(self) -> str:
        """Name of its bindings."""
        return self.info.name

    @property
    def builder(self) -> relax.BlockBuilder:
        """The builder that emits bindings."""
        return self.walk.bb

    def refusal(self, reason: str) -> FrontendError:
        """The error to raise if this op cannot be converted."""
        return FrontendError(f"aten.{self.op} node {self.name!r}: {reason}")

    @property
    def dtype(self) -> str:
        """Element type of the result."""
        return dtype_name(self.value.dtype)

    @property
    def shape(self) -> list[Any]:
        """Sizes of the result."""
        return self.sizes.shape(self.value.shape)

    def onnx_node(self, op_type: str, inputs: Sequence[Any], outputs: int = 1, **attributes: Any) -> Node:
        """An ONNX node that computes this op or a part of it."""
        inputs = [None if value is None else self._operand(value) for value in inputs]
        return Node(op_type, self.name, attributes.pop("opset", _OPSET), self.builder, inputs, attributes, outputs)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, relax.Expr):
            return value
        dims = [int64(dim) for dim in value]
        if all(isinstance(dim, tirx.IntImm) for dim in dims):
            return const([int(dim) for dim in dims], "int64")
        return relax.ShapeExpr(dims)

    def onnx(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Emit an ONNX op by its converter; lists of sizes become vectors."""
        value = self.emit(convert_node(self.onnx_node(op_type, inputs, outputs, **attributes)))
        if outputs == 1:
            return value
        return [self.emit(relax.TupleGetItem(value, index)) for index in range(outputs)]

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Bind a value to a variable unless it is a variable, constant or size."""
        if isinstance(value, (relax.Var, tvm.ir.GenericConst)) or tvm.ir.is_prim_expr(value):
            return value
        return self.builder.emit(value)

    def tensor(self, value: Any, dtype: str | None = None) -> relax.Expr:
        """Convert a tensor, number or size to a tensor of an element type, by default the result's."""
        dtype = dtype or self.dtype
        if isinstance(value, (bool, int, float)):
            if dtype == "bool":
                return const(bool(value), dtype)
            return const(np.array(value).astype("float32") if dtype == "bfloat16" else value, dtype)
        if tvm.ir.is_prim_expr(value):
            value = self.number(value)
        return self.cast(value, dtype)

    def number(self, value: Any) -> relax.Expr:
        """Convert a Python number or a size to a scalar tensor of bool, int64 or float64."""
        if isinstance(value, (bool, int, float)):
            return const(value, {bool: "bool", int: "int64"}.get(type(value), "float64"))
        if str(value.ty) == "bool":
            integer = tirx.Select(value, tirx.IntImm("int64", 1), tirx.IntImm("int64", 0))
            return self.cast(self.onnx_node("Identity", [integer]).tensor(0), "bool")
        for read in self.sizes.read.values():
            if isinstance(value, tirx.Var) and value.same_as(read[0]):
                return read[1]
        return self.onnx_node("Identity", [value]).tensor(0)

    def read_size(self, value: relax.Expr) -> Any:
        """Convert a tensor of one element to a size."""
        node = self.onnx_node("Identity", [value])
        vector = self.cast(self.reshape(value, [1]), "int64")
        if isinstance(vector, tvm.ir.GenericConst):
            return int(vector.value.numpy()[0])
        (size,) = dims_at_run_time(node, vector, "number")
        return size

    def of(self, value: Any) -> TorchNode:
        """Copy of this op with another result."""
        return replace(self, value=value)

    def cast(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """Cast a tensor to another element type."""
        current = str(value.ty.dtype)
        if current == dtype:
            return value
        if dtype == "bool":
            return self.emit(relax.op.not_equal(value, const(0, current)))
        return cast(self.onnx_node("Cast", [value]), value, dtype)

    def dims(self, value: relax.Expr) -> list[Any]:
        """Sizes of a tensor."""
        return self.onnx_node("Identity", [value]).shape(value)

    def reshape(self, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
        """Reshape a tensor."""
        current = self.dims(value)
        if len(current) == len(dims) and all(_sizes_match(a, b) for a, b in zip(current, dims, strict=True)):
            return value
        if any(_sizes_match(dim, 0) for dim in current):  # in Relax's reshape, 0 means the size of the axis
            return self.filled(0, [0 if _sizes_match(dim, -1) else dim for dim in dims], str(value.ty.dtype))
        return self.emit(relax.op.reshape(value, as_shape(dims)))

    def broadcast(self, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
        """Broadcast a tensor to a shape."""
        current = self.dims(value)
        if len(current) == len(dims) and all(_sizes_match(a, b) for a, b in zip(current, dims, strict=True)):
            return value
        return self.emit(relax.op.broadcast_to(value, as_shape(dims)))

    def filled(self, value: Any, dims: Sequence[Any] | None = None, dtype: str | None = None) -> relax.Expr:
        """A tensor filled with one number, by default of the result's shape and type."""
        dims = self.shape if dims is None else dims
        return self.broadcast(self.tensor(value, dtype), dims) if dims else self.tensor(value, dtype)

    def from_zero(self, indices: relax.Expr, extent: Any) -> relax.Expr:
        """Indices for ops in which torch refuses negative ones: these are moved out of range."""
        constant = as_constant(indices)
        dtype = str(indices.ty.dtype)
        if (constant is not None and (constant >= 0).all()) or dtype.startswith("uint"):
            return indices
        below = indices - self.tensor(extent, dtype)
        return self.emit(relax.op.where(indices < const(0, dtype), below, indices))

    def axis(self, axis: int, rank: int) -> int:
        """The non-negative index of an axis."""
        return axis % rank if rank else 0

    def sizes_equal(self, a: Any, b: Any) -> bool:
        """Return whether two sizes are provably equal."""
        return _sizes_match(a, b)

    def static(self, dims: Sequence[Any], what: str) -> list[int]:
        """Check that sizes are static, and return them."""
        if not all(isinstance(dim, int) for dim in dims):
            raise self.refusal(f"{what} {list(dims)}, expected sizes that are known at import")
        return [int(dim) for dim in dims]


def _sizes_match(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))
