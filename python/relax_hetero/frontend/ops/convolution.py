"""Convolutions with ONNX's padding rules."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from ..joined_sizes import simplified
from .elementwise import HALF, cast
from .node import Dim, Node, Position, as_constant, dtype_of
from .required_sizes import as_expr, require_equal, require_shape
from .table import converts

_LAYOUTS = {1: ("NCW", "OIW", "IOW"), 2: ("NCHW", "OIHW", "IOHW"), 3: ("NCDHW", "OIDHW", "IODHW")}


def spatial(node: Node, name: str, count: int, default: int) -> list[int]:
    """Read an attribute with a number per spatial axis."""
    attribute = node.attribute(name)
    values = [default] * count if attribute is None else [int(value) for value in attribute]
    if len(values) != count:
        raise node.refusal(f"{name} is {values}, expected {count} numbers")
    return values


def pads_of(node: Node, sizes: list[Dim], kernel: list[int], strides: list[int], dilations: list[int]) -> list[Dim]:
    """Padding before, then after, each spatial axis: explicit, or for an output size of ceil(size / stride).

    With strides and dynamic sizes, the latter are symbolic expressions.
    """
    count = len(kernel)
    mode = node.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        attribute = node.attribute("pads")
        pads: list[Dim] = [0] * (2 * count) if attribute is None else [int(pad) for pad in attribute]
        if len(pads) != 2 * count:
            raise node.refusal(f"pads is {pads}, expected {2 * count} numbers")
        return pads
    if mode == "VALID":
        return [0] * (2 * count)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise node.refusal(f"auto_pad is {mode!r}")
    before: list[Dim] = []
    after: list[Dim] = []
    for size, window, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        extent = (window - 1) * dilation + 1
        total: Dim
        if stride == 1:
            total = extent - 1
        elif isinstance(size, int):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
        else:
            total = simplified(tirx.max((tirx.ceildiv(size, stride) - 1) * stride + extent - size, 0))
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before + after


def _kernel_shape(node: Node, weight: relax.Expr) -> list[int]:
    shape = node.static_shape(weight)[2:]
    if len(shape) not in _LAYOUTS:
        raise node.refusal(f"has {len(shape)} spatial axes, expected 1 to 3")
    attribute = node.attribute("kernel_shape")
    if attribute is not None and [int(size) for size in attribute] != shape:
        raise node.refusal(f"kernel_shape is {list(attribute)}, but the weight has {shape}")
    return shape


def _convolve(node: Node, data: relax.Expr, weight: relax.Expr, out_dtype: str) -> relax.Expr:
    kernel = _kernel_shape(node, weight)
    count = len(kernel)
    strides, dilations = spatial(node, "strides", count, 1), spatial(node, "dilations", count, 1)
    pads = pads_of(node, list(node.shape(data)[2:]), kernel, strides, dilations)
    for axis, size in enumerate(node.shape(data)[2:]):
        extent = (kernel[axis] - 1) * dilations[axis] + 1
        text = f"its kernel spans {extent} elements of axis {axis + 2}, which has {size} and padding"
        node.require(as_expr(size) + pads[axis] + pads[count + axis] >= extent, text)
    data, fixed = _pad_dynamically(node, data, pads)
    groups = node.attribute("group", 1)
    channels = node.static_shape(weight)[1] * groups
    require_equal(node, node.shape(data)[1], channels, "axis 1 of its input, the channels, has")
    # Kernels compute tiles of the innermost axis, which exporters of one-dimensional networks often leave at 1.
    is_column = count == 2 and node.shape(data)[3] == 1 and kernel[1] == 1 and not (fixed[1] or fixed[3])
    is_column = is_column and kernel[0] > 1 and as_constant(weight) is not None
    if is_column:
        data, weight = (node.emit(relax.op.squeeze(value, [3])) for value in (data, weight))
        strides, fixed, dilations, count = strides[:1], fixed[::2], dilations[:1], 1
    operation = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[count - 1]
    layout, kernel_layout, _ = _LAYOUTS[count]
    call = operation(data, weight, strides, fixed, dilations, groups, layout, kernel_layout, layout, out_dtype)
    result = node.emit(call)
    return node.emit(relax.op.expand_dims(result, 3)) if is_column else result


def _pad_dynamically(node: Node, data: relax.Expr, pads: list[Dim]) -> tuple[relax.Expr, list[int]]:
    """Pad the image by symbolic amounts, and return it with the static pads that are left to the kernel."""
    count = len(pads) // 2
    fixed = [pad if isinstance(pad, int) else 0 for pad in pads]
    if all(isinstance(pad, int) for pad in pads):
        return data, fixed
    image = node.shape(data)[2:]
    before, after = ([0 if isinstance(pad, int) else pad for pad in side] for side in (pads[:count], pads[count:]))
    shape = [simplified(as_expr(size) + before[a] + after[a]) for a, size in enumerate(image)]

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        indices = [index - before[a] for a, index in enumerate(i[2:])]
        inside = tirx.all(*[tirx.all(place >= 0, place < image[a]) for a, place in enumerate(indices)])
        return tirx.if_then_else(inside, x(*i[:2], *indices), tirx.const(0, str(x.dtype)))

    return node.kernel("pad_same", element, data, shape=[*node.shape(data)[:2], *shape]), fixed


def with_bias(node: Node, result: relax.Expr, index: int) -> relax.Expr:
    """Add input `index`, a vector over channels, to a convolution's result, if the node has it."""
    if not node.has(index):
        return result
    bias = require_shape(node, node.tensor(index), [node.shape(result)[1]], "its bias")
    return node.emit(result + node.per_channel(bias, node.rank(result)))


@converts("Conv")
def convolution(node: Node) -> relax.Expr:
    """Convolution with 1 to 3 spatial axes; half precision is accumulated in float32."""
    data, weight = node.tensor(0), node.tensor(1)
    dtype = dtype_of(data)
    result = _convolve(node, data, weight, "float32" if dtype in HALF else dtype)
    return with_bias(node, cast(node, result, dtype), 2)


def integer_convolution(node: Node, data: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """The node's convolution on int32 tensors."""
    return _convolve(node, data, weight, "int32")


@converts("ConvTranspose")
def transposed_convolution(node: Node) -> relax.Expr:
    """Transposed convolution with 1 to 3 spatial axes."""
    data, weight = node.tensor(0), node.tensor(1)
    kernel = _kernel_shape(node, weight)
    count = len(kernel)
    channels = node.static_shape(weight)[0]
    require_equal(node, node.shape(data)[1], channels, "axis 1 of its input, the channels, has")
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    strides, dilations = spatial(node, "strides", count, 1), spatial(node, "dilations", count, 1)
    extra = spatial(node, "output_padding", count, 0)
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    pads, extra = _transposed_pads(node, list(node.shape(data)[2:]), extents, strides, extra)
    operation = (relax.op.nn.conv1d_transpose, relax.op.nn.conv2d_transpose, relax.op.nn.conv3d_transpose)[count - 1]
    layout, _, kernel_layout = _LAYOUTS[count]
    # The kernel refuses negative pads and output padding of at least a stride: zeros are added afterwards.
    trimmed = [max(pad, 0) for pad in pads]
    kernel_padding = [min(value, stride - 1) for value, stride in zip(extra, strides, strict=True)]
    groups = node.attribute("group", 1)
    layouts = layout, kernel_layout
    result = node.emit(operation(data, weight, strides, trimmed, kernel_padding, dilations, groups, *layouts))
    missing = [max(-pad, 0) for pad in pads]
    for axis in range(count):
        missing[count + axis] += extra[axis] - kernel_padding[axis]
    if any(missing):
        result = _pad_with_zeros(node, result, missing)
    return with_bias(node, result, 2)


def _transposed_pads(
    node: Node, sizes: list[Any], extents: list[int], strides: list[int], extra: list[int]
) -> tuple[list[int], list[int]]:
    """Pads before and after each axis, and output padding, by ONNX's formulas for `output_shape` and `auto_pad`."""
    count, mode = len(extents), node.attribute("auto_pad", "NOTSET")
    output_shape = node.attribute("output_shape")
    if output_shape is None and mode in ("NOTSET", "", "VALID"):
        attribute = None if mode == "VALID" else node.attribute("pads")
        return [0] * (2 * count) if attribute is None else [int(pad) for pad in attribute], extra
    before, after = [], []
    for axis in range(count):
        if output_shape is not None:
            if not isinstance(sizes[axis], int):
                raise node.refusal("output_shape needs a static image size")
            full = strides[axis] * (sizes[axis] - 1) + extra[axis] + extents[axis]
            total = full - int(list(output_shape)[-count:][axis])
        else:
            total = extents[axis] + extra[axis] - strides[axis]
            if total < 0:
                raise node.refusal("auto_pad with a stride beyond the kernel: ONNX does not say what the rest is")
        total_used = max(total, 0)
        small, large = total_used // 2, total_used - total_used // 2
        upper = mode == "SAME_UPPER"
        before.append(small if upper else large)
        after.append(large if upper else small)
        if total < 0:  # the output extends beyond the computed part by zeros
            extra = [value - total if i == axis else value for i, value in enumerate(extra)]
    return before + after, extra


def _pad_with_zeros(node: Node, value: relax.Expr, amounts: list[int]) -> relax.Expr:
    """Add zeros before and after the spatial axes."""
    count = len(amounts) // 2
    pairs = [(0, 0), (0, 0), *zip(amounts[:count], amounts[count:], strict=True)]
    return node.emit(relax.op.nn.pad(value, [width for pair in pairs for width in pair]))
