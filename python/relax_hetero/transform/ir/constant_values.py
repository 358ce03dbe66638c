"""Constant propagation: values of variables that are computed from constants alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from ...encoding.functions import FUNCTIONS
from ...op.traits import traits_of
from ...target.element_types import numpy_dtype
from ...vm.device.tensor_arrays import host_array
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
"""Arithmetic on floats, computed by numpy."""
_INT32_OPS = ("relax.add", "relax.subtract", "relax.multiply")
"""Ops that are computed on int32 as well: biases of quantized models, which become floats."""

_FLOATS = ("float32", "float64")
_HALVES = ("float16", "bfloat16")
_MAX_SMALL_ELEMENTS = 1 << 16
"""Elements up to which every constant expression is folded; larger ones only if a convolution has them as weights."""

_MAX_GROWTH = 64  # ratio of the bytes of a folded result to those of its constants
_MAX_UNCHECKED_BYTES = 16 << 20  # bytes of results whose growth is not limited


def exceeds_growth_limit(nbytes: int, origin: int) -> bool:
    """Return whether a result of `nbytes` is too large to replace its constants, which have `origin` bytes.

    Weights of 4 bits that become float32 grow eight times. A kernel fills a tensor with a scalar faster than a copy.
    """
    return nbytes > _MAX_UNCHECKED_BYTES and nbytes > _MAX_GROWTH * origin


class ConstantValues:
    """Values of the expressions of one block that are known at compile time; each is computed on first use."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._arrays: dict[relax.Var, np.ndarray | None] = {}

    def of(self, expr: relax.Expr) -> np.ndarray | None:
        """The elements of a tensor, which must not be written; None if they are not known."""
        if isinstance(expr, tvm.ir.GenericConst):
            return host_array(expr.value) if isinstance(expr.value, tvm.runtime.Tensor) else None
        if not isinstance(expr, relax.Var):
            return None
        if expr not in self._arrays:
            definition = self._block.definition(expr)
            self._arrays[expr] = self._computed(definition) if isinstance(definition, relax.Call) else None
        return self._arrays[expr]

    def _computed(self, call: relax.Call) -> np.ndarray | None:
        name, shape = op_name(call), shape_of(call)
        if shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape):
            return None
        compute = _computation(call, [int(extent) for extent in shape])
        if compute is None:
            return None
        tensors = [self.of(arg) for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        arrays = [array for array in tensors if array is not None]
        types = (*_FLOATS, "int32") if name in _INT32_OPS else _FLOATS
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
    """Return whether a cast is folded: not one of 8-bit tensors that may be quantized weights of products."""
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


def _constant(array: np.ndarray, dtype: str, like: relax.TensorType) -> tvm.ir.GenericConst:
    data = np.ascontiguousarray(array) if array.ndim else array  # it would give a scalar a dimension
    ty = relax.TensorType(list(array.shape), dtype, like.vdevice)
    return tvm.ir.GenericConst(tvm.runtime.tensor(np.asarray(data)), ty)


def fold_constants(block: Block) -> list[relax.Binding] | None:
    """The block with constants in place of expressions of constants; None if there are none.

    All weights of convolutions, constants that are rounded to half precision, and small constants are folded. A large
    operand of a matrix product is folded when it is packed, and need not exist twice until then.
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
        if array is not None and (array.size <= _MAX_SMALL_ELEMENTS or var in weights or _is_rounding(binding.value)):
            folded[var] = constant_like(array, var.ty)
        else:
            bindings.append(renamed(binding, folded))
    return bindings if folded else None
