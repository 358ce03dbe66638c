"""Convolutions with bias and ReLU, channels last, for this library and for cuDNN."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

from .device_time import Clock, torch_on_gpu
from .torch_peers import Peer, captured, tensor_of
from .workloads import KINDS, Array, Kind, on_gpu


@dataclass(frozen=True)
class Convolutions:
    """Square convolutions of square feature maps, padded by half of the filter.

    Attributes
    ----------
    extent : int
        Height and width of the map.
    channels, made : int
        Channels of the map and of the result.
    window, stride : int
    batch : int
    kind : str
        "f16", "bf16", "f32" or "tf32" of `KINDS`.
    count : int
        Number of convolutions of a program, so large that submitting takes a small part of each one's time.
    """

    extent: int
    channels: int
    made: int
    window: int
    stride: int
    batch: int
    kind: str
    count: int = 12

    @property
    def title(self) -> str:
        """Its sizes: ``16x56²x64>64 3²/1``."""
        return f"{self.batch}x{self.extent}²x{self.channels}>{self.made} {self.window}²/{self.stride}"

    @property
    def types(self) -> Kind:
        """Its element types."""
        return KINDS[self.kind]

    @property
    def operations(self) -> int:
        """Multiplications and additions of one convolution."""
        places = (self.extent + 2 * (self.window // 2) - self.window) // self.stride + 1
        return 2 * self.batch * places**2 * self.made * self.channels * self.window**2

    def inputs(self) -> list[Array]:
        """Maps (batch, extent, extent, channels): shifted views of the same numbers, which are made quickly."""
        first = self._random("x", (self.batch, self.extent, self.extent, self.channels))
        return [np.roll(first.reshape(-1), 997 * index).reshape(first.shape) for index in range(self.count)]

    def weights(self) -> list[Array]:
        """Weights (made, channels, window, window)."""
        shape = (self.made, self.channels, self.window, self.window)
        first = self._random("w", shape, float(np.prod(shape[1:])) ** -0.5)
        return [np.roll(first.reshape(-1), 997 * index).reshape(shape) for index in range(self.count)]

    def bias(self) -> Array:
        """The bias of all convolutions."""
        return self._random("b", (self.made,))

    def module(self, gpu: Any) -> tvm.IRModule:
        """``main(x0, x1, ...)``, a tuple of results."""
        builder = relax.BlockBuilder()
        shape = (self.batch, self.extent, self.extent, self.channels)
        dtype = self.types.operand
        parameters = [relax.Var(f"x{index}", relax.TensorType(shape, dtype)) for index in range(self.count)]
        bias = relax.const(tvm.runtime.tensor(self.bias()))
        how = {"strides": self.stride, "padding": self.window // 2, "data_layout": "NHWC", "kernel_layout": "OIHW"}
        with builder.function("main", parameters):
            with builder.dataflow():
                results = []
                for x, weight in zip(parameters, self.weights(), strict=True):
                    y = builder.emit(relax.op.nn.conv2d(x, relax.const(tvm.runtime.tensor(weight)), **how))
                    y = builder.emit(relax.op.add(y, bias))
                    results.append(builder.emit_output(relax.op.nn.relu(y)))
            builder.emit_func_output(relax.Tuple(results))
        return on_gpu(builder.get(), gpu, self.types.precision)

    def _random(self, name: str, extents: tuple[int, ...], scale: float = 1.0) -> Array:
        generator = np.random.default_rng(zlib.crc32(f"{self.title} {name}".encode()))
        array = generator.standard_normal(extents, dtype="float32") * np.float32(scale)
        dtype = self.types.operand
        return array.astype(getattr(ml_dtypes, dtype, None) or dtype)


def wanted(work: Convolutions) -> list[Array]:
    """Right results by numpy, used without PyTorch."""
    results = []
    half, stride, window = work.window // 2, work.stride, work.window
    for x, weight in zip(work.inputs(), work.weights(), strict=True):
        padded = np.pad(x.astype("float32"), [(0, 0), (half, half), (half, half), (0, 0)])
        views = np.lib.stride_tricks.sliding_window_view(padded, (window, window), (1, 2))[:, ::stride, ::stride]
        sums = np.einsum("bhwcij,ncij->bhwn", views, weight.astype("float32"), optimize=True)
        results.append(np.maximum(sums + work.bias().astype("float32"), 0))
    return results


def cudnn(clock: Clock, work: Convolutions) -> dict[str, Peer]:
    """cuDNN's fastest algorithm, with a bias and a ReLU after it, and alone."""
    torch = torch_on_gpu()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = work.kind == "tf32"
    maps = [tensor_of(array).permute(0, 3, 1, 2) for array in work.inputs()]
    weights = [tensor_of(array).to(memory_format=torch.channels_last) for array in work.weights()]
    bias = tensor_of(work.bias())

    def convolved(of_bias: Any) -> list[Any]:
        how = {"stride": work.stride, "padding": work.window // 2}
        pairs = zip(maps, weights, strict=True)
        return [torch.nn.functional.conv2d(x, w, of_bias, **how) for x, w in pairs]

    def whole() -> list[Any]:
        return [torch.relu_(y).permute(0, 2, 3, 1) for y in convolved(bias)]

    return {"cuDNN, bias, relu": captured(clock, whole), "cuDNN alone": captured(clock, lambda: convolved(None))}
