"""Searching, sorting, scattering and pooling ops of torch against torch: NaN, ties, parts of unequal size."""

import pytest

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check  # noqa: E402 - needs torch

F = torch.nn.functional


def search(x, y, numbers, values):
    return (
        (torch.searchsorted(numbers, values), torch.bucketize(values, numbers, right=True), torch.histc(x, 7, -1, 1)),
        (x.median(), x.median(1)[0], y.median(), y.median(2)[0], x.kthvalue(2, 1), torch.cdist(x, x + 1)),
        (torch.diagonal(x, -1, 0, 2), torch.as_strided(x, (2, 3, 4), (6, 1, 5), 2), torch.diag_embed(x[0])),
    )


def test_search_and_order():
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0, 0, 0] = float("nan")
    values = torch.tensor([[-2.0, 0, 0.5], [3, float("nan"), 1]])
    check(Function(search), (x, y, torch.tensor([-1.0, 0, 0, 0.5, 2]), values))


def scatter(x, updates, places):
    both = x[:, :, None].repeat(1, 1, 4)
    both[torch.tensor([0, 2]), :, torch.tensor([1, 3])] = 7
    return (
        [x.scatter_reduce(0, places, updates[:2], kind, include_self=False) for kind in ("mean", "amax", "sum")],
        (x.scatter_reduce(0, places, updates[:2], "mean"), x.scatter(0, places, updates), both),
        x.long().scatter_reduce(0, places, updates[:2].long(), "amin", include_self=False),
    )


def test_scattering():
    generator = torch.Generator().manual_seed(0)
    x, updates = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
    check(Function(scatter), (x, updates, torch.tensor([[0, 1, 0, 2], [2, 2, 0, 0]])))


def pool(x):
    values, places = F.max_pool2d(x[:, :, :6, :8], 2, return_indices=True)
    return (
        (
            F.max_pool2d(x[0], 3, 2, 1),
            places,
            F.max_unpool2d(values, places, 2),
            F.avg_pool2d(x, 3, divisor_override=5),
        ),
        (
            F.adaptive_max_pool2d(x, (3, 4)),
            F.adaptive_avg_pool3d(x[:, None], (2, 3, 4)),
            F.conv2d(x[0], x[:2, :, :3, :3]),
        ),
        (
            F.pad(x[:, None], (1, 1, 2, 2, 1, 1), mode="replicate"),
            F.fold(x.reshape(2, 12, 21)[..., :12], (4, 5), (2, 2)),
        ),
    )


def test_pooling():
    check(Function(pool), (torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(0)),))
