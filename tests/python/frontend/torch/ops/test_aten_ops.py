"""Single ATen ops against torch: rounding, signs, axes, indices, masks."""

import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check, compare  # noqa: E402 - needs torch

F = torch.nn.functional


def test_single_ops():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 4, 6, generator=generator)
    i = torch.randint(-9, 9, (3, 4), generator=generator)
    j = torch.randint(1, 5, (3, 4), generator=generator)
    mask = x > 0
    places = torch.tensor([0, -1, 1])

    def function(x, i, j, mask, places):
        return (
            (i // j, i % j, torch.div(i, j, rounding_mode="trunc"), i / j, x // 0.7, x % 0.7, torch.fmod(x, 0.7)),
            (torch.add(x, x, alpha=2), 1 - x, x.abs() ** 0.5, i**2, x.expm1(), x.abs().log1p(), F.softplus(x)),
            (mask & ~mask, i ^ j, x.isnan(), torch.where(mask, x, 0.0), x.clamp(-1, 1), mask.any(), mask.all(-1)),
            (x.sum(1), x.var(1), x.mean((0, 2), keepdim=True), x.max(1), x.argmin(1), x.cumsum(1), mask.sum()),
            (x[:, -2:], x[1], x[..., ::2], x.roll(1, 1), x.flip(0), x.triu(1), *x.chunk(2, 1), F.pad(x, (1, 2))),
            (x[places], x[:, places], x[places, places], x[places, :, places], x.gather(1, i.abs()[:, :, None] % 4)),
            (F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3), x @ x.mT, F.layer_norm(x, (6,))),
            (F.adaptive_avg_pool2d(x, (3, 4)), F.interpolate(x[None], scale_factor=1.5, mode="bilinear")),
            F.interpolate(x[None], size=(3, 4), mode="bilinear", antialias=True),
            torch.einsum("bij,bkj->bik", x, x),
            F.scaled_dot_product_attention(x, x, x, mask[:, :, :4] & False),
        )

    check(Function(function), (x, i, j, mask, places))


def places(x, i, j, weights):
    bags = torch.tensor([1, 2, 0, 3, 3]), torch.tensor([0, 3, 3])
    return (
        (
            x.argmax(keepdim=True),
            x.argmin(keepdim=True),
            i.mode(1),
            x.cummax(1),
            x.logcumsumexp(0),
            i.flatten().bincount(),
        ),
        [F.embedding_bag(bags[0], weights, bags[1], mode=mode, padding_idx=0) for mode in ("mean", "sum", "max")],
        F.embedding_bag(bags[0], weights, bags[1], mode="sum", per_sample_weights=x[0, :3].flatten()[:5]),
        F.interpolate(x[None], scale_factor=0.6, mode="bicubic", antialias=True, align_corners=True),
        (torch.hamming_window(6, periodic=True) * x, F.batch_norm(x, None, None, training=True), F.one_hot(i, 9)),
        (x != x, torch.nanmean(x, 1), x.nanmedian(1), torch.copysign(x, -x), torch.hypot(x, x), x.round(decimals=1)),
        (x[0, 0, : j[0].item()], x[:, j[1].item()], x[0, j[1].item() :]),
    )


def test_bags_extremes_and_windows():
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 3, 6, generator=generator), torch.randn(4, 2, generator=generator)
    x[0, 0, 1] = float("nan")
    i = torch.tensor([[1, 4, 4], [2, 0, 8]])
    main, _ = check(Function(places), (x, i, torch.tensor([2, 1]), weights))
    other = (x, i, torch.tensor([-1, -2]), weights)
    compare(main(*other), places(*other))


def test_tensors_without_elements():
    def function(x, y):
        return (
            x.reshape(-1),
            x.view(-1, 3),
            x.mean(1),
            x.any(1),
            x.all(1),
            y.split([0, 4], 1),
            y.gather(0, y[:0].long()),
        )

    check(Function(function), (torch.zeros(2, 0), torch.ones(3, 4)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.scatter(0, i[:, None], 1.0),
        lambda x, i: x.index_add(0, i, x[:2]),
        lambda x, i: F.one_hot(i, 4),
    ],
)
def test_indices_that_torch_refuses(function):
    x = torch.ones(4, 3)
    main, _ = check(Function(function), (x, torch.tensor([0, 3])))
    for wrong in ([0, 4], [-1, 0]):
        with pytest.raises(rh.HeteroError, match="index"):
            main(x, torch.tensor(wrong))
