"""Strings as numbers: string tensors become int64 codes, indices into a table of all strings in the model.

Models only move and compare strings and look them up in tables, which works on codes too. Initializers, constants and
strings in attributes are replaced by codes. The virtual machine encodes arguments and decodes results; in each call it
assigns new codes to strings that are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...errors import FrontendError
from ..ops.node import STANDARD_DOMAINS
from ..ops.table import CLASSICAL
from .onnx_model import OnnxModel

_ALL_INPUTS = -1
# Ops that move elements unchanged -> the inputs that hold the elements.
_MOVED_INPUTS = {
    **dict.fromkeys(
        "Identity Reshape Flatten Squeeze Unsqueeze Transpose Gather GatherElements GatherND Slice Split Expand Tile "
        "Compress ArrayFeatureExtractor".split(),
        (0,),
    ),
    "Concat": (_ALL_INPUTS,),
    "Where": (1, 2),
}
_CODE_SAFE_OPS = frozenset({"Equal", "Shape", "Size"})  # same result for codes as for strings
_LABEL_ATTRIBUTES = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
_DEFAULT_STRING = "_Unused"  # ONNX's default result for a key that a table lacks


@dataclass(frozen=True)
class Strings:
    """Table and names that a caller needs to encode arguments and decode results."""

    table: list[str]  # all strings of the model; the code of a string is its index
    # Names of the inputs and outputs that are strings.
    inputs: list[str]
    outputs: list[str]


def with_coded_strings(model: OnnxModel) -> tuple[OnnxModel, Strings | None]:
    """The model with codes for strings, and the table; the same model object and None if it has no strings.

    Raises FrontendError, naming every node that computes with strings.
    """
    coder = _Coder()
    coder.read(model.proto.graph)
    if coder.problems:
        raise FrontendError(
            f"{model.source} computes with strings, which can only be moved, compared and looked up: "
            + "; ".join(coder.problems)
        )
    if not coder.is_needed:
        return model, None
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    strings = coder.write(proto.graph)
    return replace(model, proto=proto), strings


class _Coder:
    """Finds the string values of a graph and replaces the nodes that create or look them up."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._table: dict[str, int] = {}
        self._values: set[str] = set()
        self._tensors: dict[str, TensorProto] = {}
        self._replacements: dict[int, onnx.NodeProto] = {}

    @property
    def is_needed(self) -> bool:
        """True if the graph has any strings."""
        return bool(self._values or self._replacements)

    def read(self, graph: onnx.GraphProto) -> None:
        """Find values that are strings, in the order of the nodes."""
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.STRING:
                self._tensors[tensor.name] = self._coded_tensor(tensor)
                self._values.add(tensor.name)
        self._values.update(info.name for info in graph.input if _is_string(info))
        for index, node in enumerate(graph.node):
            replacement = self._replacement(node)
            if replacement is not None:
                self._replacements[index] = replacement

    def write(self, graph: onnx.GraphProto) -> Strings:
        """Write codes and replaced nodes into a copy of the graph."""
        for tensor in graph.initializer:
            if tensor.name in self._tensors:
                tensor.CopyFrom(self._tensors[tensor.name])
        for index, node in self._replacements.items():
            graph.node[index].CopyFrom(node)
        weights = {tensor.name for tensor in graph.initializer}
        inputs = [info.name for info in graph.input if info.name in self._values and info.name not in weights]
        outputs = [info.name for info in graph.output if info.name in self._values]
        for index in reversed(range(len(graph.input))):  # strings that are weights stay constants
            if graph.input[index].name in weights & self._values:
                del graph.input[index]
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.name in self._values:
                info.type.tensor_type.elem_type = TensorProto.INT64
        return Strings(list(self._table), inputs, outputs)

    def _code(self, text: str | bytes) -> int:
        return self._table.setdefault(text.decode() if isinstance(text, bytes) else text, len(self._table))

    def _codes(self, texts: Iterable[str | bytes]) -> list[int]:
        return [self._code(text) for text in texts]

    def _coded_tensor(self, tensor: TensorProto) -> TensorProto:
        codes = np.array(self._codes(tensor.string_data), "int64").reshape(tuple(tensor.dims))
        return numpy_helper.from_array(codes, tensor.name)

    def _refuse(self, node: onnx.NodeProto) -> None:
        self.problems.append(
            f"node {node.name or node.op_type!r}: {node.op_type} of domain {node.domain or 'ai.onnx'!r}"
        )

    def _replacement(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Replacement of a node, or None to keep it."""
        reads = [name in self._values for name in node.input]
        is_standard = node.domain in STANDARD_DOMAINS
        write = _WRITERS.get((CLASSICAL if node.domain == CLASSICAL else "", node.op_type))
        if write is not None and (is_standard or node.domain == CLASSICAL):
            replacement = onnx.NodeProto()
            replacement.CopyFrom(node)
            if write(self, replacement, any(reads)):
                return replacement
        if not any(reads):
            if any(name in self._values for name in _outer_reads(node)):
                self._refuse(node)
            return None
        if node.op_type in _MOVED_INPUTS:
            inputs = _MOVED_INPUTS[node.op_type]
            if any(reads if _ALL_INPUTS in inputs else (reads[index] for index in inputs)):
                self._values.update(node.output)
        elif node.op_type not in _CODE_SAFE_OPS or not is_standard:
            self._refuse(node)
        return None

    # Each writer changes a copy of a node and returns True if it changed anything.

    def constant(self, node: onnx.NodeProto, _: bool) -> bool:
        """Encode a constant of strings."""
        attribute = node.attribute[0] if node.attribute else onnx.AttributeProto()
        if attribute.name == "value" and attribute.t.data_type == TensorProto.STRING:
            tensor = self._coded_tensor(attribute.t)
        elif attribute.name == "value_string":
            tensor = numpy_helper.from_array(np.array(self._code(attribute.s), "int64"))
        elif attribute.name == "value_strings":
            tensor = numpy_helper.from_array(np.array(self._codes(attribute.strings), "int64"))
        else:
            return False
        _set_attribute(node, "value", tensor, *(other.name for other in node.attribute))
        self._values.update(node.output)
        return True

    def cast(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Replace a cast from string to string by Identity."""
        is_plain = reads and any(a.name == "to" and a.i == TensorProto.STRING for a in node.attribute)
        if is_plain:
            node.op_type = "Identity"
            del node.attribute[:]
            self._values.update(node.output)
        elif any(a.name == "to" and a.i == TensorProto.STRING for a in node.attribute):
            self._refuse(node)
        return is_plain

    def classifier(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Encode string labels."""
        labels = _attribute(node, "classlabels_strings")
        if reads or labels is None or not labels.strings:
            return False
        _set_attribute(node, _LABEL_ATTRIBUTES[node.op_type], self._codes(labels.strings), "classlabels_strings")
        self._values.add(node.output[0])
        return True

    def one_hot(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Encode string categories."""
        categories = _attribute(node, "cats_strings")
        if not reads or categories is None:
            return False
        _set_attribute(node, "cats_int64s", self._codes(categories.strings), "cats_strings")
        return True

    def ngrams(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Encode n-grams of words."""
        pool = _attribute(node, "pool_strings")
        if not reads or pool is None:
            return False
        _set_attribute(node, "pool_int64s", self._codes(pool.strings), "pool_strings")
        return True

    def category_mapper(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Encode a table between strings and numbers; the input's type gives the direction."""
        texts, numbers = _attribute(node, "cats_strings"), _attribute(node, "cats_int64s")
        if texts is None or numbers is None:
            return False
        return self._encode_table(
            node, reads, self._codes(texts.strings), list(numbers.ints), "cats_strings", "cats_int64s"
        )

    def label_encoder(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Encode string keys or values, in list or tensor attributes or the old form's `classes_strings`."""
        classes = _attribute(node, "classes_strings")
        if classes is not None:
            codes = self._codes(classes.strings)
            return self._encode_table(node, reads, codes, list(range(len(codes))), "classes_strings")
        is_changed = False
        for role in ("keys", "values"):
            texts, tensor = _attribute(node, f"{role}_strings"), _attribute(node, f"{role}_tensor")
            if texts is not None and texts.strings:
                codes = self._codes(texts.strings)
            elif tensor is not None and tensor.t.data_type == TensorProto.STRING:
                codes = self._codes(tensor.t.string_data)
            else:
                continue
            _set_attribute(node, f"{role}_int64s", codes, f"{role}_strings", f"{role}_tensor")
            is_changed = True
            if role == "values":
                self._set_default(node)
                self._values.update(node.output)
            elif not reads:
                self._refuse(node)
        return is_changed

    def _encode_table(
        self, node: onnx.NodeProto, reads: bool, codes: list[int], numbers: list[int], *attributes: str
    ) -> bool:
        """Make a LabelEncoder from codes to numbers, or from numbers to codes if the input is not a string."""
        node.op_type = "LabelEncoder"
        keys, values = (codes, numbers) if reads else (numbers, codes)
        _set_attribute(node, "keys_int64s", keys, *attributes)
        _set_attribute(node, "values_int64s", values)
        if not reads:
            self._set_default(node)
            self._values.update(node.output)
        return True

    def _set_default(self, node: onnx.NodeProto) -> None:
        text, tensor = _attribute(node, "default_string"), _attribute(node, "default_tensor")
        if tensor is not None and tensor.t.data_type == TensorProto.STRING:
            default: str | bytes = tensor.t.string_data[0]
        else:
            default = _DEFAULT_STRING if text is None else text.s
        _set_attribute(node, "default_int64", self._code(default), "default_string", "default_tensor", "default_int64")


_WRITERS: dict[tuple[str, str], Callable[[_Coder, onnx.NodeProto, bool], bool]] = {
    ("", "Constant"): _Coder.constant,
    ("", "Cast"): _Coder.cast,
    ("", "TfIdfVectorizer"): _Coder.ngrams,
    **{(CLASSICAL, op_type): _Coder.classifier for op_type in _LABEL_ATTRIBUTES},
    (CLASSICAL, "OneHotEncoder"): _Coder.one_hot,
    (CLASSICAL, "CategoryMapper"): _Coder.category_mapper,
    (CLASSICAL, "LabelEncoder"): _Coder.label_encoder,
}


def _is_string(info: onnx.ValueInfoProto) -> bool:
    return info.type.HasField("tensor_type") and info.type.tensor_type.elem_type == TensorProto.STRING


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _set_attribute(node: onnx.NodeProto, name: str, value: object, *removed: str) -> None:
    """Replace some of a node's attributes by one."""
    attributes = [attribute for attribute in node.attribute if attribute.name not in removed and attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*attributes, helper.make_attribute(name, value)])


def _outer_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that graphs inside a node read."""
    stack = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    while stack:
        for inner in stack.pop().node:
            yield from inner.input
            stack.extend(attribute.g for attribute in inner.attribute if attribute.HasField("g"))
