"""One node, imported, compiled and run, against onnxruntime or ONNX's own reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import relax_hetero as rh


def uniform(*shape: int, low: float = -2.0, high: float = 2.0, dtype: str = "float32") -> np.ndarray:
    """Fresh random numbers; the same for the same shape and bounds."""
    return np.random.default_rng(sum(shape) + len(shape)).uniform(low, high, shape).astype(dtype)


def integers(*shape: int, low: int = -5, high: int = 6, dtype: str = "int64") -> np.ndarray:
    """Fresh random integers in [low, high)."""
    return np.random.default_rng(sum(shape) + len(shape)).integers(low, high, shape).astype(dtype)


def node_model(
    op: str,
    inputs: Sequence[np.ndarray | None],
    opset: int,
    outputs: int = 1,
    constant: Sequence[int] = (),
    symbolic: Sequence[int] = (),
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node called ``the_node`` and the values of its inputs.

    Parameters
    ----------
    inputs : one array per input, None for one that is left out.
    constant : indices of inputs that are initializers.
    symbolic : indices of inputs whose dimensions have names only.
    """
    names = [f"x{i}" if value is not None else "" for i, value in enumerate(inputs)]
    arrays = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if name}
    fixed = {f"x{i}" for i in constant}
    infos = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(value.dtype),
            [f"{name}_{axis}" for axis in range(value.ndim)] if int(name[1:]) in symbolic else value.shape,
        )
        for name, value in arrays.items()
        if name not in fixed
    ]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, name="the_node", **attributes)],
        "one_node",
        infos,
        [onnx.ValueInfoProto(name=name) for name in results],
        [numpy_helper.from_array(arrays[name], name) for name in sorted(fixed)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model)
    for output in inferred.graph.output:  # inference knows nothing of some ops: the type is that of the first input
        if not output.type.WhichOneof("value"):
            output.type.CopyFrom(helper.make_tensor_type_proto(infos[0].type.tensor_type.elem_type, None))
    return inferred, {name: value for name, value in arrays.items() if name not in fixed}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], vdevices: Sequence[Any] = ("llvm",)) -> list[np.ndarray]:
    """The model's outputs, computed by this library."""
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=list(vdevices))))
    result = machine["main"](*feeds.values())
    return [value.numpy() for value in ([result] if hasattr(result, "numpy") else result)]


def expected(model: onnx.ModelProto, feeds: dict[str, np.ndarray], reference: str) -> list[np.ndarray]:
    """The model's outputs, computed by `reference`: "onnxruntime" or "onnx"."""
    if reference == "onnx":
        with np.errstate(all="ignore"):
            return ReferenceEvaluator(model).run(None, feeds)
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def check(
    op: str,
    *inputs: np.ndarray | None,
    opset: int = 18,
    reference: str = "onnxruntime",
    rtol: float = 1e-3,
    atol: float = 1e-5,
    **options: Any,
) -> list[np.ndarray]:
    """Assert that a node gives what the reference gives, types and shapes included; see `node_model` for `options`."""
    model, feeds = node_model(op, inputs, opset, **options)
    got = run(model, feeds)
    for value, want in zip(got, expected(model, feeds, reference), strict=True):
        assert value.dtype == want.dtype
        assert value.shape == want.shape
        np.testing.assert_allclose(value.astype("float64"), want.astype("float64"), rtol=rtol, atol=atol)
    return got


def refused(op: str, *inputs: np.ndarray | None, match: str, opset: int = 18, **options: Any) -> None:
    """Assert that a node is refused at import, by a message that names it and matches."""
    model, _ = node_model(op, inputs, opset, **options)
    with pytest.raises(rh.FrontendError, match=match) as caught:
        rh.from_onnx(model)
    assert op in str(caught.value)


def outputs_of(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    types: list[int],
    **options: object,
) -> list[np.ndarray]:
    """Outputs of nodes of opset 20, one for each, of these types; inputs by name, and constants."""
    infos = [helper.make_tensor_value_info(name, 1, value.shape) for name, value in feeds.items()]
    outputs = [
        helper.make_tensor_value_info(node.output[0], kind, None) for node, kind in zip(nodes, types, strict=True)
    ]
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos, outputs, weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, **options)))
    return [value.numpy() for value in machine["main"](**feeds)]
