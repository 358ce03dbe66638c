"""Single ATen ops against torch: rounding, signs, axes, indices, masks."""

import pytest

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check  # noqa: E402 - needs torch

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
