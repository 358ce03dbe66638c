"""An attack on the sizes of an ONNX op: a model of one node, and calls of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HUGE = 2**31
LARGEST = 2**63 - 1
LEAST = -(2**63)

Dims = Sequence[Any]
"""Dimensions of an input: names are symbolic."""

Call = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Attack:
    """A model and the inputs of calls of it.

    Attributes
    ----------
    name : str
        The op, and the sizes that vary.
    calls : sequence of Call
        Arrays by the names of the model's inputs.
    """

    name: str
    model: onnx.ModelProto
    calls: Sequence[Call]


def data(*shape: int, dtype: str = "float32") -> np.ndarray:
    """The numbers 1, 2, 3 … in this shape."""
    return (np.arange(int(np.prod(shape)), dtype="float64") % 100 + 1).reshape(shape).astype(dtype)


def ints(*values: int, dtype: str = "int64") -> np.ndarray:
    """A vector of sizes."""
    return np.array(values, dtype)


def scalar(value: Any, dtype: str = "int64") -> np.ndarray:
    """One number, of rank 0."""
    return np.array(value, dtype)


def one_op(
    op: str,
    dims: Mapping[str, Dims],
    calls: Sequence[Call],
    constants: Mapping[str, np.ndarray] | None = None,
    order: Sequence[str] | None = None,
    outputs: int = 1,
    result: int = TensorProto.FLOAT,
    results: Sequence[int] | None = None,
    opset: int = 18,
    label: str = "",
    domain: str = "",
    **attributes: Any,
) -> Attack:
    """An attack on one node.

    Parameters
    ----------
    dims : mapping of str to Dims
        The dimensions of each input; its element type is that of the first call's array.
    constants : mapping of str to np.ndarray, optional
        Inputs that are initializers.
    order : sequence of str, optional
        Names of the node's inputs, "" for one that is left out; by default inputs, then constants.
    result : int
        Element type of the outputs, `results` of each one.
    """
    constants = constants or {}
    first = calls[0]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(first[name]).dtype), list(shape))
        for name, shape in dims.items()
    ]
    names = [f"y{i}" for i in range(outputs)]
    types = results or [result] * outputs
    node = helper.make_node(op, list(order or [*dims, *constants]), names, name="the_node", domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "attacked",
        infos,
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, types, strict=True)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    text = label or ", ".join(f"{name}{list(shape)}" for name, shape in dims.items())
    return Attack(f"{op}: {text}", model, list(calls))


def extremes() -> list[int]:
    """Numbers that sizes are attacked with."""
    return [0, 1, -1, -2, 2, 3, 4, 5, HUGE, LARGEST, LEAST, 2**32 + 3, 2**62]
