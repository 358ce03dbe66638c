"""Conditions and loops of torch against torch: both branches, loops that a count, a condition and slices end."""

import pytest

torch = pytest.importorskip("torch")
from torch._higher_order_ops.map import map as torch_map  # noqa: E402 - needs torch
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch._higher_order_ops.while_loop import while_loop  # noqa: E402

from frontend.torch_results import Function, check, compare  # noqa: E402

DEVICES = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}]


def function(x):
    flag = torch.cond(x.sum() > 0, lambda x: (x * 3, x + 1), lambda x: (x - 1, x * 2), (x,))
    many = torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x - 1, (x,))
    counted = while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 0.5 + i), (torch.tensor(0), x))
    grown = while_loop(lambda y: y.sum() < 50, lambda y: (y * 2 + 1,), (x.abs() + 0.1,))
    return flag, many, counted, grown, scan(lambda c, a: (c + a, c * a), torch.zeros(4), x)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"vdevices": DEVICES, "placement": {"cond": "llvm:1", "scan*": "llvm:1"}},
    ],
)
def test_branches_and_loops(options):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    shapes = (({0: torch.export.Dim("n", max=90)},),)
    main, _ = check(Function(function), (x,), dynamic_shapes=shapes, **options)
    for other in (-x.abs(), torch.randn(30, 4, generator=torch.Generator().manual_seed(1)) * 9):
        compare(main(other), function(other))


def test_a_graph_for_each_row():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    check(Function(lambda x: torch_map(lambda a, b: a * b + 1, x, x[0] * 2)), (x,))
