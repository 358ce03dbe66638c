"""The option ``--smoke``: a benchmark at its smallest size, to test the command without measuring."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import click
import onnx
from onnx import TensorProto, helper

SMALL_MODEL = str(pathlib.Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx")
"""A file of 150 KB in the onnx package."""


def small_quantized_model(folder: pathlib.Path) -> str:
    """Write a model with one quantized ReLU to `folder`; returns its path."""
    scale, zero = (
        helper.make_tensor("s", TensorProto.FLOAT, (), [0.1]),
        helper.make_tensor("z", TensorProto.INT8, (), [3]),
    )
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 8)) for name in "xy")
    graph = helper.make_graph(nodes, "small", [x], [y], [scale, zero])
    path = folder / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return str(path)


def smoke(**smallest: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the option; it goes below click's decorators.

    Parameters
    ----------
    smallest : object
        Values that replace those of the command's parameters, or functions of the replaced values.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        @click.option("--smoke", "is_smoke", is_flag=True, help="Everything at its smallest: does the command work?")
        @functools.wraps(work)
        def main(*args: Any, is_smoke: bool, **options: Any) -> None:
            if is_smoke:
                options.update({key: new(options[key]) if callable(new) else new for key, new in smallest.items()})
            try:
                work(*args, **options)
            except SystemExit as end:
                # Missed bars exit with 1, and mean nothing at this size; wrong numbers exit with a text or True.
                if not is_smoke or isinstance(end.code, bool) or end.code != 1:
                    raise

        return main

    return decorate
