"""Ops of torchvision that find objects, against torchvision."""

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")
from frontend.torch_results import Function, check  # noqa: E402 - needs torch


def test_regions_and_the_best_boxes():
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(12, 2, generator=generator) * 6
    boxes = torch.cat([corners, corners + torch.rand(12, 2, generator=generator) * 6 + 0.5], 1)
    images = torch.randint(0, 2, (12, 1), generator=generator).float()

    def function(maps, boxes, images, scores):
        regions = torch.cat([images, boxes], 1)
        selected = torchvision.ops.nms(boxes, scores, 0.4)
        aligned = torchvision.ops.roi_align(maps, regions, (3, 2), 0.5, 2, True)
        return aligned, torchvision.ops.roi_align(maps, regions, (3, 2)), selected, boxes[selected]

    maps = torch.randn(2, 3, 16, 16, generator=generator)
    check(Function(function), (maps, boxes, images, torch.rand(12, generator=generator)))


def test_deformed_convolutions():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def function(maps, weight, bias, offset, mask):
        options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
        with_mask = torchvision.ops.deform_conv2d(maps, offset, weight, bias, mask=mask, **options)
        return with_mask, torchvision.ops.deform_conv2d(maps, offset, weight, **options)

    weight, offset = random(6, 2, 3, 3), random(2, 36, 4, 5)
    check(Function(function), (random(2, 4, 8, 9), weight, random(6), offset, random(2, 18, 4, 5)))
