"""Products, convolutions, attention, norms, pooling and resizing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from ...ops.node import const, is_float
from ..exporting import torch_package
from ..torch_node import TorchNode, converts


@converts("mm", "bmm", "matmul", "mv", "dot")
def matmul(node: TorchNode, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Product of matrices or batches of matrices."""
    return node.emit(relax.op.matmul(a, b))


@converts("linear")
def linear(node: TorchNode, x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None = None) -> relax.Expr:
    """Product with a transposed weight, plus bias."""
    rank = len(node.dims(weight))
    transposed = node.emit(relax.op.permute_dims(weight)) if rank == 2 else weight
    product = node.emit(relax.op.matmul(x, transposed))
    return product if bias is None else node.emit(product + bias)


@converts("addmm", "addmv", "baddbmm", "_sparse_addmm")
def addmm(node: TorchNode, x: relax.Expr, a: relax.Expr, b: relax.Expr, beta: Any = 1, alpha: Any = 1) -> relax.Expr:
    """Scaled product plus scaled summand."""
    product = node.emit(relax.op.matmul(a, b))
    if alpha != 1:
        product = node.emit(product * node.tensor(alpha))
    if beta == 0:
        return product
    if beta != 1:
        x = node.emit(x * node.tensor(beta))
    return node.emit(product + x)


@converts("einsum")
def einsum(node: TorchNode, equation: str, operands: list[relax.Expr], *_: Any) -> relax.Expr:
    """Sums of products by an equation."""
    return node.onnx("Einsum", *operands, equation=equation.encode())


@converts("_trilinear")
def trilinear(node: TorchNode, a: relax.Expr, b: relax.Expr, c: relax.Expr, *arguments: Any) -> relax.Expr:
    """Product of three tensors with inserted axes, summed over axes (`nn.Bilinear`)."""
    *new_axes, axes = arguments[:4]
    product = None
    for value, positions in zip((a, b, c), new_axes, strict=True):
        for axis in sorted(positions):
            value = node.emit(relax.op.expand_dims(value, axis))
        product = value if product is None else node.emit(product * value)
    return node.emit(relax.op.sum(product, axes))


@converts("convolution", "conv1d", "conv2d", "conv3d")
def convolution(
    node: TorchNode,
    x: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    *rest: Any,
) -> relax.Expr:
    """Convolution or transposed convolution."""
    spatial = len(node.dims(weight)) - 2
    if isinstance(padding, str):
        raise node.refusal("padded by a word")
    if len(node.dims(x)) == spatial + 1:
        batch = node.emit(relax.op.expand_dims(x, 0))
        result = convolution(node, batch, weight, bias, stride, padding, dilation, *rest)
        return node.reshape(result, node.shape)
    transposed, output_padding, groups = rest if len(rest) == 3 else (False, (0,), *(rest or (1,)))
    stride, padding, dilation, output_padding = (
        list(value) * (spatial if len(value) == 1 else 1) for value in (stride, padding, dilation, output_padding)
    )
    attributes = {"strides": tuple(stride), "pads": (*padding, *padding), "dilations": tuple(dilation), "group": groups}
    if transposed:
        return node.onnx("ConvTranspose", x, weight, bias, output_padding=tuple(output_padding), **attributes)
    return node.onnx("Conv", x, weight, bias, **attributes)


@converts("scaled_dot_product_attention")
def attention(
    node: TorchNode,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> relax.Expr:
    """Attention as products and softmax, which the compiler fuses into one kernel."""
    queries, keys = node.dims(q), node.dims(k)
    if enable_gqa and not node.sizes_equal(queries[-3], keys[-3]):
        head_counts = node.static([queries[-3], keys[-3]], "repeats heads of")
        k, v = (_repeat_heads(node, value, head_counts[0] // head_counts[1]) for value in (k, v))
    (width,) = node.static([queries[-1]], "scales by the root of")
    dtype = node.dtype
    factor = 1 / math.sqrt(width) if scale is None else scale
    rank = len(keys)
    transposed = node.emit(relax.op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
    scores = node.emit(relax.op.matmul(q, transposed) * const(factor, dtype))
    lowest = const(-np.inf, dtype)
    if is_causal:
        rows, columns = queries[-2], keys[-2]
        if isinstance(rows, int) and isinstance(columns, int):
            table = np.where(np.tri(rows, columns, dtype=bool), 0.0, -np.inf)
            scores = node.emit(scores + const(table.astype("float32"), dtype))
        else:
            below = node.cast(node.onnx("Trilu", node.filled(1, [rows, columns], "int32"), upper=0), "bool")
            scores = node.emit(relax.op.where(below, scores, lowest))
    if mask is not None:
        if str(mask.ty.dtype) == "bool":
            scores = node.emit(relax.op.where(mask, scores, lowest))
        else:
            scores = node.emit(scores + node.tensor(mask))
    out = node.emit(relax.op.matmul(node.emit(relax.op.nn.softmax(scores, -1)), v))
    if mask is None:
        return out
    if str(mask.ty.dtype) == "bool":
        is_masked = relax.op.equal(relax.op.max(node.cast(mask, "int32"), -1, True), const(0, "int32"))
    else:
        is_masked = relax.op.equal(relax.op.max(node.tensor(mask), -1, True), lowest)
    return node.emit(relax.op.where(node.emit(is_masked), const(0, dtype), out))  # fully masked rows are 0


def _repeat_heads(node: TorchNode, value: relax.Expr, times: int) -> relax.Expr:
    batch, heads, length, width = node.dims(value)
    expanded = node.emit(relax.op.expand_dims(value, 2))
    expanded = node.broadcast(expanded, [batch, heads, times, length, width])
    return node.reshape(expanded, [batch, heads * times, length, width])


@converts("layer_norm", "native_layer_norm")
def layer_norm(
    node: TorchNode, x: relax.Expr, shape: list[Any], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Normalize the last axes to mean 0 and variance 1."""
    sizes = node.static(shape, "normalizes over")
    dtype = str(x.ty.dtype)
    axes = list(range(-len(sizes), 0))
    weight = const(np.ones(sizes), dtype) if weight is None else weight
    bias = const(np.zeros(sizes), dtype) if bias is None else bias
    result = node.emit(relax.op.nn.layer_norm(x, weight, bias, axes, eps))
    return [result] if node.op.startswith("native") else result


@converts("rms_norm")
def rms_norm(
    node: TorchNode, x: relax.Expr, shape: list[Any], weight: Any = None, eps: float | None = None
) -> relax.Expr:
    """Normalize the last axes to a mean square of 1."""
    sizes = node.static(shape, "normalizes over")
    dtype = str(x.ty.dtype)
    weight = const(np.ones(sizes), dtype) if weight is None else weight
    eps = float(np.finfo("float32" if dtype == "bfloat16" else dtype).eps) if eps is None else eps
    return node.emit(relax.op.nn.rms_norm(x, weight, list(range(-len(sizes), 0)), eps))


@converts("group_norm")
def group_norm(
    node: TorchNode, x: relax.Expr, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> relax.Expr:
    """Normalize each group of channels to mean 0 and variance 1."""
    weight, bias = _default_scale_and_shift(node, x, weight, bias)
    return node.onnx("GroupNormalization", x, weight, bias, num_groups=groups, epsilon=eps)


@converts("_native_batch_norm_legit")
def batch_norm_of_batch(
    node: TorchNode, x: relax.Expr, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> list[relax.Expr]:
    """Normalize each channel over the whole batch, in a layer without running statistics."""
    if not node.op.endswith(".no_stats") or node.used - {0}:
        raise node.refusal("by statistics of the batch that it keeps; call module.eval() before")
    order = [1, 0, *range(2, len(node.dims(x)))]
    channels = node.emit(relax.op.permute_dims(x, order))
    rows = node.reshape(channels, [1, node.dims(x)[1], -1])
    weight, bias = _default_scale_and_shift(node, x, weight, bias)
    normed = node.onnx("InstanceNormalization", rows, weight, bias, epsilon=eps)
    return [node.emit(relax.op.permute_dims(node.reshape(normed, node.dims(channels)), order))]


def _default_scale_and_shift(node: TorchNode, x: relax.Expr, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Scale and shift of each channel, by default 1 and 0."""
    (channels,) = node.static([node.dims(x)[1]], "normalizes channels of number")
    dtype = str(x.ty.dtype)
    weight = const(np.ones(channels), dtype) if weight is None else weight
    return weight, const(np.zeros(channels), dtype) if bias is None else bias


@converts("_native_batch_norm_legit_no_training", "batch_norm", "instance_norm")
def batch_norm(node: TorchNode, x: relax.Expr, weight: Any, bias: Any, mean: Any, var: Any, *options: Any) -> Any:
    """Normalize by running statistics, or each image by its own."""
    weight, bias = _default_scale_and_shift(node, x, weight, bias)
    is_native = node.op.startswith("_native")
    eps = options[1] if is_native else options[2]
    if not is_native and options[0]:
        if mean is not None or not node.op.startswith("instance"):
            raise node.refusal("by statistics of the batch that it keeps; call module.eval() before")
        return node.onnx("InstanceNormalization", x, weight, bias, epsilon=eps)
    result = node.onnx("BatchNormalization", x, weight, bias, mean, var, epsilon=eps)
    return [result] if is_native else result


def _pool_attributes(rank: int, kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    """ONNX's attributes of a pooling window; the stride defaults to the window."""
    kernel, stride, padding = (
        tuple(value) * (rank if len(value) == 1 else 1) for value in (kernel, stride or kernel, padding)
    )
    return {"kernel_shape": kernel, "strides": stride, "pads": (*padding, *padding)}


@converts("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(
    node: TorchNode, x: relax.Expr, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """Maximum of each window, and optionally its index."""
    rank = int(node.op[8])
    dims = node.dims(x)
    data = node.emit(relax.op.expand_dims(x, 0)) if len(dims) == rank + 1 else x
    dilation = tuple(dilation) * (rank if len(dilation) == 1 else 1)
    attributes = _pool_attributes(rank, kernel, stride, padding)
    attributes |= {"ceil_mode": int(ceil_mode), "dilations": dilation}
    if "indices" not in node.op:
        return node.reshape(node.onnx("MaxPool", data, **attributes), node.shape)
    shape = node.sizes.shape(node.value[0].shape)
    if 1 not in node.used:
        return [node.reshape(node.onnx("MaxPool", data, **attributes), shape)]
    values, indices = node.onnx("MaxPool", data, outputs=2, **attributes)
    plane = node.number(math.prod(dims[-rank:], start=1))  # ONNX's indices count across images and channels
    indices = node.emit(relax.op.floor_mod(indices, plane))
    return [node.reshape(part, shape) for part in (values, indices)]


@converts("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    node: TorchNode, x: relax.Expr, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> relax.Expr:  # fmt: skip
    """Mean of each window."""
    rank = int(node.op[8])
    data = node.emit(relax.op.expand_dims(x, 0)) if len(node.dims(x)) == rank + 1 else x
    attributes = _pool_attributes(rank, kernel, stride, padding)
    attributes["ceil_mode"] = int(ceil_mode)
    if divisor is None:
        means = node.onnx("AveragePool", data, count_include_pad=int(count_include_pad), **attributes)
        return node.reshape(means, node.shape)
    if ceil_mode:
        raise node.refusal("with a divisor, and windows that are cut off")
    means = node.onnx("AveragePool", data, count_include_pad=1, **attributes)
    factor = const(math.prod(attributes["kernel_shape"]) / divisor, node.dtype)
    return node.reshape(node.emit(means * factor), node.shape)


@converts("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(node: TorchNode, x: relax.Expr, sizes: list[int]) -> relax.Expr:
    """Means of `sizes` parts of each axis; unequal parts are computed by a product with a matrix."""
    rank = len(sizes)
    dims = node.dims(x)[-rank:]
    if all(size == 1 for size in sizes):
        return node.emit(relax.op.mean(x, list(range(-rank, 0)), keepdims=True))
    extents = node.static(dims, "cuts into parts axes of")
    if all(extent % size == 0 for extent, size in zip(extents, sizes, strict=True)) and len(node.shape) == rank + 2:
        window = tuple(extent // size for extent, size in zip(extents, sizes, strict=True))
        return node.onnx("AveragePool", x, kernel_shape=window, strides=window)
    for axis, (extent, size) in enumerate(zip(extents, sizes, strict=True)):
        table = np.zeros((extent, size))
        for part in range(size):
            first, last = part * extent // size, -(-(part + 1) * extent // size)
            table[first:last, part] = 1 / (last - first)
        factor = const(table, node.dtype)
        if axis == rank - 1:
            x = node.emit(relax.op.matmul(x, factor))
        elif axis == rank - 2:
            x = node.emit(relax.op.matmul(const(table.T, node.dtype), x))
        else:
            count = len(node.dims(x))
            order = list(range(count))
            order[count - rank + axis], order[-1] = order[-1], order[count - rank + axis]
            result = node.emit(relax.op.matmul(node.emit(relax.op.permute_dims(x, order)), factor))
            x = node.emit(relax.op.permute_dims(result, order))
    return x


@converts("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(node: TorchNode, x: relax.Expr, sizes: list[int]) -> list[relax.Expr]:
    """Maxima of `sizes` parts of each axis; shorter parts repeat their last element."""
    if 1 in node.used:
        raise node.refusal("with the places of the largest")
    rank = len(sizes)
    extents = node.static(node.dims(x)[-rank:], "cuts into parts axes of")
    for axis, (extent, size) in enumerate(zip(extents, sizes, strict=True), len(node.dims(x)) - rank):
        bounds = [(part * extent // size, -(-(part + 1) * extent // size)) for part in range(size)]
        max_taps = max(last - first for first, last in bounds)
        indices = [[min(first + i, last - 1) for i in range(max_taps)] for first, last in bounds]
        parts = node.onnx("Gather", x, const(indices, "int64"), axis=axis)
        x = node.onnx("ReduceMax", parts, const([axis + 1], "int64"), keepdims=0)
    return [x]


@converts(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
)
def upsample(node: TorchNode, x: relax.Expr, size: Any, *arguments: Any) -> relax.Expr:
    """Resize an image with torch's coordinate conventions."""
    is_nearest = "nearest" in node.op
    aligns = False if is_nearest else bool(arguments[0])
    scales = arguments[-1] if node.op.endswith(".vec") else [value for value in arguments[0 if is_nearest else 1 :]]
    attributes: dict[str, Any] = {"mode": "nearest" if is_nearest else "cubic" if "cubic" in node.op else "linear"}
    if is_nearest:
        exact = "exact" in node.op
        attributes["coordinate_transformation_mode"] = "half_pixel" if exact else "asymmetric"
        attributes["nearest_mode"] = "round_prefer_ceil" if exact else "floor"
    else:
        attributes["coordinate_transformation_mode"] = "align_corners" if aligns else "half_pixel"
        attributes["cubic_coeff_a"] = -0.75
    if scales and all(scale is not None for scale in scales) and not aligns:
        return node.onnx("Resize", x, None, const([1.0, 1.0, *scales], "float32"), **attributes)
    return node.onnx("Resize", x, None, None, node.shape, **attributes)


@converts("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def smooth_upsample(node: TorchNode, x: relax.Expr, size: Any, aligns: bool, *arguments: Any) -> relax.Expr:
    """Resize an image with antialiasing: two products with matrices that torch computes."""
    torch = torch_package()
    if not is_float(node.dtype):
        raise node.refusal(f"of {node.dtype}, expected floats")
    old = node.static(node.dims(x)[-2:], "resizes axes of")
    new = node.static(node.shape[-2:], "resizes axes to")
    scales = (arguments[0] if node.op.endswith(".vec") else arguments) or (None, None)
    resize = getattr(torch.ops.aten, node.op.partition(".")[0]).default
    rows, columns = (
        resize(torch.eye(before, dtype=torch.float64)[None, None], [after, before], aligns, scale, None)[0, 0].numpy()
        for before, after, scale in zip(old, new, scales, strict=True)
    )
    x = node.emit(relax.op.matmul(const(rows, node.dtype), x))
    return node.emit(relax.op.matmul(x, const(columns.T, node.dtype)))


@converts("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(node: TorchNode, x: relax.Expr, grid: relax.Expr, mode: int, padding: int, aligns: bool) -> relax.Expr:
    """Sample pixels at the coordinates in a grid."""
    return node.onnx(
        "GridSample", x, grid, mode=("linear", "nearest", "cubic")[mode],
        padding_mode=("zeros", "border", "reflection")[padding], align_corners=int(aligns),
    )  # fmt: skip
