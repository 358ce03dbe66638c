"""Look-up of converters of ONNX ops, and the check that all nodes of a model have one."""

from __future__ import annotations

from ...errors import FrontendError
from ..ops import CONVERTERS
from ..ops.custom import IMPORTER_OPS, is_registered, registration
from ..ops.node import STANDARD, STANDARD_DOMAINS
from ..ops.table import Converter
from .functions import FunctionTable, function_of
from .node_names import NodeInfo, walk_nodes
from .onnx_model import OnnxModel

# Ops whose converters return a sequence as a tuple: one value, not several outputs.
SEQUENCE_OPS = frozenset(
    "Optional OptionalGetElement SequenceConstruct SequenceEmpty SequenceErase SequenceInsert ConcatFromSequence "
    "SplitToSequence Identity".split()
)


def find_converter(domain: str, op_type: str) -> Converter | None:
    """The converter of an op of a domain, or None."""
    return CONVERTERS.get((STANDARD if domain in STANDARD_DOMAINS else domain, op_type))


def check_supported(nodes: list[NodeInfo], model: OnnxModel, functions: FunctionTable) -> None:
    """Refuse a model with nodes that cannot be imported.

    Raises FrontendError, which lists every such node with its op type, domain and opset.
    """
    missing = [node for node in walk_nodes(nodes) if not has_converter(node, functions)]
    if missing:
        lines = "; ".join(
            f"node {node.name!r}: {node.op_type} of domain {node.domain or 'ai.onnx'!r}, "
            f"opset {opset_of(node.domain, model) or 'unknown'}"
            for node in missing
        )
        raise FrontendError(
            f"{model.source} has ops that TVM cannot import: {lines}; "
            f"{registration(missing[0].domain, missing[0].op_type)} registers a converter, or a numpy function"
        )


def opset_of(domain: str, model: OnnxModel) -> int | None:
    """The opset version of a domain that a model imports, or None."""
    if domain in STANDARD_DOMAINS:
        return model.opset
    return next((int(entry.version) for entry in model.proto.opset_import if entry.domain == domain), None)


def has_converter(node: NodeInfo, functions: FunctionTable) -> bool:
    """Return whether a node is an op that can be imported in some form, or calls a function of the model."""
    if function_of(node, functions) is not None or is_registered(node.domain, node.op_type):
        return True
    is_importer_op = node.domain in STANDARD_DOMAINS and node.op_type in IMPORTER_OPS
    return is_importer_op or find_converter(node.domain, node.op_type) is not None
