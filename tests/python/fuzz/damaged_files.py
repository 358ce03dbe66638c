"""Damaged models and containers as attacks of the harness.

Bytes are changed by `file_attacks`; fields of models also one by one, so that the file stays one that protobuf reads.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

from .file_attacks import damaged
from .harness import REFUSED, RIGHT, Outcome

_INTS = (0, 1, -1, 2, 3, 7, 16, 127, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e38, -0.0)
_TEXTS = (
    "",
    "x",
    "n",
    "n+1",
    "n//0",
    "\0",
    "\x1b[2J",
    "/etc/passwd",
    "../w",
    "Add",
    "Loop",
    "If",
    "a" * 300,
    "ai.onnx.ml",
)


def _model() -> onnx.ModelProto:
    """A model with something of most things that a file may have."""
    weight = numpy_helper.from_array(np.ones((3, 4), "float32"), "w")
    shape = numpy_helper.from_array(np.array([-1, 2], "int64"), "shape")
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([1.0, 2.0], "float32"), "s"),
        numpy_helper.from_array(np.array([1, 5], "int64"), "i"),
        [4, 2],
    )
    function = helper.make_function(
        "my", "Twice", ["a"], ["c"], [helper.make_node("Add", ["a", "a"], ["c"])], [helper.make_opsetid("", 18)]
    )
    then = helper.make_graph(
        [helper.make_node("Relu", ["p"], ["t"])], "then", [], [helper.make_tensor_value_info("t", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["p"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("If", ["flag"], ["q"], then_branch=then, else_branch=other),
        helper.make_node("Reshape", ["q", "shape"], ["r"]),
        helper.make_node("Twice", ["r"], ["s"], domain="my"),
        helper.make_node("MatMul", ["p", "s0"], ["u"]),
        helper.make_node("Conv", ["image", "kernel"], ["f"], pads=[1, 1, 1, 1], strides=[2, 1], group=1),
        helper.make_node("Pad", ["f", "pads"], ["g"], mode="reflect"),
        helper.make_node("ConstantOfShape", ["shape2"], ["z"], value=helper.make_tensor("v", 1, [1], [2.0])),
    ]
    constants = [
        weight,
        shape,
        numpy_helper.from_array(np.ones((2, 3, 3, 3), "float32"), "kernel"),
        numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1], "int64"), "pads"),
        numpy_helper.from_array(np.array([2, 3], "int64"), "shape2"),
    ]
    sparse.values.name = "s0"
    inputs = [
        helper.make_tensor_value_info("x", 1, ["n + 1", 3]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        helper.make_tensor_value_info("image", 1, [1, 3, 8, "width"]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "sugz"]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants, sparse_initializer=[sparse])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


@functools.cache
def _seed_model() -> bytes:
    rh.from_onnx(_model())
    return bytes(_model().SerializeToString())


@functools.cache
def _seed_container() -> bytes:
    x = helper.make_tensor_value_info("x", 1, ["n", 3])
    y = helper.make_tensor_value_info("y", 1, None)
    weight = numpy_helper.from_array(np.ones((3, 40), "float32"), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.so"
        rh.compile(rh.from_onnx(model, vdevices=["llvm", "llvm"])).export_library(str(path))
        return path.read_bytes()


def _messages(message: Message) -> list[Message]:
    """A message and all those in it."""
    messages = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                messages += _messages(part)
    return messages


def _mutated(message: Message, draw: random.Random) -> None:
    """Change, double or drop one field."""
    fields = list(message.DESCRIPTOR.fields)
    present = [field for field, _ in message.ListFields()]
    field = draw.choice(present or fields) if draw.random() < 0.8 else draw.choice(fields)
    value: Any = getattr(message, field.name)
    if field.message_type is not None:
        if not field.is_repeated:
            message.ClearField(field.name)
        elif len(value):
            index = draw.randrange(len(value))
            if draw.random() < 0.5:
                del value[index]
            else:
                value.add().CopyFrom(value[index])
        return
    kind = field.cpp_type
    options: tuple[Any, ...] = _FLOATS
    if kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_UINT64, field.CPPTYPE_UINT32):
        options = _INTS
    elif kind == field.CPPTYPE_ENUM:
        options = tuple(range(-1, 25))
    elif kind == field.CPPTYPE_STRING:
        is_bytes = field.type == field.TYPE_BYTES
        options = tuple(text.encode() for text in _TEXTS) + (b"\xff" * 9,) if is_bytes else _TEXTS
    chosen = draw.choice(options)
    try:
        if not field.is_repeated:
            setattr(message, field.name, chosen)
        elif len(value) and draw.random() < 0.7:
            value[draw.randrange(len(value))] = chosen
        else:
            value.extend([chosen] * draw.choice((1, 2, 1000)))
    except (ValueError, TypeError):  # a number beyond the field's type
        message.ClearField(field.name)


def attack_models(rng: np.random.Generator) -> Outcome:
    """A damaged model is imported, and compiled if the importer takes it."""
    draw = random.Random(int(rng.integers(2**63)))
    if draw.random() < 0.4:
        name, data = damaged("onnx", _seed_model(), draw)
    else:
        name, model = "fields", onnx.ModelProto.FromString(_seed_model())
        for _ in range(draw.choice((1, 1, 2, 4))):
            _mutated(draw.choice(_messages(model)), draw)
        data = model.SerializeToString()
    try:
        rh.compile(rh.from_onnx(data))
    except rh.HeteroError:
        return REFUSED
    except Exception as error:
        raise RuntimeError(f"{name}: {data!r}"[:3000]) from error
    return RIGHT


def attack_containers(rng: np.random.Generator) -> Outcome:
    """A damaged executable is loaded, and a machine made of it."""
    draw = random.Random(int(rng.integers(2**63)))
    _, data = damaged("container", _seed_container(), draw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.so"
        path.write_bytes(data)
        try:
            rh.vm.VirtualMachine(rh.load(str(path)))
        except rh.HeteroError:
            return REFUSED
    return RIGHT
