"""Arguments of every kind that Python programs pass, against numpy's view of them.

A case is right if the result is that of the plain array with the same elements, and refused if the library says so.
Arrays may be of another byte order, strided forwards, backwards and not at all, misaligned, read-only, empty, of
another element type or shape, or no arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper

import relax_hetero as rh

from .harness import REFUSED, RIGHT, Outcome
from .reference import difference, guarded

DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")

NOT_ARRAYS: tuple[Any, ...] = (
    *(
        None,
        "x",
        b"xy",
        object(),
        {},
        [],
        [[1.0, 2.0], [3.0]],
        [[1.0, 2.0], [3.0, 4.0]],
        3,
        2.5,
        1 + 2j,
        float,
        range(4),
    ),
    *(
        np.datetime64("2020-01-01"),
        np.array(["a", "b"]),
        np.array([object()]),
        np.zeros(3, "V8"),
        np.ma.masked,
        slice(3),
    ),
)


def _model(dtype: str) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x, y = (helper.make_tensor_value_info(name, kind, ["n", "m"]) for name in "xy")
    out = helper.make_tensor_value_info("z", kind, ["n", "m"])
    op = "Xor" if dtype == "bool" else "Sub"
    graph = helper.make_graph([helper.make_node(op, ["x", "y"], ["z"])], "g", [x, y], [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@functools.cache
def _machine(dtype: str, devices: int) -> rh.vm.VirtualMachine:
    return rh.vm.VirtualMachine(rh.compile(rh.from_onnx(_model(dtype), vdevices=["llvm"] * devices)))


def _plain(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2 if dtype == "bool" else 9, shape).astype(dtype)


def _swapped(rng: np.random.Generator, a: np.ndarray) -> Any:
    return a.astype(a.dtype.newbyteorder(">"))


def _backwards(rng: np.random.Generator, a: np.ndarray) -> Any:
    return np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1]


def _steps(rng: np.random.Generator, a: np.ndarray) -> Any:
    wide = np.zeros((a.shape[0] * 2 + 1, a.shape[1] * 3 + 2), a.dtype)
    view = wide[: a.shape[0] * 2 : 2, 1 : 1 + a.shape[1] * 3 : 3]
    view[...] = a
    return view


def _repeated(rng: np.random.Generator, a: np.ndarray) -> Any:
    return np.broadcast_to(a[:1], a.shape)


def _fortran(rng: np.random.Generator, a: np.ndarray) -> Any:
    return np.asfortranarray(a)


def _misaligned(rng: np.random.Generator, a: np.ndarray) -> Any:
    offset = int(rng.integers(1, 64))
    return np.frombuffer(bytearray(offset) + a.tobytes(), "uint8")[offset:].view(a.dtype).reshape(a.shape)


def _read_only(rng: np.random.Generator, a: np.ndarray) -> Any:
    a = a.copy()
    a.flags.writeable = False
    return a


def _guarded(rng: np.random.Generator, a: np.ndarray) -> Any:
    return guarded({"a": a})["a"]


def _tensor(rng: np.random.Generator, a: np.ndarray) -> Any:
    return tvm.runtime.tensor(a, tvm.cpu(int(rng.integers(0, 2))))


def _matrix(rng: np.random.Generator, a: np.ndarray) -> Any:
    return a.view(np.matrix)


def _same(rng: np.random.Generator, a: np.ndarray) -> Any:
    return a


LAYOUTS: tuple[Callable[[np.random.Generator, np.ndarray], Any], ...] = (
    *(_same, _swapped, _backwards, _steps, _repeated, _fortran, _misaligned, _read_only, _guarded, _tensor, _matrix),
)


def attack(rng: np.random.Generator) -> Outcome:
    """One call."""
    dtype = str(rng.choice(DTYPES))
    vm = _machine(dtype, int(rng.integers(1, 3)))
    shape = tuple(int(size) for size in rng.choice([0, 1, 2, 3, 8, 17, 64], 2))
    arguments: list[Any] = []
    texts = []
    for _ in range(2):
        own_dtype = str(rng.choice(DTYPES)) if rng.random() < 0.1 else dtype
        own_shape = (
            shape if rng.random() < 0.9 else tuple(int(size) for size in rng.choice([0, 1, 3, 9], rng.integers(0, 4)))
        )
        value: Any = _plain(rng, own_dtype, own_shape)
        layout = LAYOUTS[rng.integers(len(LAYOUTS))] if len(own_shape) == 2 else _same
        value = layout(rng, value)
        if rng.random() < 0.05:
            value = NOT_ARRAYS[rng.integers(len(NOT_ARRAYS))]
        arguments.append(value)
        texts.append(
            f"{layout.__name__} {own_dtype} {own_shape}" if isinstance(value, np.ndarray) else repr(value)[:80]
        )
    if rng.random() < 0.1:
        arguments[1] = arguments[0]
    if rng.random() < 0.05:
        arguments = arguments[: rng.integers(0, 2)] if rng.random() < 0.5 else [*arguments, arguments[0]]
    how = int(rng.integers(4))
    text = f"{dtype} {texts} {len(arguments)} given, way {how}"
    try:
        result = _called(vm, arguments, how)
    except rh.HeteroError:
        return REFUSED
    plain = [np.asarray(value.numpy() if isinstance(value, tvm.runtime.Tensor) else value) for value in arguments]
    if len(plain) != 2 or plain[0].shape != plain[1].shape:
        return Outcome("accepted", text)
    a, b = (value.astype(value.dtype.newbyteorder("=")) for value in plain)
    expected = (a ^ b) if dtype == "bool" else np.subtract(a.astype(dtype), b.astype(dtype))
    complaint = difference(result, expected.astype(dtype))
    return Outcome("wrong", f"{text}: {complaint}") if complaint else RIGHT


def _called(vm: rh.vm.VirtualMachine, arguments: list[Any], how: int) -> np.ndarray:
    """The result of a call by position, by name, submitted, or into a given array."""
    if how == 0 or len(arguments) != 2:
        return np.asarray(vm["main"](*arguments).numpy())
    if how == 1:
        return np.asarray(vm["main"](x=arguments[0], y=arguments[1]).numpy())
    if how == 2:
        return np.asarray(vm.submit("main", *arguments).result(timeout=60).numpy())
    first = vm["main"](*arguments)
    out = np.full(first.shape, 7, first.dtype)
    vm["main"](*arguments, out=out)
    return out
