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
        kept = torchvision.ops.nms(boxes, scores, 0.4)
        aligned = torchvision.ops.roi_align(maps, regions, (3, 2), 0.5, 2, True)
        return aligned, torchvision.ops.roi_align(maps, regions, (3, 2)), kept, boxes[kept]

    maps = torch.randn(2, 3, 16, 16, generator=generator)
    check(Function(function), (maps, boxes, images, torch.rand(12, generator=generator)))
