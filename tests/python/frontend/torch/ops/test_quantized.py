"""Ops of programs that torch quantized, against torch: types, ranges that are narrower, channels, computed scales."""

import pytest

torch = pytest.importorskip("torch")
from torch.ao.quantization.fx import _decomposed  # noqa: E402, F401 - registers the ops

from frontend.torch_results import Function, check  # noqa: E402

Q = torch.ops.quantized_decomposed


def quantize(x):
    channels = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1, 2, 3, 4]), 1, -128, 127, torch.int8
    params = (0.02, 130, 0, 255, torch.uint8)
    scale, zero = Q.choose_qparams(x, -128, 127, 1e-6, torch.int8)
    return (
        (Q.quantize_per_tensor(x, 0.02, 3, -127, 127, torch.int8), scale, zero),
        (Q.quantize_per_tensor(x, 0.001, 0, -20000, 20000, torch.int32),),
        Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *params), *params),
        Q.dequantize_per_channel(Q.quantize_per_channel(x, *channels), *channels),
        Q.quantize_per_tensor(x, scale, zero, -128, 127, torch.int8),
    )


def test_to_and_from_whole_numbers():
    check(Function(quantize), (torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)) * 3,))
