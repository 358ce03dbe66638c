"""Random numbers of torch: their distributions, since the numbers themselves are the library's own."""

import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")
from frontend.torch_results import Function  # noqa: E402 - needs torch


def draw(x):
    mean = torch.full((4000,), 0.3)
    return (
        (torch.rand(2000), torch.randn_like(x), torch.randperm(50), torch.randint(3, 9, (4000,))),
        (torch.bernoulli(mean), torch.normal(1.0, 3.0, (4000,)), torch.multinomial(torch.tensor([0.1, 0.0, 0.9]), 2)),
    )


def test_distributions():
    x = torch.zeros(5000)
    main = rh.vm.VirtualMachine(rh.compile(rh.from_torch(Function(draw).eval(), (x,))))["main"]
    uniform, normal, order, whole, flags, wide, chosen = [value.numpy() for value in main(x)]
    assert uniform.mean() == pytest.approx(0.5, abs=0.05)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert (normal.mean(), normal.std()) == pytest.approx((0, 1), abs=0.06)
    assert sorted(order) == list(range(50))
    assert (whole.min(), whole.max(), whole.dtype) == (3, 8, "int64")
    assert flags.mean() == pytest.approx(0.3, abs=0.04)
    assert (wide.mean(), wide.std()) == pytest.approx((1, 3), abs=0.2)
    assert sorted(chosen) == [0, 2]
