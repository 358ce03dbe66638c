"""Reading an ONNX model: from a file, bytes or a ModelProto, with everything a Relax import needs checked first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import onnx
from onnx import external_data_helper

from ...errors import FrontendError

ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"
"""A model as users may give it."""

STANDARD_DOMAINS = ("", "ai.onnx")
"""Domains of operators whose name means "the ONNX standard"."""

# The checker wants a shape on every graph output; models without one are common, and nothing here reads it.
_HARMLESS_CHECK = "Field 'shape' of 'type' is required but missing"


@dataclass(frozen=True)
class OnnxModel:
    """A checked model with its weights loaded.

    Attributes
    ----------
    proto: The user's own object if that is what was given: read-only.
    source: What messages call it: the file, or "the model".
    opset: Version of the standard operator set.
    """

    proto: onnx.ModelProto
    source: str
    opset: int


def load_model(model: ModelSource) -> OnnxModel:
    """Read and check a model.

    Parameters
    ----------
    model: A file, whose external data lies relative to it; the bytes of one; or a model in memory, with its data in it.

    Raises
    ------
    FrontendError: If the file (or one with external data) is missing or no ONNX model, or the model is not valid.
    """
    proto, source, path = _read(model)
    _check(proto, source, path)
    _load_external_data(proto, source, path)
    return OnnxModel(proto, source, opset_in(proto.opset_import))


def opset_in(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """Version of the standard operator set among these imports; 1 where they do not name it."""
    return next((int(entry.version) for entry in imports if entry.domain in STANDARD_DOMAINS), 1)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those nested in its nodes' attributes, outer ones first."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from all_graphs(inner)


def _read(model: ModelSource) -> tuple[onnx.ModelProto, str, Path | None]:
    if isinstance(model, onnx.ModelProto):
        return model, "the model", None
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(bytes(model), "the model's bytes"), "the model", None
    if not isinstance(model, (str, os.PathLike)):
        raise FrontendError(
            f"a model is a path, the bytes of an ONNX file or an onnx.ModelProto, got {type(model).__name__}"
        )
    path = Path(os.fspath(model))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FrontendError(f"cannot read the ONNX file {str(path)!r}: {error.strerror or error}") from error
    return _parse(data, f"the file {str(path)!r}"), str(path), path


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    try:
        proto = onnx.load_model_from_string(data)
    except Exception as error:  # whatever protobuf raises in this version
        raise FrontendError(f"{what} is not an ONNX model: {_first_line(error)}") from error
    if not proto.HasField("graph"):
        raise FrontendError(f"{what} is not an ONNX model: it has no graph ({len(data)} bytes)")
    return proto


def _check(proto: onnx.ModelProto, source: str, path: Path | None) -> None:
    if not proto.HasField("graph"):
        raise FrontendError(f"{source} has no graph")
    if proto.ir_version < 3:
        raise FrontendError(f"{source} has IR version {proto.ir_version}; expected 3 (ONNX 1.1) or later")
    if not proto.opset_import:
        raise FrontendError(f"{source} imports no operator set; a model of IR version {proto.ir_version} has to")
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in STANDARD_DOMAINS and entry.version > newest:
            raise FrontendError(f"{source} is of opset {entry.version}; the installed onnx knows those up to {newest}")
    _check_external_files(proto, source, path)
    try:
        # By path where there is one: a model in memory is serialised again, which fails past 2 GB.
        onnx.checker.check_model(proto if path is None else str(path))
    except Exception as error:  # the checker's own errors, and those of protobuf and C++
        if _HARMLESS_CHECK not in str(error):
            raise FrontendError(f"{source} is not a valid ONNX model: {_checker_message(error)}") from error


def _external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in all_graphs(proto.graph):
        for tensor in graph.initializer:
            if external_data_helper.uses_external_data(tensor):
                yield tensor
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t") and external_data_helper.uses_external_data(attribute.t):
                    yield attribute.t


def _check_external_files(proto: onnx.ModelProto, source: str, path: Path | None) -> None:
    for tensor in _external_tensors(proto):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if path is None:
            raise FrontendError(
                f"initializer {tensor.name!r} is in the external file {location!r}, and a model in memory does not say "
                "where that is: give the model's path"
            )
        if not (path.parent / location).is_file():
            raise FrontendError(
                f"{source}: the external file {location!r} of initializer {tensor.name!r} is missing; "
                f"expected it in {str(path.parent)!r}"
            )


def _load_external_data(proto: onnx.ModelProto, source: str, path: Path | None) -> None:
    if path is None:
        return
    for tensor in _external_tensors(proto):
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            raise FrontendError(
                f"{source}: the external data of initializer {tensor.name!r} cannot be read: {_first_line(error)}"
            ) from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _checker_message(error: Exception) -> str:
    """The checker's finding without the dump of the node that follows it."""
    text = str(error).strip()
    parts = [line for line in text.splitlines() if line.strip() and not line.startswith("==>")]
    context = next((line.removeprefix("==> Context: ") for line in text.splitlines() if line.startswith("==>")), "")
    return "; ".join(filter(None, [" ".join(parts[:2]), context]))[:500]


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
