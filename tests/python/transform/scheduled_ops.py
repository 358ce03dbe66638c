"""Relax ops as kernels, before and after scheduling, and their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

import relax_hetero as rh
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.dispatch import form_dispatches
from relax_hetero.transform.dispatch.schedule_cpu import schedule_cpu
from tir.kernel_runs import TARGETS, VECTOR_NAMES, poisoned

Build = Callable[..., relax.Expr]
Operand = tuple[tuple[Any, ...], str]
Operands = Sequence[Operand]

F32, I64, I32 = "float32", "int64", "int32"
N = tirx.Var("n", "int64")
LENGTH = 19
"""Value of the symbolic extent when a kernel runs."""


def const(value: float, dtype: str = F32) -> relax.Expr:
    return relax.const(value, dtype)


def f32(*shape: Any) -> Operand:
    return shape, F32


def i64(*shape: Any) -> Operand:
    return shape, I64


def i32(*shape: Any) -> Operand:
    return shape, I32


def pool(kind: str, layout: str, window: int, stride: int, pad: int, **attributes: Any) -> Build:
    make = getattr(op.nn, f"{kind}_pool2d")
    return lambda x: make(x, (window, window), (stride, stride), (pad, pad, pad, pad), layout=layout, **attributes)


def resize(layout: str, method: str, size: tuple[int, int]) -> Build:
    return lambda x: op.image.resize2d(x, relax.ShapeExpr(list(size)), layout=layout, method=method)


def not_scheduled() -> Any:
    return mock.patch.object(form_dispatches, "schedule_cpu", lambda mod: mod)


def formed(build: Build, operands: Operands, target: str) -> tvm.IRModule:
    """A function of one op as kernels without a schedule: no other pass takes the op away."""
    builder = relax.BlockBuilder()
    variables = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(operands)]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(build(*variables))
        builder.emit_func_output(result)
    placed = rh.transform.RealizeVDevice()(with_vdevices(builder.get(), [rh.VDevice(TARGETS[target])]))
    with not_scheduled():
        return rh.transform.FormDispatches()(placed)


def kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]


def inputs(operands: Operands, rng: np.random.Generator) -> list[np.ndarray]:
    """Fresh numbers, with a few that are not finite; indices are in bounds of five."""
    values = []
    for shape, dtype in operands:
        extents = [extent if isinstance(extent, int) else LENGTH for extent in shape]
        if dtype == F32:
            values.append(rng.standard_normal(extents).astype(dtype))
        else:
            values.append(rng.integers(0, 5, extents).astype(dtype))
    return values


def results(mod: tvm.IRModule, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    with not_scheduled():
        machine = rh.vm.VirtualMachine(rh.compile(mod))
    outputs = machine["main"](*values)
    arrays = [tensor.numpy() for tensor in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]
    if len(arrays) == 1:  # once more, over a poisoned result, which reveals elements that are not written
        out = poisoned(arrays[0].shape, str(arrays[0].dtype))
        machine["main"](*values, out=out)
        arrays = [out.numpy()]
    return arrays


def one_width_each(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each case with one of the vector widths, in turns."""
    return list(zip(names, itertools.cycle(VECTOR_NAMES), strict=False))


def check(build: Build, operands: Operands, targets: Sequence[str], rng: np.random.Generator) -> None:
    """Scheduled kernels give what TVM's own loops give, up to the order of additions, on every target."""
    values = inputs(operands, rng)
    want = results(formed(build, operands, targets[0]), values)
    for target in targets:
        before = formed(build, operands, target)
        after = schedule_cpu(before)
        assert all(not new.same_as(old) for new, old in zip(kernels(after), kernels(before), strict=True)), (
            "not scheduled"
        )
        for one, other in zip(results(after, values), want, strict=True):
            # float16 is computed in float32, rounded fewer times than by TVM's loops.
            tolerance = 2e-3 if one.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=target)
