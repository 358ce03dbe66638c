"""Models that change strings: ops that split and change text run in Python, and the program takes their results.

A compiled program moves, compares and looks up strings, as numbers. Pipelines that scikit-learn trained on text begin
with ops that change them (`StringNormalizer`, `Tokenizer`); these and everything that they read are cut off::

    text -> Reshape -> StringNormalizer -> Tokenizer | -> TfIdfVectorizer -> LinearClassifier
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from relax_hetero.compat.graph import Graph, NodeArg
from relax_hetero.compat.values import text_of_type
from relax_hetero.errors import HeteroError
from relax_hetero.frontend.onnx.onnx_model import read_model

_MARKS = ("\x02", "\x03")  # tokens at both ends of a text with ``mark=1``
_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "ascii": "\\x00-\\x7f", "blank": " \\t", "digit": "0-9", "lower": "a-z",
    "punct": re.escape(string.punctuation), "space": "\\s", "upper": "A-Z", "word": "\\w", "xdigit": "0-9a-fA-F",
}  # fmt: skip
"""Character classes of POSIX (``[[:alpha:]]``), which `re` lacks."""


@lru_cache(maxsize=8192)
def _compiled(expression: str, dot: str, rest: int | None = None) -> re.Pattern[str]:
    """Translate an expression of RE2, which ONNX Runtime uses, for `re`: character classes are ASCII.

    `dot` is "s" if ``.`` matches line ends. With `rest`, fewer characters follow a match.
    """
    flags, body = re.fullmatch(r"(?:\(\?([ims]+)\))?(.*)", expression, re.DOTALL).groups("")  # type: ignore[union-attr]
    body = re.sub(r"\[:(\w+):\]", lambda match: _CLASSES[match[1]], body)
    end = "" if rest is None else rf"(?!(?s:.{{{rest}}}))"
    options = "".join(sorted({*flags, *dot}))
    return re.compile(f"(?{options}:{body}){end}", re.ASCII)


def _matches(expression: str, text: str, dot: str = "") -> Iterator[tuple[int, int]]:
    """Bounds of the matches that are not empty: the longest at each position, where `re` takes the first."""
    end = 0
    while (match := _compiled(expression, dot).search(text, end)) is not None:
        begin, end = match.span()
        while match is not None and "|" in expression and end < len(text):
            match = _compiled(expression, dot, len(text) - end).match(text, begin)
            end = end if match is None else match.end()
        if begin < end:
            yield begin, end
        elif end == len(text):
            return
        else:
            end += 1


def _split(text: str, separator: str) -> Iterator[str]:
    begin = 0
    for end, next_begin in _matches(separator, text):
        yield text[begin:end]
        begin = next_begin
    yield text[begin:]


def _lower(text: str) -> str:
    """Lower case, character by character, as ONNX Runtime changes it."""
    return "".join(character.lower()[0] for character in text)


def _upper(text: str) -> str:
    """Upper case; characters that become several stay."""
    return "".join(upper if len(upper := character.upper()) == 1 else character for character in text)


class StringNormalizer(OpRun):  # type: ignore[misc]
    """ONNX's op as ONNX Runtime computes it; the one of `onnx.reference` strips accents and sets the locale."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        case_change_action: str = "NONE",
        is_case_sensitive: int = 0,
        locale: str = "",
        stopwords: Sequence[str] | None = None,
    ) -> tuple[np.ndarray]:
        del locale  # Python's case mappings are Unicode's
        stops = set(stopwords or ()) if is_case_sensitive else set(map(_lower, stopwords or ()))
        changes: dict[str, Callable[[str], str]] = {"LOWER": _lower, "UPPER": _upper, "NONE": str}
        change = changes[case_change_action]
        texts = map(str, x.reshape(-1))
        changed = [change(text) for text in texts if (text if is_case_sensitive else _lower(text)) not in stops]
        return (np.array(changed or [""], object).reshape((1, -1) if x.ndim == 2 else (-1,)),)


class Tokenizer(OpRun):  # type: ignore[misc]
    """ONNX Runtime's op: tokens of each text, and padding up to the longest."""

    op_domain = "com.microsoft"

    def _run(self, x: np.ndarray, **_: Any) -> tuple[np.ndarray]:
        attribute = {a.name: helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        rows = [self._tokens(str(text), attribute) for text in x.reshape(-1)]
        if attribute.get("mark"):
            rows = [[_MARKS[0], *row, _MARKS[1]] for row in rows]
        width = max(map(len, rows), default=0)
        tokens = np.full((len(rows), width), attribute["pad_value"].decode(), object)
        for row, texts in zip(tokens, rows, strict=True):
            row[: len(texts)] = texts
        return (tokens.reshape((*x.shape, width)),)

    @staticmethod
    def _tokens(text: str, attribute: Mapping[str, Any]) -> list[str]:
        separators = [separator.decode() for separator in attribute.get("separators", ())]
        if "tokenexp" in attribute:
            tokens = [text[begin:end] for begin, end in _matches(attribute["tokenexp"].decode(), text, dot="s")]
        elif separators == [""]:
            tokens = list(text)
        else:
            tokens = [text]
            for separator in separators:
                tokens = [part for token in tokens for part in _split(token, separator)]
        return [token for token in tokens if len(token) >= max(1, attribute.get("mincharnum", 1))]


_OPS = (StringNormalizer, Tokenizer)
_TEXT_OPS = {(op.op_domain, op.__name__) for op in _OPS} | {("", "StringConcat"), ("", "StringSplit")}


class TextSteps:
    """The ops of a model that change strings, and what they read."""

    def __init__(
        self,
        model: onnx.ModelProto,  # model of these ops, whose outputs the program takes
        passed: set[str],  # inputs of the session that the program takes, too
    ) -> None:
        self._evaluator = ReferenceEvaluator(model, new_ops=list(_OPS))
        self._inputs = [info.name for info in model.graph.input]
        self._outputs = [info.name for info in model.graph.output]
        self._passed = passed
        self._ops = ", ".join(dict.fromkeys(node.op_type for node in model.graph.node))

    def __call__(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the program for the arguments of a session."""
        arrays = {name: np.asarray(feed[name]) for name in self._inputs if name in feed}
        try:
            results = self._evaluator.run(None, arrays)
        except Exception as error:  # onnx.reference raises exceptions of any class
            raise HeteroError(f"the ops that change strings ({self._ops}) fail: {error!r}") from error
        passed = {name: value for name, value in feed.items() if name in self._passed}
        return {**passed, **dict(zip(self._outputs, results, strict=True))}


def without_text_steps(graph: Graph) -> tuple[Graph, TextSteps | None]:
    """The model without ops that change strings, and these; the same graph and None if it has none."""
    proto, _, path, _ = read_model(graph.source)
    nodes = list(proto.graph.node)
    text_nodes = [node for node in nodes if (node.domain, node.op_type) in _TEXT_OPS]
    if not text_nodes:
        return graph, None
    if path is not None:
        onnx.load_external_data_for_model(proto, str(Path(path).parent))
    makers = {name: node for node in nodes for name in node.output}
    steps: dict[int, onnx.NodeProto] = {}
    pending = list(text_nodes)
    while pending:
        node = pending.pop()
        if id(node) not in steps:
            steps[id(node)] = node
            pending += [makers[name] for name in _reads(node) if name in makers]
    first = [node for node in nodes if id(node) in steps]
    rest = [node for node in nodes if id(node) not in steps]
    for info in proto.graph.output:  # a result of these ops passes through the program
        if any(info.name in node.output for node in first):
            first.append(helper.make_node("Identity", [info.name], [f"{info.name}_text"]))
            rest.insert(0, helper.make_node("Identity", [f"{info.name}_text"], [info.name]))
    text_results = {name for node in first for name in node.output} - {name for node in rest for name in node.output}
    weights = {tensor.name for tensor in proto.graph.initializer}
    read_first, read = ({name for node in nodes for name in _reads(node)} for nodes in (first, rest))
    inputs = [info for info in proto.graph.input if info.name in read_first]
    outputs = [onnx.ValueInfoProto(name=name) for name in sorted(text_results & read)]
    model = _model(proto, first, inputs, outputs, read_first)
    text_steps = TextSteps(model, read)
    try:
        values = text_steps(_samples([info for info in inputs if info.name not in weights]))
    except HeteroError:  # perhaps only for texts of one letter
        values = _inferred(model)
        if not text_results & read <= values.keys():
            raise
    infos = [_info(output.name, values[output.name]) for output in outputs]
    remaining = [info for info in proto.graph.input if info.name in read]
    program = _model(proto, rest, [*remaining, *infos], proto.graph.output, read)
    arguments = [arg for arg in graph.inputs if arg.name in read]
    arguments += [NodeArg(info.name, text_of_type(info.type), [None] * values[info.name].ndim) for info in infos]
    return replace(graph, source=program, inputs=arguments), text_steps


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node and the graphs inside it read."""
    graphs = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return [*node.input, *(name for graph in graphs for inner in graph.node for name in _reads(inner))]


def _model(proto: onnx.ModelProto, nodes: Any, inputs: Any, outputs: Any, constants: set[str]) -> onnx.ModelProto:
    """A model of some nodes of another, with its constants of some names."""
    tensors = [tensor for tensor in proto.graph.initializer if tensor.name in constants]
    sparse = [tensor for tensor in proto.graph.sparse_initializer if tensor.values.name in constants]
    graph = helper.make_graph(nodes, proto.graph.name, inputs, outputs, tensors, sparse_initializer=sparse)
    model = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    model.functions.extend(proto.functions)
    return model


def _samples(inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, np.ndarray]:
    """Arguments of one element along symbolic dimensions, whose results have the types and ranks of all."""
    samples = {}
    for info in inputs:
        kind = info.type.tensor_type
        dtype = object if kind.elem_type == TensorProto.STRING else helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [dim.dim_value or 1 for dim in kind.shape.dim]
        samples[info.name] = np.full(shape, "a" if dtype is object else 1, dtype)
    return samples


def _inferred(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Arrays without elements, of the outputs whose type and rank `onnx` infers."""
    arrays = {}
    for info in onnx.shape_inference.infer_shapes(model).graph.output:
        kind = info.type.tensor_type
        if kind.elem_type and kind.HasField("shape"):
            dtype = object if kind.elem_type == TensorProto.STRING else helper.tensor_dtype_to_np_dtype(kind.elem_type)
            arrays[info.name] = np.empty([0] * len(kind.shape.dim), dtype)
    return arrays


def _info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    is_text = value.dtype.kind in "OUS"
    kind = TensorProto.STRING if is_text else helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(value.ndim)])
