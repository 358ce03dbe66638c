"""One ATen op while it is converted: its arguments, the result that torch found, and the builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from ...errors import FrontendError
from ..onnx.control_flow.subgraphs import Importer
from ..onnx.node_names import NodeInfo
from ..ops.elementwise import cast
from ..ops.node import Node, as_constant, const
from ..ops.run_time.numbers import dims_at_run_time
from ..ops.table import convert_node
from .sizes import Sizes, as_shape

_OPSET = 22

Converter: TypeAlias = "Callable[..., Any]"
"""From a `TorchNode` and the op's arguments, in the order of its schema, to a result or a list of results."""

TABLE: dict[str, Converter] = {}
"""Converters by name of the op, with its overload ("add.Tensor") or for all ("add")."""


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

    Parameters
    ----------
    subject : str
        Owner of the dtype, which the error names.

    Raises
    ------
    FrontendError
        If the library has no tensors of it.
    """
    name = str(dtype)[6:]
    if name not in _DTYPES:
        raise FrontendError(f"{subject} is of {dtype}, which cannot be imported; expected one of {sorted(_DTYPES)}")
    return name


_DTYPES = frozenset("float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split())


class Walk(Importer, Protocol):
    """The walk over a program, as far as ops with graphs in them need it."""

    def graph_of(self, module: Any, given: Sequence[Any]) -> list[Any]:
        """The results of a graph inside a node, converted where the builder stands."""


@dataclass
class TorchNode:
    """An op of an exported program.

    Attributes
    ----------
    op : str
        Name with overload, "add.Tensor".
    info : NodeInfo
        Its names.
    value : object
        The fake tensor that torch found as its result, or a list of them.
    tensors : sequence of object
        Fake tensors (or numbers) of its arguments, in the order of its schema.
    used : frozenset of int
        Which of several results something reads.
    """

    op: str
    info: NodeInfo
    value: Any
    tensors: Sequence[Any]
    walk: Walk
    sizes: Sizes
    used: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """Name of the bindings made of it."""
        return self.info.name

    @property
    def builder(self) -> relax.BlockBuilder:
        """Where bindings are emitted."""
        return self.walk.bb

    def refusal(self, reason: str) -> FrontendError:
        """The error to raise where this op cannot be converted."""
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
        """The node of ONNX that computes this op, or a part of it."""
        inputs = [None if value is None else self._operand(value) for value in inputs]
        return Node(op_type, self.name, attributes.pop("opset", _OPSET), self.builder, inputs, attributes, outputs)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, relax.Expr):
            return value
        dims = [tirx.IntImm("int64", dim) if isinstance(dim, int) else dim for dim in value]
        if all(isinstance(dim, tirx.IntImm) for dim in dims):
            return const([int(dim) for dim in dims], "int64")
        return relax.ShapeExpr(dims)

    def onnx(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Convert by the library's converter of an op of ONNX; lists of sizes are vectors."""
        value = self.emit(convert_node(self.onnx_node(op_type, inputs, outputs, **attributes)))
        if outputs == 1:
            return value
        return [self.emit(relax.TupleGetItem(value, index)) for index in range(outputs)]

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Bind a value that is no variable, constant or size."""
        if isinstance(value, (relax.Var, tvm.ir.GenericConst)) or tvm.ir.is_prim_expr(value):
            return value
        return self.builder.emit(value)

    def tensor(self, value: Any, dtype: str | None = None) -> relax.Expr:
        """A tensor, a number or a size as a tensor of that type, by default of the result's."""
        dtype = dtype or self.dtype
        if isinstance(value, (bool, int, float)):
            if dtype == "bool":
                return const(bool(value), dtype)
            return const(np.array(value).astype("float32") if dtype == "bfloat16" else value, dtype)
        if tvm.ir.is_prim_expr(value):
            value = self.number(value)
        return self.cast(value, dtype)

    def number(self, value: Any) -> relax.Expr:
        """A number of Python, or a size, as a scalar tensor of bool, int64 or float64."""
        if isinstance(value, (bool, int, float)):
            return const(value, {bool: "bool", int: "int64"}.get(type(value), "float64"))
        if str(value.ty) == "bool":
            chosen = tirx.Select(value, tirx.IntImm("int64", 1), tirx.IntImm("int64", 0))
            return self.cast(self.onnx_node("Identity", [chosen]).tensor(0), "bool")
        for read in self.sizes.read.values():
            if isinstance(value, tirx.Var) and value.same_as(read[0]):
                return read[1]
        return self.onnx_node("Identity", [value]).tensor(0)

    def read_size(self, value: relax.Expr) -> Any:
        """The number in a tensor of one element, as a size."""
        node = self.onnx_node("Identity", [value])
        vector = self.cast(self.reshape(value, [1]), "int64")
        if isinstance(vector, tvm.ir.GenericConst):
            return int(vector.value.numpy()[0])
        (size,) = dims_at_run_time(node, vector, "number")
        return size

    def of(self, value: Any) -> TorchNode:
        """The op with another result."""
        return replace(self, value=value)

    def cast(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """A tensor as elements of another type."""
        found = str(value.ty.dtype)
        if found == dtype:
            return value
        if dtype == "bool":
            return self.emit(relax.op.not_equal(value, const(0, found)))
        return cast(self.onnx_node("Cast", [value]), value, dtype)

    def dims(self, value: relax.Expr) -> list[Any]:
        """Sizes of a tensor."""
        return self.onnx_node("Identity", [value]).shape(value)

    def reshape(self, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
        """The elements in another shape."""
        found = self.dims(value)
        if len(found) == len(dims) and all(_same(a, b) for a, b in zip(found, dims, strict=True)):
            return value
        if any(_same(dim, 0) for dim in found):  # Relax takes a size of 0 for the one that the axis had
            return self.filled(0, [0 if _same(dim, -1) else dim for dim in dims], str(value.ty.dtype))
        return self.emit(relax.op.reshape(value, as_shape(dims)))

    def broadcast(self, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
        """Repeated along axes of size 1 or none."""
        found = self.dims(value)
        if len(found) == len(dims) and all(_same(a, b) for a, b in zip(found, dims, strict=True)):
            return value
        return self.emit(relax.op.broadcast_to(value, as_shape(dims)))

    def filled(self, value: Any, dims: Sequence[Any] | None = None, dtype: str | None = None) -> relax.Expr:
        """A tensor of one number."""
        dims = self.shape if dims is None else dims
        return self.broadcast(self.tensor(value, dtype), dims) if dims else self.tensor(value, dtype)

    def from_zero(self, indices: relax.Expr, extent: Any) -> relax.Expr:
        """Indices of an axis, for ops in which torch allows no negative ones: these become indices out of range."""
        known = as_constant(indices)
        dtype = str(indices.ty.dtype)
        if (known is not None and (known >= 0).all()) or dtype.startswith("uint"):
            return indices
        below = relax.op.subtract(indices, self.tensor(extent, dtype))
        return self.emit(relax.op.where(relax.op.less(indices, const(0, dtype)), below, indices))

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front."""
        return axis % rank if rank else 0

    def sizes_equal(self, a: Any, b: Any) -> bool:
        """Return whether two sizes are known to be the same."""
        return _same(a, b)

    def static(self, dims: Sequence[Any], what: str) -> list[int]:
        """Sizes that must be known."""
        if not all(isinstance(dim, int) for dim in dims):
            raise self.refusal(f"{what} {list(dims)}, expected sizes that are known at import")
        return [int(dim) for dim in dims]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))
