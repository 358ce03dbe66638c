"""An ONNX node during conversion: access to its inputs and attributes, and helpers that emit Relax."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import tvm
from tvm import relax, te, tirx
from tvm.tirx.buffer import is_buffer_var

from ...errors import FrontendError
from ...op.require import MET, as_condition, requirement
from ...tir.checks import RANGE
from ..import_limits import budget

Dim: TypeAlias = "int | tirx.Expr"  # a dimension: an integer, or an int64 expression over symbolic sizes
Position: TypeAlias = "tuple[tirx.Expr, ...]"  # indices of an element in a kernel
STANDARD = ""  # domain of standard ops
STANDARD_DOMAINS = (STANDARD, "ai.onnx")  # domains of operators whose name means "the ONNX standard"


@dataclass
class Node:
    """A node with its inputs and the builder."""

    op_type: str
    name: str
    opset: int
    builder: relax.BlockBuilder
    # One expression per input, None for an absent optional one. ONNX's int64 tensors of sizes may also be shapes
    # (`relax.ShapeExpr`), or TIR expressions for scalars.
    inputs: Sequence[Any]
    attributes: dict[str, Any]  # values are Python numbers, bytes, tuples, `onnx.TensorProto` or `onnx.GraphProto`
    num_outputs: int
    domain: str = STANDARD  # domain of the op; `opset` is always the version of the standard domain

    def refusal(self, reason: str) -> FrontendError:
        """The error to raise if this node cannot be converted."""
        return FrontendError(f"{self.title}: {reason}")

    @property
    def title(self) -> str:
        """Op type and name for messages."""
        return f"{self.op_type} node {self.name!r}" if self.name else f"{self.op_type} node"

    def check_constant_size(self, *extents: int, itemsize: int = 8) -> None:
        """Refuse to compute a constant of this shape at import if it exceeds the budget.

        Raises FrontendError with the node and the limit.
        """
        budget().check_bytes(3 * itemsize * math.prod(abs(int(extent)) for extent in extents), self.title)

    def check_ops(self, ops: int) -> None:
        """Raise FrontendError if the node would become more ops than the import allows."""
        budget().check_nodes(int(ops), self.title)

    def has(self, index: int) -> bool:
        """Return whether input `index` is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> relax.Expr:
        """Input `index` as a normalized tensor expression.

        Raises FrontendError if the input is absent, a sequence or an optional.
        """
        if not self.has(index):
            raise self.refusal(f"input {index} is missing")
        value = self.inputs[index]
        if not isinstance(value, relax.Expr):
            raise self.refusal(f"input {index} is an empty optional, expected a tensor")
        if isinstance(value, relax.ShapeExpr) or tvm.ir.is_prim_expr(value):
            return self._shape_tensor(value)
        value = self.builder.normalize(value)
        if isinstance(value.ty, relax.ShapeType):
            return self.emit(relax.op.shape_to_tensor(value))
        if not isinstance(value.ty, relax.TensorType):
            raise self.refusal(f"input {index} is of type {value.ty}, expected a tensor")
        return value

    def _shape_tensor(self, value: relax.Expr) -> relax.Expr:
        if isinstance(value, relax.ShapeExpr):
            if all(isinstance(dim, tirx.IntImm) for dim in value.values):
                return const([int(dim) for dim in value.values], "int64")
            return self.emit(relax.op.shape_to_tensor(value))
        if isinstance(value, tirx.IntImm):
            return const(int(value), "int64")
        if isinstance(value, tirx.FloatImm):
            return const(value.value, str(value.ty))
        vector = self.emit(relax.op.shape_to_tensor(relax.ShapeExpr([tirx.Cast("int64", value)])))
        return self.emit(relax.op.reshape(vector, ()))

    def constant(self, index: int) -> np.ndarray | None:
        """Value of input `index` if it is constant, else None (also if the input is absent)."""
        return as_constant(self.inputs[index]) if self.has(index) else None

    def dims(self, index: int) -> list[Dim] | None:
        """Input `index`, a vector of sizes, as dimensions; None if it is computed at run time."""
        value = self.inputs[index] if self.has(index) else None
        if isinstance(value, relax.ShapeExpr):
            return [as_dim(dim) for dim in value.values]
        array = self.constant(index)
        return None if array is None else [int(dim) for dim in array.reshape(-1)]

    def known_dims(self, index: int, subject: str) -> list[Dim]:
        """Like `dims`; the error for sizes computed at run time begins with `subject` ("its k is")."""
        dims = self.dims(index)
        if dims is None:
            raise self.unknown(subject)
        return dims

    def unknown(self, subject: str) -> FrontendError:
        """The error for numbers that must be constant; `subject` includes the verb: "its pads are"."""
        pronoun = "they" if subject.endswith("are") else "it"
        return self.refusal(f"{subject} computed when the model runs; {pronoun} must be known at import")

    def attribute(self, name: str, default: Any = None) -> Any:
        """Attribute `name`, bytes as str, or `default` if it is absent."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def proto(self) -> onnx.NodeProto:
        """The node as a `NodeProto` with inputs ``x0``, ``x1``, ... and outputs ``y0``, ``y1``, ..."""
        inputs = [f"x{i}" if value is not None else "" for i, value in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.num_outputs)]
        attributes = {name: value for name, value in self.attributes.items() if name != "tvm_custom"}
        return onnx.helper.make_node(self.op_type, inputs, outputs, domain=self.domain, **attributes)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind `expr` to a new variable."""
        return self.builder.emit(expr)

    def kernel(
        self,
        name: str,
        element: Callable[..., Any],
        *inputs: Any,
        shape: Sequence[Any] | None = None,
        ranges: tuple[int, int, int, int] | None = None,
    ) -> relax.Var:
        """Bind a tensor with elements ``element(position, *inputs)`` and `shape`, by default the first input's.

        `position` is the tuple of indices; `element` gets TE tensors (lists of scalars stay lists). `ranges` is the
        range that an input's values must be in at run time (`tir.checks.RANGE`).
        """

        def compute(*tensors: Any) -> te.Tensor:
            dims = tensors[0].shape if shape is None else shape
            return te.compute(dims, lambda *position: element(position, *tensors), name=name)

        attributes = None if ranges is None else {RANGE: list(ranges)}
        return self.builder.emit_te(compute, *inputs, primfunc_name_hint=name, primfunc_attrs=attributes)

    def call_tir(
        self,
        func: tirx.PrimFunc,  # kernel; equal ones become one
        *inputs: relax.Expr,  # tensors, in the order of its parameters
        out: relax.TensorType | Sequence[relax.TensorType],  # types of its outputs; several make a tuple
    ) -> relax.Var:
        """Bind the result of a PrimFunc, whose last parameters are its outputs.

        Loops without a schedule are compiled for the node's device. Raises FrontendError if a tensor does not fit its
        parameter.
        """
        types = [out] if isinstance(out, relax.TensorType) else list(out)
        func = self._with_sizes(func, [*(value.ty for value in inputs), *types])
        gv = self.builder.add_func(func.without_attr("global_symbol"), self.op_type)
        return self.emit(relax.op.call_tir(gv, list(inputs), types if len(types) > 1 else types[0]))

    def _with_sizes(self, func: tirx.PrimFunc, types: Sequence[relax.TensorType]) -> tirx.PrimFunc:
        """A PrimFunc for tensors of these types: stock fusion needs the sizes that are known."""
        if len(types) != len(func.params):
            raise self.refusal(f"its kernel has {len(func.params)} parameters, but gets {len(types)} tensors")
        buffers = {}
        for param, ty in zip(func.params, types, strict=True):
            is_buffer = is_buffer_var(param)
            known = list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else [None] * ty.ndim
            shape = list(param.shape) if is_buffer else []
            pairs = [(as_dim(a), as_dim(b)) for a, b in zip(shape, known, strict=False)]
            differs = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
            if not is_buffer or len(shape) != len(known) or differs or str(param.dtype) != str(ty.dtype):
                expected = (
                    f"{param.dtype}[{', '.join(str(as_dim(dim)) for dim in shape)}]" if is_buffer else "no buffer"
                )
                raise self.refusal(f"parameter {param.name!r} of its kernel is {expected}, but gets {ty}")
            sizes = [
                tirx.const(b, str(dim.ty)) if isinstance(b, int) and isinstance(dim, tirx.Var) else dim
                for dim, (_, b) in zip(shape, pairs, strict=True)
            ]
            buffers[param] = tirx.decl_buffer(sizes, param.dtype, param.name)
        return func.specialize(buffers)

    def per_channel(self, vector: relax.Expr, rank: int) -> relax.Expr:
        """Reshape a vector to broadcast along axis 1 of tensors of this rank."""
        return self.emit(relax.op.reshape(vector, [1, -1] + [1] * (rank - 2)))

    def require(self, condition: Any, message: str | Callable[[], str]) -> None:
        """Require a condition over sizes, such as ``a == b``; other calls fail with `message`.

        Nothing is emitted if it always holds; a message given as a function is not evaluated then. Raises FrontendError
        if it never holds.
        """
        analyzer, condition = tvm.sym.Analyzer(), as_condition(condition)
        if analyzer.can_prove(condition):
            return
        text = message if isinstance(message, str) else message()
        if analyzer.can_prove(tirx.Not(condition)):
            raise self.refusal(text)
        self.builder.match_cast(requirement(condition, f"{self.title}: {text}"), MET)

    def outputs(self, values: Sequence[relax.Expr]) -> relax.Expr:
        """The first `num_outputs` values, as a tuple if there are several."""
        return relax.Tuple(values[: self.num_outputs]) if self.num_outputs > 1 else values[0]

    def as_op(self, op_type: str, inputs: Sequence[Any], opset: int = 0, **attributes: Any) -> Node:
        """A node of a standard op with this node's name and one output, by default of the same opset."""
        return Node(op_type, self.name, opset or self.opset, self.builder, inputs, attributes, 1)

    def filled(self, dims: Sequence[Dim], value: Any, dtype: str) -> relax.Expr:
        """A tensor filled with one value (`relax.op.full` does not accept infinity)."""
        return self.emit(relax.op.broadcast_to(const(value, dtype), relax.ShapeExpr(list(dims))))

    def shape(self, value: relax.Expr) -> list[Dim]:
        """Dimensions of a tensor. Raises FrontendError if the shape is unknown."""
        shape = value.ty.shape
        if shape is None or not isinstance(shape, relax.ShapeExpr):
            raise self.refusal("the shape of its input is unknown; give it with shapes=")
        return [as_dim(dim) for dim in shape.values]

    def static_shape(self, value: relax.Expr) -> list[int]:
        """Dimensions of a tensor, all of them integers. Raises FrontendError if one of them is symbolic or unknown."""
        dims = self.shape(value)
        integers = [dim for dim in dims if isinstance(dim, int)]
        if len(integers) != len(dims):
            raise self.refusal(f"needs a static input shape, found {dims}; give it with shapes=")
        return integers

    def rank(self, value: relax.Expr) -> int:
        """Number of dimensions of a tensor. Raises FrontendError if it is unknown."""
        if value.ty.ndim < 0:
            raise self.refusal("the rank of its input is unknown; give its shape with shapes=")
        return int(value.ty.ndim)

    def axis(self, axis: int, rank: int) -> int:
        """Non-negative index of an axis. Raises FrontendError if it is out of [-rank, rank)."""
        if not -rank <= axis < rank:
            raise self.refusal(f"axis {axis} is out of range for rank {rank}")
        return axis % rank if rank else 0


def as_constant(value: Any) -> np.ndarray | None:
    """The value of a constant expression, else None."""
    if isinstance(value, tvm.ir.GenericConst):
        return array_of(value.value)
    if isinstance(value, relax.ShapeExpr) and all(isinstance(dim, tirx.IntImm) for dim in value.values):
        return np.array([int(dim) for dim in value.values], "int64")
    if isinstance(value, tirx.IntImm):
        return np.array(int(value), "int64")
    return None


def array_of(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Read-only elements of a constant, without a copy if numpy has the element type."""
    try:
        array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError):
        array = tensor.numpy()
    array.flags.writeable = False
    return array


def const(value: Any, dtype: str | None = None) -> relax.Expr:
    """A constant of exactly this element type (`relax.const` narrows int64 and float64 by default)."""
    array = np.asarray(value) if dtype is None else np.asarray(value).astype(dtype, copy=False)
    budget().take_bytes(array.nbytes, "the model")
    shared_consts = _SHARED_CONSTANTS.get()
    if shared_consts is None:
        return relax.const(array, str(array.dtype))
    key = (_content_key(array), array.shape, str(array.dtype))
    if key not in shared_consts:
        shared_consts[key] = array, relax.const(array, str(array.dtype))
    return shared_consts[key][1]


def _content_key(array: np.ndarray) -> object:
    """Key of equal arrays: the address of a read-only array, which the table keeps alive, else a hash."""
    if not array.flags.writeable:
        return array.__array_interface__["data"][0], array.strides
    return hashlib.blake2b(array.tobytes()).digest()


_SHARED_CONSTANTS: ContextVar[dict[Any, tuple[np.ndarray, relax.Expr]] | None] = ContextVar("_SHARED", default=None)


@contextmanager
def shared_constants() -> Iterator[None]:
    """Share constants of equal arrays between several imports inside: weights of several functions."""
    token = _SHARED_CONSTANTS.set({})
    try:
        yield
    finally:
        _SHARED_CONSTANTS.reset(token)


def as_dim(dim: Any) -> Dim:
    """Convert an integer constant to a Python int; other dimensions are unchanged."""
    return int(dim) if isinstance(dim, (int, tirx.IntImm)) else dim


def dtype_of(value: relax.Expr) -> str:
    """TVM's name of a tensor's element type."""
    return str(value.ty.dtype)


def is_float(dtype: str) -> bool:
    """Return whether a dtype is a floating-point one."""
    return dtype.startswith(("float", "bfloat"))


def onnx_dtype(elem_type: int) -> str:
    """The name of an ONNX element type."""
    return str(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
