"""Complex values inside a module, as pairs of real tensors, against torch."""

import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check  # noqa: E402 - needs torch


class Turned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        values = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(3))
        self.register_buffer("c", torch.view_as_complex(values))

    def forward(self, x):
        c, fft = self.c, torch.fft
        turned = torch.view_as_complex(x.reshape(3, 2, 2)) * torch.polar(torch.ones(3, 2), x[:, :2]) * c
        return (
            (torch.view_as_real(turned).flatten(1), c.abs(), (c / c.conj()).angle(), (c @ c.T).real, (c + 1).imag),
            ((x[:, :2] * c).sum().abs(), torch.exp(c).abs(), torch.cat([c, c * 1e-25]).abs(), (x[:, :2] + c).imag),
            (fft.irfft(fft.rfft(x) * 2, n=4), fft.irfft(fft.rfft(x, dim=0, norm="ortho"), n=3, dim=0, norm="forward")),
            (fft.fft2(x).abs(), fft.ifft2(fft.fft2(x)).real, fft.irfft2(fft.rfft2(x), s=(3, 4))),
        )


def test_arithmetic_and_transforms():
    check(Turned(), (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))


def test_complex_inputs_and_outputs_are_refused():
    with pytest.raises(rh.FrontendError, match=r"input 'args_0' is of torch.complex64"):
        rh.from_torch(Function(lambda c: c.abs()), (torch.zeros(3, dtype=torch.complex64),))
    with pytest.raises(rh.FrontendError, match="output 'output_0' is of complex numbers"):
        rh.from_torch(Function(torch.fft.fft), (torch.zeros(4),))
    with pytest.raises(rh.FrontendError, match="aten.tan.*complex numbers"):
        rh.from_torch(Function(lambda x: torch.tan(torch.fft.fft(x)).abs()), (torch.zeros(4),))
