"""Random chains of convolutions and ops between them, over one and two devices, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

import relax_hetero as rh
from transform.numpy_convolution import convolve

STEPS = (
    "conv",
    "conv",
    "conv",
    "grouped",
    "depthwise",
    "bias",
    "scale",
    "relu",
    "hard_swish",
    "residual",
    "concat",
    "pool",
    "move",
)
DEVICES = [rh.native("llvm"), {"kind": "llvm", "mcpu": "x86-64-v3"}]


class Chain:
    """A module that grows along one feature map, with what it is in double precision."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.rng = np.random.default_rng(self.draw(st.integers(0, 2**16)))
        self.vdevices = [rh.VDevice(target, i) for i, target in enumerate(DEVICES)]
        module = tvm.IRModule()
        module.update_global_info("vdevice", self.vdevices)
        self.builder = relax.BlockBuilder(module)
        self.device = 0
        shape = [self.draw(st.integers(1, 2)), self.draw(st.sampled_from([1, 3, 4, 8, 17, 20, 48]))]
        shape += [self.draw(st.integers(5, 12)) for _ in range(2)]
        self.array = self.rng.standard_normal(shape).astype("float32")
        self.input = relax.Var("x", relax.TensorType(shape, "float32", self.vdevices[0]))
        self.value: relax.Expr = self.input
        self.earlier: list[tuple[relax.Expr, np.ndarray, int]] = []

    def step(self, name: str) -> None:
        self.earlier.append((self.value, self.array, self.device))
        getattr(self, name)()

    def become(self, call: relax.Expr, array: np.ndarray) -> None:
        self.value, self.array = self.builder.emit(call), array

    def constant(self, *shape: int, scale: float = 1.0) -> tuple[Any, np.ndarray]:
        array = (self.rng.standard_normal(shape) * scale).astype("float32")
        return relax.const(array), array

    def conv(self, groups: int = 1, outputs: int | None = None) -> None:
        channels, height, width = self.array.shape[1:]
        outputs = outputs or self.draw(st.sampled_from([1, 3, 8, 16, 20, 33, 64]))
        window = [self.draw(st.integers(1, min(3, size))) for size in (height, width)]
        padding = [self.draw(st.integers(0, 2)) for _ in range(4)]
        strides = [self.draw(st.integers(1, 2)) for _ in range(2)]
        padded = [size + padding[d] + padding[2 + d] for d, size in enumerate((height, width))]
        dilation = [self.draw(st.integers(1, 2)) if 2 * w <= padded[d] else 1 for d, w in enumerate(window)]
        each = channels // groups
        weight, array = self.constant(outputs, each, *window, scale=(each * window[0] * window[1]) ** -0.5)
        call = relax.op.nn.conv2d(self.value, weight, strides, padding, dilation, groups)
        self.become(call, convolve(self.array, array, strides, padding, dilation, groups))

    def grouped(self) -> None:
        groups = next(g for g in (4, 2, 3, 17, 1) if self.array.shape[1] % g == 0)
        self.conv(groups, groups * self.draw(st.integers(1, 9)))

    def depthwise(self) -> None:
        channels = self.array.shape[1]
        self.conv(channels, channels * self.draw(st.integers(1, 2)))

    def bias(self) -> None:
        expr, array = self.constant(*(self.draw(st.sampled_from([1, size])) for size in self.array.shape))
        self.become(relax.op.add(self.value, expr), self.array + array)

    def scale(self) -> None:
        expr, array = self.constant(self.array.shape[1], 1, 1)
        self.become(relax.op.multiply(self.value, expr), self.array * array)

    def relu(self) -> None:
        self.become(relax.op.nn.relu(self.value), np.maximum(self.array, 0))

    def hard_swish(self) -> None:
        source, array = self.value, self.array
        self.become(relax.op.add(source, relax.const(np.float32(3))), array + 3)
        self.become(relax.op.clip(self.value, 0.0, 6.0), np.clip(self.array, 0, 6))
        self.become(relax.op.multiply(source, self.value), array * self.array)

    def other(self, fits: Any) -> tuple[relax.Expr, np.ndarray]:
        """A value that was made earlier, on this device; the present one where none fits."""
        candidates = [entry for entry in self.earlier if fits(entry[1])]
        if not candidates:
            return self.value, self.array
        expr, array, device = self.draw(st.sampled_from(candidates))
        if device != self.device:
            expr = self.builder.emit(relax.op.to_vdevice(expr, self.vdevices[self.device]))
        return expr, array

    def residual(self) -> None:
        expr, array = self.other(lambda array: array.shape == self.array.shape)
        self.become(relax.op.add(self.value, expr), self.array + array)

    def concat(self) -> None:
        here = self.array.shape
        expr, array = self.other(lambda array: array.shape[:1] + array.shape[2:] == here[:1] + here[2:])
        if array.shape[1] + here[1] < 100:
            call = relax.op.concat([self.value, expr], axis=1)
            self.become(call, np.concatenate([self.array, array], axis=1))

    def pool(self) -> None:
        height, width = self.array.shape[2:]
        if min(height, width) < 2:
            return
        call = relax.op.nn.max_pool2d(self.value, pool_size=[2, 2])
        parts = [self.array[:, :, i : height - 1 + i, j : width - 1 + j] for i in (0, 1) for j in (0, 1)]
        self.become(call, np.maximum.reduce(parts))

    def move(self) -> None:
        self.device = 1 - self.device
        self.value = self.builder.emit(relax.op.to_vdevice(self.value, self.vdevices[self.device]))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(STEPS), min_size=2, max_size=7), st.data())
def test_a_chain_gives_numpys_numbers(steps, data):
    chain = Chain(data)
    with chain.builder.function("main", [chain.input]):
        with chain.builder.dataflow():
            start = chain.array
            for step in steps:
                chain.step(step)
            out = chain.builder.emit_output(chain.value)
        chain.builder.emit_func_output(out)
    module = chain.builder.get()
    module.update_global_info("vdevice", chain.vdevices)
    devices = [tvm.cpu(0), tvm.cpu(1)]
    got = rh.vm.VirtualMachine(rh.compile(module), devices)["main"](start).numpy()
    largest = max(1.0, float(np.abs(chain.array).max()))
    np.testing.assert_allclose(got, chain.array, rtol=1e-4, atol=1e-4 * largest)
