"""Constants that can be computed at compile time: values of variables that come from constants alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from ...encoding.functions import FUNCTIONS
from ...op.traits import traits_of
from ...target.element_types import numpy_dtype
from .axes import permutation
from .blocks import Block, renamed, shape_of
from .kernels import tensor_bytes
from .op_names import CAST, PERMUTE
from .rewriting import op_name

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    f"relax.{function.op}": function.evaluate
    for function in FUNCTIONS.values()
    if function.op and not function.num_params
} | {"relax.power": np.power}
"""Arithmetic of floats, which numpy computes; ops that mean the same for other types are below."""
_OF_INTEGERS = ("relax.add", "relax.subtract", "relax.multiply")
"""Ops of those that int32 is computed with: biases of quantized models, which become floats."""

_FLOATS = ("float32", "float64")
_HALVES = ("float16", "bfloat16")
_SMALL = 1 << 16
"""Elements up to which every constant expression is computed; of larger ones, those that a convolution weighs with."""

_GROWTH, _GROWTH_LIMIT_BYTES = 64, 16 << 20


def exceeds_growth_limit(nbytes: int, origin: int) -> bool:
    """True if `nbytes` of a result are too many to be kept in place of `origin` bytes of constants that it comes from.

    Weights of 4 bits that become float32 grow eight times. A kernel fills a tensor with a scalar faster.
    """
    return nbytes > _GROWTH_LIMIT_BYTES and nbytes > _GROWTH * origin


class ConstantValues:
    """The arrays that expressions of one block are, as far as they are known now; each is computed when asked for."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._known: dict[relax.Var, np.ndarray | None] = {}

    def of(self, expr: relax.Expr) -> np.ndarray | None:
        """The elements of a tensor, None where they are not known."""
        if isinstance(expr, tvm.ir.GenericConst):
            return expr.value.numpy() if isinstance(expr.value, tvm.runtime.Tensor) else None
        if not isinstance(expr, relax.Var):
            return None
        if expr not in self._known:
            definition = self._block.definition(expr)
            self._known[expr] = self._computed(definition) if isinstance(definition, relax.Call) else None
        return self._known[expr]

    def _computed(self, call: relax.Call) -> np.ndarray | None:
        name, shape = op_name(call), shape_of(call)
        if shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape):
            return None
        compute = _computation(call, [int(extent) for extent in shape])
        if compute is None:
            return None
        tensors = [self.of(arg) for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        arrays = [array for array in tensors if array is not None]
        types = (*_FLOATS, "int32") if name in _OF_INTEGERS else _FLOATS
        if len(arrays) < len(tensors) or (name in _ARITHMETIC and any(str(a.dtype) not in types for a in arrays)):
            return None
        if exceeds_growth_limit(tensor_bytes([int(extent) for extent in shape], call.ty.dtype.dtype), _nbytes(arrays)):
            return None
        with np.errstate(all="ignore"):
            return compute(*arrays)


def _nbytes(arrays: list[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def _computation(call: relax.Call, shape: list[int]) -> Callable[..., np.ndarray] | None:
    name = op_name(call)
    if name in _ARITHMETIC:
        return _ARITHMETIC[name]
    if traits_of(name).keeps_order:
        return lambda x: x.reshape(shape)
    if name == PERMUTE:
        return lambda x: x.transpose(permutation(call))
    if name == "relax.broadcast_to":
        return lambda x: np.broadcast_to(x, shape)
    if name == CAST and _is_folded_cast(call.args[0], str(call.attrs.dtype)):
        return lambda x: x.astype(numpy_dtype(str(call.attrs.dtype)))
    return None


def _is_folded_cast(value: relax.Expr, dtype: str) -> bool:
    """True if a cast is computed now: not of bytes that may be quantized weights, which products read as they are."""
    source = str(value.ty.dtype)
    if {source, dtype} <= {*_FLOATS, *_HALVES}:
        return True
    is_vector = source == "int32" or (source in ("int8", "uint8") and int(value.ty.ndim) <= 1)
    return is_vector and dtype in ("int32", *_FLOATS)


def _is_rounding(call: relax.Call) -> bool:
    return op_name(call) == CAST and str(call.attrs.dtype) in _HALVES


def constant_like(array: np.ndarray, like: relax.TensorType) -> tvm.ir.GenericConst:
    """A constant of the element type and on the device of another tensor."""
    return _constant(array.astype(numpy_dtype(str(like.dtype)), copy=False), str(like.dtype), like)


def constant_on_device_of(array: np.ndarray, other: relax.Expr) -> tvm.ir.GenericConst:
    """A constant of the array's own element type, on the device of another tensor."""
    return _constant(array, str(array.dtype), other.ty)


def _constant(array: np.ndarray, dtype: str, near: relax.TensorType) -> tvm.ir.GenericConst:
    data = np.ascontiguousarray(array) if array.ndim else array  # which would give it a dimension
    ty = relax.TensorType(list(array.shape), dtype, near.vdevice)
    return tvm.ir.GenericConst(tvm.runtime.tensor(np.asarray(data)), ty)


def fold_constants(block: Block) -> list[relax.Binding] | None:
    """The block with constants in place of expressions of constants; None where there are none.

    Every weight of a convolution is folded, and every constant that is rounded to half precision, of other expressions
    the small ones: a large one that a matrix product reads is folded when it is packed, and need not exist twice until
    then.
    """
    values = ConstantValues(block)
    folded: dict[relax.Var, relax.Expr] = {}
    weights = {
        b.value.args[1] for b in block.bindings if traits_of(op_name(b.value)).kind in ("conv", "conv_transpose")
    }
    bindings: list[relax.Binding] = []
    for binding in block.bindings:
        var = binding.var
        is_computed = isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Call)
        array = values.of(var) if is_computed and block.is_local(var) else None
        if array is not None and (array.size <= _SMALL or var in weights or _is_rounding(binding.value)):
            folded[var] = constant_like(array, var.ty)
        else:
            bindings.append(renamed(binding, folded))
    return bindings if folded else None
