"""Which ONNX ops can be imported, and by which converter."""

from __future__ import annotations

from typing import Any

from tvm.relax.frontend.onnx import onnx_frontend as stock

from ...errors import FrontendError
from ..ops import CONVERTERS
from .check_model import STANDARD_DOMAINS
from .functions import FunctionTable, function_of
from .model import OnnxModel
from .node_names import NodeInfo, walk_nodes

# Ops of ONNX Runtime's own domain that stock TVM converts. Stock TVM looks ops up without their domain,
# so that an op of any domain that happens to share a name would become something else, silently.
_MICROSOFT = "com.microsoft"
_MICROSOFT_OPS = frozenset(
    "Attention BiasGelu EmbedLayerNormalization FastGelu Gelu MatMulInteger16 SkipLayerNormalization".split()
)
# Those that this library converts itself.
_OWN_MICROSOFT_OPS = frozenset(
    "DynamicQuantizeMatMul MatMulIntegerToFloat MatMulNBits QGemm QLinearAdd QLinearAveragePool QLinearConcat "
    "QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere".split()
)
# Ops of that domain that are the same as the standard op of that name.
_LIKE_STANDARD = frozenset({"DequantizeLinear", "QuantizeLinear"})
# Stock converters of these follow ONNX Runtime's definition only.
_ONLY_MICROSOFT = _MICROSOFT_OPS - {"Gelu"}

# The importer converts these itself.
_OWN_OPS = frozenset({"Constant", "If", "Loop", "Scan", "SequenceMap"})

# Stock converters that take a shape (a list of symbolic sizes) where ONNX has a tensor of integers.
_TAKES_SHAPES = frozenset(
    "Reshape Resize ConstantOfShape Gather Slice Shape Expand Concat Equal Where Cast CastLike Squeeze".split()
)

# Their converters' tuples are one value (a sequence), not several outputs.
SEQUENCE_OPS = frozenset(
    "Optional OptionalGetElement SequenceConstruct SequenceEmpty SequenceErase SequenceInsert ConcatFromSequence "
    "SplitToSequence Identity".split()
)


def find_converter(domain: str, op_type: str) -> Any:
    """This library's converter of an op, else stock TVM's, else None."""
    table = stock._get_convert_map()
    if domain in STANDARD_DOMAINS:
        own = CONVERTERS.get(op_type) if op_type not in _OWN_MICROSOFT_OPS else None
        return own if own is not None or op_type in _ONLY_MICROSOFT else table.get(op_type)
    if domain == _MICROSOFT and op_type in _OWN_MICROSOFT_OPS | _LIKE_STANDARD:
        return CONVERTERS[op_type]
    if domain == _MICROSOFT and op_type in _MICROSOFT_OPS:
        return table.get(op_type)
    return None


def takes_shapes(domain: str, op_type: str) -> bool:
    """Whether the op's converter takes a list of symbolic sizes where ONNX has a tensor of integers."""
    return op_type in _TAKES_SHAPES or (domain in STANDARD_DOMAINS and op_type in CONVERTERS)


def check_supported(nodes: list[NodeInfo], model: OnnxModel, functions: FunctionTable) -> None:
    """Refuse a model with nodes that cannot be imported.

    Raises
    ------
    FrontendError: Listing every such node with its op type, domain and opset.
    """
    missing = [node for node in walk_nodes(nodes) if not _supported(node, functions)]
    if missing:
        versions = {entry.domain: entry.version for entry in model.proto.opset_import}
        lines = "; ".join(
            f"node {node.name!r}: {node.op_type} of domain {node.domain or 'ai.onnx'!r}, "
            f"opset {model.opset if node.domain in STANDARD_DOMAINS else versions.get(node.domain, 'unknown')}"
            for node in missing
        )
        raise FrontendError(f"{model.source} has ops that TVM cannot import: {lines}")


def _supported(node: NodeInfo, functions: FunctionTable) -> bool:
    if function_of(node, functions) is not None:
        return True
    is_own = node.domain in STANDARD_DOMAINS and node.op_type in _OWN_OPS
    return is_own or find_converter(node.domain, node.op_type) is not None
