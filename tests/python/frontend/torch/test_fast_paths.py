"""Decompositions of whole layers against torch's ops; no compilation."""

import pytest

torch = pytest.importorskip("torch")

from relax_hetero.frontend.torch.exporting import PER_KEY, fast_path_decompositions  # noqa: E402

WIDTH, HEADS, HIDDEN, BATCH, LENGTH = 12, 3, 20, 2, 5
OPS = torch.ops.aten


def masks():
    per_key = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    per_key[0, 3:] = True
    per_score = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return {"none": (None, None), "per key": (per_key, PER_KEY), "per score": (per_score, 0)}


def projections():
    return torch.randn(3 * WIDTH, WIDTH), torch.randn(3 * WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("weights", [(True, True), (True, False), (False, True)])
def test_attention(mask, weights):
    torch.manual_seed(0)
    op = OPS._native_multi_head_attention.default
    x = torch.randn(BATCH, LENGTH, WIDTH)
    given = (x, x, x, WIDTH, HEADS, *projections(), masks()[mask][0], *weights, masks()[mask][1])
    ours, theirs = fast_path_decompositions(torch)[op](*given), op(*given)
    for mine, other in zip(ours, theirs if weights[0] else theirs[:1], strict=weights[0]):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize(("use_gelu", "norm_first"), [(False, False), (True, True)])
def test_encoder_layer(mask, use_gelu, norm_first):
    torch.manual_seed(0)
    op = OPS._transformer_encoder_layer_fwd.default
    norms = [torch.randn(WIDTH) for _ in range(4)]
    feed_forward = torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH)
    options = use_gelu, norm_first, 1e-5
    x = torch.randn(BATCH, LENGTH, WIDTH)
    given = (x, WIDTH, HEADS, *projections(), *options, *norms, *feed_forward, *masks()[mask])
    torch.testing.assert_close(fast_path_decompositions(torch)[op](*given), op(*given), rtol=1e-4, atol=1e-4)
