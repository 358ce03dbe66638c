"""Strings as numbers: a model of strings becomes one of int64 codes, with a table of all strings that it knows.

Tensors of strings are only moved, compared and looked up in tables, which codes can be, too. Initializers, constants
and the strings of attributes are replaced by their places in the table; the virtual machine encodes arguments and
decodes results, and gives strings that the table lacks codes of their own in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...errors import FrontendError
from ..ops.table import CLASSICAL
from .check_model import STANDARD_DOMAINS
from .model import OnnxModel

_ALL = -1
# Ops that move elements as they are, and the inputs that hold them.
_MOVES = {
    **dict.fromkeys(
        "Identity Reshape Flatten Squeeze Unsqueeze Transpose Gather GatherElements GatherND Slice Split Expand Tile "
        "Compress ArrayFeatureExtractor".split(),
        (0,),
    ),
    "Concat": (_ALL,),
    "Where": (1, 2),
}
_LOOKS = frozenset({"Equal", "Shape", "Size"})
_LABELS = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
_DEFAULT = "_Unused"
"""Default that ONNX has in the place of strings that tables lack."""


@dataclass(frozen=True)
class Strings:
    """Facts that the caller of a function of coded strings has to know.

    Attributes
    ----------
    table : list of str
        All strings of the model; their places are the codes.
    inputs, outputs : list of str
        Names of those that are strings.
    """

    table: list[str]
    inputs: list[str]
    outputs: list[str]


def with_coded_strings(model: OnnxModel) -> tuple[OnnxModel, Strings | None]:
    """The model with numbers for strings, and the table; the very model and None where it has no strings.

    Raises
    ------
    FrontendError
        Naming every node that computes with strings.
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
    found = coder.write(proto.graph)
    return replace(model, proto=proto), found


class _Coder:
    """Finds the strings of a graph, and what its nodes become."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._table: dict[str, int] = {}
        self._values: set[str] = set()
        self._tensors: dict[str, TensorProto] = {}
        self._nodes: dict[int, onnx.NodeProto] = {}

    @property
    def is_needed(self) -> bool:
        """True if the graph has any strings."""
        return bool(self._values or self._nodes)

    def read(self, graph: onnx.GraphProto) -> None:
        """Find values that are strings, in the order of the nodes."""
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.STRING:
                self._tensors[tensor.name] = self._coded_tensor(tensor)
                self._values.add(tensor.name)
        self._values.update(info.name for info in graph.input if _is_string(info))
        for index, node in enumerate(graph.node):
            changed = self._node(node)
            if changed is not None:
                self._nodes[index] = changed

    def write(self, graph: onnx.GraphProto) -> Strings:
        """Put what was found into a copy of the graph."""
        for tensor in graph.initializer:
            if tensor.name in self._tensors:
                tensor.CopyFrom(self._tensors[tensor.name])
        for index, node in self._nodes.items():
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

    def _node(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Replacement of a node; None where it stays."""
        reads = [name in self._values for name in node.input]
        is_standard = node.domain in STANDARD_DOMAINS
        write = _WRITERS.get((CLASSICAL if node.domain == CLASSICAL else "", node.op_type))
        if write is not None and (is_standard or node.domain == CLASSICAL):
            changed = onnx.NodeProto()
            changed.CopyFrom(node)
            if write(self, changed, any(reads)):
                return changed
        if not any(reads):
            if any(name in self._values for name in _outer_reads(node)):
                self._refuse(node)
            return None
        if node.op_type in _MOVES:
            places = _MOVES[node.op_type]
            if any(reads if _ALL in places else (reads[place] for place in places)):
                self._values.update(node.output)
        elif node.op_type not in _LOOKS or not is_standard:
            self._refuse(node)
        return None

    # Each of these changes a copy of a node, and says whether it did.

    def constant(self, node: onnx.NodeProto, _: bool) -> bool:
        """A constant of strings."""
        attribute = node.attribute[0] if node.attribute else onnx.AttributeProto()
        if attribute.name == "value" and attribute.t.data_type == TensorProto.STRING:
            tensor = self._coded_tensor(attribute.t)
        elif attribute.name == "value_string":
            tensor = numpy_helper.from_array(np.array(self._code(attribute.s), "int64"))
        elif attribute.name == "value_strings":
            tensor = numpy_helper.from_array(np.array(self._codes(attribute.strings), "int64"))
        else:
            return False
        _set(node, "value", tensor, *(other.name for other in node.attribute))
        self._values.update(node.output)
        return True

    def cast(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Strings to strings."""
        is_plain = reads and any(a.name == "to" and a.i == TensorProto.STRING for a in node.attribute)
        if is_plain:
            node.op_type = "Identity"
            del node.attribute[:]
            self._values.update(node.output)
        elif any(a.name == "to" and a.i == TensorProto.STRING for a in node.attribute):
            self._refuse(node)
        return is_plain

    def classifier(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Labels that are strings."""
        labels = _attribute(node, "classlabels_strings")
        if reads or labels is None or not labels.strings:
            return False
        _set(node, _LABELS[node.op_type], self._codes(labels.strings), "classlabels_strings")
        self._values.add(node.output[0])
        return True

    def one_hot(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Categories that are strings."""
        categories = _attribute(node, "cats_strings")
        if not reads or categories is None:
            return False
        _set(node, "cats_int64s", self._codes(categories.strings), "cats_strings")
        return True

    def ngrams(self, node: onnx.NodeProto, reads: bool) -> bool:
        """N-grams of words."""
        pool = _attribute(node, "pool_strings")
        if not reads or pool is None:
            return False
        _set(node, "pool_int64s", self._codes(pool.strings), "pool_strings")
        return True

    def category_mapper(self, node: onnx.NodeProto, reads: bool) -> bool:
        """A table of strings and numbers, in the direction that the input says."""
        texts, numbers = _attribute(node, "cats_strings"), _attribute(node, "cats_int64s")
        if texts is None or numbers is None:
            return False
        return self._table_of(
            node, reads, self._codes(texts.strings), list(numbers.ints), "cats_strings", "cats_int64s"
        )

    def label_encoder(self, node: onnx.NodeProto, reads: bool) -> bool:
        """Keys or values that are strings: attributes of lists, of tensors, or in the first form the classes."""
        classes = _attribute(node, "classes_strings")
        if classes is not None:
            codes = self._codes(classes.strings)
            return self._table_of(node, reads, codes, list(range(len(codes))), "classes_strings")
        is_changed = False
        for side in ("keys", "values"):
            texts, tensor = _attribute(node, f"{side}_strings"), _attribute(node, f"{side}_tensor")
            if texts is not None and texts.strings:
                codes = self._codes(texts.strings)
            elif tensor is not None and tensor.t.data_type == TensorProto.STRING:
                codes = self._codes(tensor.t.string_data)
            else:
                continue
            _set(node, f"{side}_int64s", codes, f"{side}_strings", f"{side}_tensor")
            is_changed = True
            if side == "values":
                self._set_default(node)
                self._values.update(node.output)
            elif not reads:
                self._refuse(node)
        return is_changed

    def _table_of(
        self, node: onnx.NodeProto, reads: bool, codes: list[int], numbers: list[int], *attributes: str
    ) -> bool:
        """A LabelEncoder from codes to numbers, or the other way where the input is no string."""
        node.op_type = "LabelEncoder"
        keys, values = (codes, numbers) if reads else (numbers, codes)
        _set(node, "keys_int64s", keys, *attributes)
        _set(node, "values_int64s", values)
        if not reads:
            self._set_default(node)
            self._values.update(node.output)
        return True

    def _set_default(self, node: onnx.NodeProto) -> None:
        text, tensor = _attribute(node, "default_string"), _attribute(node, "default_tensor")
        if tensor is not None and tensor.t.data_type == TensorProto.STRING:
            default: str | bytes = tensor.t.string_data[0]
        else:
            default = _DEFAULT if text is None else text.s
        _set(node, "default_int64", self._code(default), "default_string", "default_tensor", "default_int64")


_WRITERS: dict[tuple[str, str], Callable[[_Coder, onnx.NodeProto, bool], bool]] = {
    ("", "Constant"): _Coder.constant,
    ("", "Cast"): _Coder.cast,
    ("", "TfIdfVectorizer"): _Coder.ngrams,
    **{(CLASSICAL, op_type): _Coder.classifier for op_type in _LABELS},
    (CLASSICAL, "OneHotEncoder"): _Coder.one_hot,
    (CLASSICAL, "CategoryMapper"): _Coder.category_mapper,
    (CLASSICAL, "LabelEncoder"): _Coder.label_encoder,
}


def _is_string(info: onnx.ValueInfoProto) -> bool:
    return info.type.HasField("tensor_type") and info.type.tensor_type.elem_type == TensorProto.STRING


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _set(node: onnx.NodeProto, name: str, value: object, *removed: str) -> None:
    """Give a node an attribute in the place of others."""
    kept = [attribute for attribute in node.attribute if attribute.name not in removed and attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _outer_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that graphs inside a node read."""
    waiting = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    while waiting:
        for inner in waiting.pop().node:
            yield from inner.input
            waiting.extend(attribute.g for attribute in inner.attribute if attribute.HasField("g"))
