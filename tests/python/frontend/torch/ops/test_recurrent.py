"""Recurrent layers of torch against torch: layers, directions, gates, states, and long sequences."""

import pytest

torch = pytest.importorskip("torch")
from frontend.torch_results import check  # noqa: E402 - needs torch

nn = torch.nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(3, 5, bidirectional=True)
        self.relu = nn.RNN(3, 4, nonlinearity="relu", bias=False)

    def forward(self, x, start):
        return self.lstm(x), self.gru(x, start), self.relu(x)


def test_layers_and_directions():
    generator = torch.Generator().manual_seed(0)
    x, start = torch.randn(2, 3, 3, generator=generator), torch.randn(2, 3, 5, generator=generator)
    check(Layers(), (x, start))


def test_projections():
    check(nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True), (torch.randn(2, 1, 3),))


@pytest.mark.slow
def test_a_long_sequence_is_a_kernel():
    _, mod = check(nn.GRU(2, 3), (torch.randn(1500, 1, 2, generator=torch.Generator().manual_seed(0)),))
    assert "gru" in [gv.name_hint for gv in mod.functions]
