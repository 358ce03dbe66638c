"""ONNX import that keeps node names and takes placement rules."""

from __future__ import annotations

import os
from typing import Any

import onnx
import tvm
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from .ops import CONVERTERS


class NodeImporter(ONNXGraphImporter):
    """Stock TVM's graph importer, with this library's converters in front of its own."""

    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        converter = CONVERTERS.get(op_name) or _get_convert_map()[op_name]
        value = converter.get_converter(opset)(self.bb, inputs, attrs, [self._nodes, self._params])
        return self.bb.normalize(value) if isinstance(value, tvm.relax.Expr) else value


def from_onnx(model: os.PathLike[str] | str | bytes | onnx.ModelProto) -> tvm.IRModule:
    """Import an ONNX model."""
    if isinstance(model, bytes):
        model = onnx.load_model_from_string(model)
    elif not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model))
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    return NodeImporter(None, None).from_onnx(model.graph, opset)
