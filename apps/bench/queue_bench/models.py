"""Models of the benchmark of queues, on CPU devices of one core each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh

# MiniLM cut in the middle: the last three of six layers, and all ops after them, on the second device.
MIDDLE = {"/encoder/layer.[345]/*": "vdevice:1", "/pooling/*": "vdevice:1", "/normalize/*": "vdevice:1"}


def one_core_devices(count: int) -> list[relax.VDevice]:
    """`count` devices that are each one core of this CPU."""
    target = {**rh.native("llvm").export(), "num-cores": 1}
    return [rh.VDevice(target, index) for index in range(count)]


def layers(builder: relax.BlockBuilder, value: relax.Expr, weights: Sequence[np.ndarray]) -> relax.Expr:
    """``tanh(value @ weight)`` for each weight."""
    for weight in weights:
        value = builder.emit(relax.op.tanh(relax.op.matmul(value, relax.const(weight))))
    return value


def model(
    width: int, devices: Sequence[relax.VDevice], body: Callable[[relax.BlockBuilder, relax.Var], relax.Expr]
) -> tvm.IRModule:
    """A module whose ``main`` takes a square matrix on the first device."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((width, width), "float32", devices[0]))
    mod = tvm.IRModule(global_infos={"vdevice": list(devices)})
    builder = relax.BlockBuilder(mod)
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def some_weights(width: int, count: int, seed: int) -> list[np.ndarray]:
    """Matrices that keep the magnitude of numbers."""
    random = np.random.default_rng(seed)
    return [(random.standard_normal((width, width)) / width**0.5).astype("float32") for _ in range(count)]


def pipeline(width: int, depth: int) -> tvm.IRModule:
    """Two equal stages of `depth` layers, the second on another device."""
    devices, weights = one_core_devices(2), some_weights(width, depth, 0)

    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        there = builder.emit(relax.op.to_vdevice(layers(builder, x, weights), devices[1]))
        return layers(builder, there, weights)

    return model(width, devices, body)


def halves(width: int, depth: int) -> tvm.IRModule:
    """Two equal halves that read the same input, on two devices; the result holds both."""
    devices, weights = one_core_devices(2), some_weights(width, depth, 0)

    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        there = builder.emit(relax.op.to_vdevice(x, devices[1]))
        first, second = layers(builder, x, weights), layers(builder, there, weights)
        return relax.Tuple([first, second])

    return model(width, devices, body)


def half(width: int, depth: int) -> tvm.IRModule:
    """One half of `halves` alone, on one core."""
    weights = some_weights(width, depth, 0)
    return model(width, one_core_devices(1), lambda builder, x: layers(builder, x, weights))


def addition() -> tvm.IRModule:
    """One kernel on 16 floats, for all cores: nearly all of a call is the call itself."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((16,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, relax.const(np.ones(16, "float32"))))
        builder.emit_func_output(result)
    return builder.get()
