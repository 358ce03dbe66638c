"""Object detection ops of torchvision."""

from __future__ import annotations

from tvm import relax

from ...ops.node import const
from ..torch_node import TorchNode, converts


@converts("roi_align")
def roi_align(
    node: TorchNode,
    x: relax.Expr,
    regions: relax.Expr,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> relax.Expr:
    """Pool regions, whose first column is the image index."""
    image, boxes = (
        node.emit(relax.op.strided_slice(regions, [1], [first], [last])) for first, last in ((0, 1), (1, 5))
    )
    images = node.cast(node.reshape(image, node.dims(regions)[:1]), "int64")
    return node.onnx(
        "RoiAlign", x, boxes, images, output_height=height, output_width=width, sampling_ratio=max(samples, 0),
        spatial_scale=scale, mode="avg",
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
    )  # fmt: skip


@converts("nms")
def nms(node: TorchNode, boxes: relax.Expr, scores: relax.Expr, threshold: float) -> relax.Expr:
    """Indices of the boxes that non-maximum suppression keeps, by decreasing score."""
    (count,) = node.dims(scores)
    selected = node.onnx(
        "NonMaxSuppression", node.reshape(boxes, [1, count, 4]), node.reshape(scores, [1, 1, count]), [count],
        const(threshold, "float32"),
    )  # fmt: skip
    indices = node.emit(relax.op.strided_slice(selected, [1], [2], [3]))
    return node.reshape(indices, node.dims(indices)[:1])


@converts("deform_conv2d")
def deformed_convolution(
    node: TorchNode,
    x: relax.Expr,
    weight: relax.Expr,
    offset: relax.Expr,
    mask: relax.Expr,
    bias: relax.Expr,
    *numbers: int,
) -> relax.Expr:
    """Deformable convolution; `numbers` are strides, pads, dilations and groups."""
    strides, pads, dilations = (tuple(numbers[start : start + 2]) for start in (0, 2, 4))
    group, offset_group, has_mask = numbers[6:9]
    return node.onnx(
        "DeformConv", x, weight, offset, bias, mask if has_mask else None, strides=strides, pads=(*pads, *pads),
        dilations=dilations, group=group, offset_group=offset_group,
    )  # fmt: skip
