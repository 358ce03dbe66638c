"""Interpreter of Relax functions with encoded ops in numpy, one op at a time: results that a pass must keep.

Layouts are ignored: encoded values are their logical tensors. Products are summed in float64 or int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm_ffi import structural_map

from relax_hetero.encoding.encoding import Encoding
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.functions import FUNCTIONS
from relax_hetero.op.encoded import CONV, ELEMENTWISE, MATMUL, SET, UNSET
from relax_hetero.op.sharding import SHARD
from relax_hetero.transform.encode.encoded_convolutions import CONV_OPS
from relax_hetero.transform.ir.rewriting import op_name
from transform.numpy_convolution import convolve


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    grown = np.exp(x - x.max(axis=axis, keepdims=True))
    return grown / grown.sum(axis=axis, keepdims=True)


_FUNCTIONS = {f"relax.{function.op}": function.evaluate for function in FUNCTIONS.values()} | {
    "relax.power": np.power,
    "relax.less": np.less,
}


def run(mod: tvm.IRModule, *arguments: np.ndarray) -> Any:
    """Results of ``main`` of a module with one dataflow block, arrays or tuples of them."""
    func = mod["main"]
    sizes = _sizes(func, arguments)
    values: dict[relax.Var, Any] = dict(zip(func.params, arguments, strict=True))

    def evaluate(expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(evaluate(field) for field in expr.fields)
        if isinstance(expr, tvm.ir.GenericConst):
            return expr.value.numpy()
        if isinstance(expr, relax.Call):
            operands = [evaluate(arg) for arg in tensors_in(expr.args)]
            return run_call(expr, operands, sizes)
        if isinstance(expr, relax.TupleGetItem):
            return evaluate(expr.tuple_value)[expr.index]
        return values[expr]

    for block in func.body.blocks:
        for binding in block.bindings:
            result = evaluate(binding.value)
            if isinstance(binding.var.ty, relax.TensorType):
                assert str(result.dtype) == str(binding.var.ty.dtype), binding
            values[binding.var] = result
    return evaluate(func.body.body)


def tensors_in(args: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Tensors among arguments, those of tuples among them."""
    found: list[relax.Expr] = []
    for arg in args:
        found += (
            tensors_in(arg.fields) if isinstance(arg, relax.Tuple) else [arg] * isinstance(arg.ty, relax.TensorType)
        )
    return found


def run_call(call: relax.Call, args: list[np.ndarray], sizes: dict[str, int]) -> np.ndarray:
    """Result of an op, given its operands and symbolic sizes."""
    name = op_name(call) or ""
    if name == "relax.split":
        sections = call.attrs.indices_or_sections
        return tuple(
            np.split(args[0], sections if isinstance(sections, int) else list(map(int, sections)), call.attrs.axis)
        )
    dtype = str(call.ty.dtype)
    if name in (SET, UNSET, SHARD, "relax.to_vdevice"):
        return args[0]
    if name == "relax.concat":
        return np.concatenate(args, int(call.attrs.axis))
    if name == "relax.strided_slice":
        axes, begins, ends = ([int(number.value) for number in arg.fields] for arg in call.args[1:4])
        slices = [slice(None)] * args[0].ndim
        for axis, begin, end in zip(axes, begins, ends, strict=True):
            slices[axis] = slice(begin, end)
        return args[0][tuple(slices)]
    if name == "relax.nn.pad":
        widths = np.reshape([int(width) for width in call.attrs.pad_width], (-1, 2))
        return np.pad(args[0], widths.tolist())
    if name == "relax.take":
        mode = "clip" if call.attrs.mode == "clip" else "raise"
        return np.take(args[0], args[1], int(call.attrs.axis), mode=mode)
    if name == "relax.broadcast_to":
        return np.broadcast_to(args[0], [int(extent) for extent in call.args[1].values])
    if name == "relax.nn.layer_norm":
        axes = tuple(map(int, call.attrs.axes))
        centered = args[0] - args[0].mean(axes, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(axes, keepdims=True) + call.attrs.epsilon)
        return (scaled * args[1] + args[2]).astype(dtype)
    if name in ("relax.mean", "relax.max"):
        axes = None if call.attrs.axis is None else tuple(int(axis) for axis in call.attrs.axis)
        reduce = np.mean if name == "relax.mean" else np.max
        return reduce(args[0], axis=axes, keepdims=bool(call.attrs.keepdims)).astype(dtype)
    if name == MATMUL:
        return _product(Encoding.parse(call.attrs.encoding), *args)
    if name == CONV:
        conv = Encoding.parse(call.attrs.encoding).conv
        return convolve(*args, conv.strides, conv.padding, conv.dilation, conv.groups).astype(dtype)
    if name in CONV_OPS:
        return _stock_convolution(call.attrs, CONV_OPS[name], *args).astype(dtype)
    if name == ELEMENTWISE:
        return Expression.parse(call.attrs.expression).evaluate(args).astype(dtype)
    if name == "relax.matmul":
        wide = "int64" if "int" in dtype else "float64"
        return np.matmul(args[0].astype(wide), args[1].astype(wide)).astype(dtype)
    if name == "relax.permute_dims":
        return args[0].transpose(None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes])
    if name == "relax.reshape":
        return args[0].reshape([_extent(extent, sizes) for extent in call.args[1].values])
    if name == "relax.sum":
        axes = None if call.attrs.axis is None else tuple(int(axis) for axis in call.attrs.axis)
        return args[0].sum(axis=axes, keepdims=bool(call.attrs.keepdims), dtype=dtype)
    if name == "relax.nn.softmax":
        return _softmax(args[0], int(call.attrs.axis))
    params: list[Any] = []
    if name == "relax.astype":
        params = [dtype]
    elif name == "relax.clip":
        params = [bound.value for bound in call.args[1:]]
    elif name == "relax.nn.leakyrelu":
        params = [call.attrs.alpha]
    return _FUNCTIONS[name](*args, *params).astype(dtype)


def _stock_convolution(attrs: Any, spatial: int, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    letters = "DHW"[-spatial:]
    inputs = [
        array.transpose([str(layout).index(letter) for letter in order])
        for array, layout, order in (
            (data, attrs.data_layout, f"NC{letters}"),
            (weight, attrs.kernel_layout, f"OI{letters}"),
        )
    ]
    numbers = [[int(n) for n in field] for field in (attrs.strides, attrs.padding, attrs.dilation)]
    result = convolve(*inputs, *numbers, int(attrs.groups))
    return result.transpose([f"NC{letters}".index(letter) for letter in str(attrs.out_layout or attrs.data_layout)])


def _sizes(func: relax.Function, arguments: tuple[np.ndarray, ...]) -> dict[str, int]:
    """Symbolic extents of the parameters by name."""
    sizes: dict[str, int] = {}
    for param, array in zip(func.params, arguments, strict=True):
        for extent, size in zip(param.ty.shape.values, array.shape, strict=True):
            if isinstance(extent, tvm.tirx.Var):
                assert sizes.setdefault(str(extent.name), size) == size
    return sizes


def _extent(extent: Any, sizes: dict[str, int]) -> int:
    number = structural_map(extent, (tvm.tirx.Var, lambda var: tvm.tirx.IntImm("int64", sizes[str(var.name)])))
    return int(tvm.sym.Analyzer().simplify(number))


def _product(encoding: Encoding, lhs: np.ndarray, rhs: np.ndarray, init: np.ndarray | None = None) -> np.ndarray:
    accumulator = encoding.element_types[2]
    wide = "int64" if "int" in accumulator else "float64"
    letters = {name: chr(ord("a") + i) for i, name in enumerate(encoding.sizes)}
    operands, subscripts = [], []
    for index, array in enumerate((lhs, rhs)):
        assert str(array.dtype) == encoding.element_types[index]
        names = encoding.index_maps[index]
        squeezed = array.reshape([extent for extent, name in zip(array.shape, names, strict=True) if name != "1"])
        operands.append(squeezed.astype(wide))
        subscripts.append("".join(letters[name] for name in names if name != "1"))
    result = encoding.index_maps[2]
    out = "".join(letters[name] for name in result)
    product = np.einsum(f"{','.join(subscripts)}->{out}", *operands)
    return (product if init is None else product + init).astype(accumulator)
