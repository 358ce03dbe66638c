"""Results whose size only a call knows, and numbers read from tensors, against torch."""

import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check, compare  # noqa: E402 - needs torch


def masks(x):
    mask = x > 0
    integers = (x * 2).long()
    return (
        (x[mask] * 2, x[x[:, 0] > 0], x[:, x[0] > 0].sum(0), torch.masked_select(x, mask[:1])),
        (x.masked_scatter(mask, torch.arange(12.0)), torch.index_put(x, (mask,), x[mask] * 3)),
        (torch.nonzero(mask), torch.unique(integers, return_inverse=True, return_counts=True)),
        torch.unique_consecutive(integers, return_inverse=True, return_counts=True),
        torch.repeat_interleave(x, (x[:, 0].abs() * 3).long(), 0),
    )


def test_masks_and_unique_values():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    main, _ = check(Function(masks), (x,))
    for other in (-x, x * 0):
        compare(main(other), masks(other))


def numbers(x):
    count = x[0, 0].to(torch.int64).item()
    return x * count + x.sum().item(), x + (count * 2 + 1), torch.ones(abs(count)) if count is None else x.mean()


def test_numbers_that_are_read():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) - 5
    main, _ = check(Function(numbers), (x,))
    compare(main(x * 9), numbers(x * 9))
    sized, _ = check(Function(lambda n: torch.zeros(n.sum().item()) + 1), (torch.tensor([2, 3]),))
    assert sized(torch.tensor([9, 1])).shape == (10,)
    with pytest.raises(rh.HeteroError, match="is at least 0"):
        sized(torch.tensor([-9, 1]))


def test_parts_are_replaced_by_steps():
    def function(x):
        y = x.clone()
        y[1:, ::2] = x[1:, 1::2]
        y[0] += 1
        y[x > 1] = 5
        return y

    shapes = (({0: torch.export.Dim("n", min=3, max=90)},),)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    main, _ = check(Function(function), (x,), dynamic_shapes=shapes)
    compare(main(x[:4] * 2), function(x[:4] * 2))
