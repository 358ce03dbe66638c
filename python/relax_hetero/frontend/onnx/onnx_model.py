"""Reading an ONNX model from a file, bytes or a ModelProto: parsing, checks, and topological order of nodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from ...artifact.file_hints import describe_value, hint_of, near_file
from ...artifact.regular_files import read_regular
from ...errors import FrontendError, HeteroError
from ..import_limits import Budget, ImportLimits
from ..ops.node import STANDARD_DOMAINS
from .check_model import all_tensors, check_by_onnx, check_form, check_size
from .external_data import ExternalData, is_external
from .node_names import subgraphs_of
from .onnx_constants import Tensors


def in_order(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Sort the nodes of graphs, subgraphs and functions topologically.

    ONNX requires that order, but ONNX Runtime takes any order without cycles. `proto`: a model that passed
    `check_model.check_form`, and is not changed. Returns the model itself if it is in order, else a copy. Independent
    nodes keep their order. Raises FrontendError, which names the nodes, if a value that one reads has no producer, or
    they form a cycle.
    """
    if not _NodeOrder(proto, source).unsorted:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for nodes, order in _NodeOrder(copy, source).unsorted:
        positions = {index: position for position, index in enumerate(order)}
        indices = iter(range(len(order)))
        nodes.sort(key=lambda _, positions=positions, indices=indices: positions[next(indices)])
    return copy


class _NodeOrder:
    """Orders of the node lists of a model.

    `unsorted`: each list that is out of order, and the sorted indices of its nodes, inner lists first.
    """

    def __init__(self, proto: onnx.ModelProto, source: str) -> None:
        self.unsorted: list[tuple[Any, list[int]]] = []
        self._source = source
        self._graph(proto.graph, ())
        for function in proto.functions:
            self._nodes(function.node, set(function.input), ())

    def _graph(self, graph: onnx.GraphProto, outer_scopes: Sequence[Set[str]]) -> set[str]:
        """Visit a graph nested in scopes, and return the names that it reads from them."""
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        return self._nodes(graph.node, own, outer_scopes, {value.name for value in graph.output})

    def _nodes(
        self, nodes: Any, own: set[str], outer_scopes: Sequence[Set[str]], outputs: Set[str] = frozenset()
    ) -> set[str]:
        makers: dict[str, int] = {}
        for index, node in enumerate(nodes):
            for name in filter(None, node.output):
                makers.setdefault(name, index)
        outer_names, scopes = (own, *outer_scopes), (own, makers.keys(), *outer_scopes)
        every_read = set(outputs)
        dependencies: list[set[int]] = []
        for index, node in enumerate(nodes):
            read = set(filter(None, node.input))
            for position, name in enumerate(node.input):
                if name and not any(name in scope for scope in scopes):
                    raise FrontendError(
                        f"{self._source}: input {position} of node {_node_title(node, index)}, {name!r}, has no "
                        "producer: no input, initializer or node makes it"
                    )
            for _, graph in subgraphs_of(node):
                read |= self._graph(graph, scopes)
            # A name of an outer scope is not a dependency on a later node that redefines it.
            dependencies.append(
                {
                    makers[name]
                    for name in read & makers.keys()
                    if makers[name] < index or not any(name in scope for scope in outer_names)
                }
            )
            every_read |= read
        if any(max(earlier, default=-1) >= index for index, earlier in enumerate(dependencies)):
            self.unsorted.append((nodes, self._topological_order(nodes, dependencies)))
        return every_read - own - makers.keys()

    def _topological_order(self, nodes: Any, dependencies: Sequence[Set[int]]) -> list[int]:
        pending = [len(earlier) for earlier in dependencies]
        readers: list[list[int]] = [[] for _ in dependencies]
        for index, earlier in enumerate(dependencies):
            for maker in earlier:
                readers[maker].append(index)
        ready = [index for index, count in enumerate(pending) if count == 0]
        heapify(ready)
        order = []
        while ready:
            order.append(heappop(ready))
            for reader in readers[order[-1]]:
                pending[reader] -= 1
                if pending[reader] == 0:
                    heappush(ready, reader)
        if len(order) < len(dependencies):
            cycle = ", ".join(_node_title(nodes[index], index) for index in _cycle(dependencies, set(order)))
            raise FrontendError(
                f"{self._source}: a cycle of nodes, each reading an output of the next one and the last one an output "
                f"of the first: {cycle}"
            )
        return order


def _cycle(dependencies: Sequence[Set[int]], done: Set[int]) -> list[int]:
    """Indices of nodes that form a cycle: each depends on the next, the last on the first."""
    path = [next(index for index in range(len(dependencies)) if index not in done)]
    positions = {path[0]: 0}
    while True:
        next_node = min(dependencies[path[-1]] - done)
        if next_node in positions:
            return path[positions[next_node] :]
        positions[next_node] = len(path)
        path.append(next_node)


def _node_title(node: onnx.NodeProto, index: int) -> str:
    return f"{node.name or f'{node.op_type}_{index}'!r} ({node.op_type})"


ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"  # forms of a model that users may pass

_ORT_FORMAT = b"ORTM"  # identifier of ONNX Runtime's ORT format, at byte 4

_MAX_FILE_BYTES = 2**31  # limit of protobuf


@dataclass(frozen=True)
class OnnxModel:
    """A checked model."""

    proto: onnx.ModelProto  # Model with sorted nodes. Read-only: it may be the user's own object.
    source: str  # name in messages: the file, or "the model"
    opset: int  # version of the standard operator set
    tensors: Tensors  # reader of its tensors, including external data
    limits: ImportLimits
    nbytes: int  # bytes of the model and its external data, without holes of sparse files


def load_model(model: ModelSource, limits: ImportLimits | None = None) -> OnnxModel:
    """Read and check a model.

    `model`: a file (external data is in its folder), the bytes of a file, or a model in memory that contains its data;
    `limits`: limits of the import. Raises FrontendError if the file (or one with external data) is missing or not an
    ONNX model, or the model is not valid or exceeds `limits`.
    """
    limits = ImportLimits() if limits is None else limits
    if not isinstance(limits, ImportLimits):
        raise FrontendError(f"limits is {limits!r}, expected an ImportLimits")
    proto, source, path, nbytes = read_model(model)
    external = ExternalData(source, path)
    with errors_of(source):
        check_form(proto, source)
        proto = in_order(proto, source)
        check_by_onnx(proto, source)
        check_size(proto, source, Budget(limits))
        nbytes += _check_external(proto, external, Budget(limits, nbytes))
    return OnnxModel(proto, source, opset_in(proto.opset_import), Tensors(external), limits, nbytes)


@contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Convert every error inside to a `HeteroError`; the text of an unexpected one names the model.

    Text that is not UTF-8 fails where it is first read, and invalid forms that pass the checks fail anywhere.
    """
    try:
        yield
    except HeteroError:
        raise
    except Exception as error:
        raise FrontendError(f"{source} cannot be imported: {type(error).__name__}: {_first_line(error)}") from error


def _check_external(proto: onnx.ModelProto, external: ExternalData, budget: Budget) -> int:
    """Check the files of all external data and return their bytes.

    Attributes other than that of `Constant` get their data here, because converters read them; they are small.
    """
    nbytes = 0
    for what, tensor in all_tensors(proto):
        if is_external(tensor):
            data = external.bytes_of(tensor, what)
            nbytes += data.nbytes
            if what.startswith("attribute") and not what.startswith("attribute 'value' of Constant '"):
                budget.take_bytes(2 * data.nbytes, what)
                tensor.raw_data = data.tobytes()
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
    return min(nbytes, external.written_bytes)


def opset_in(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """Version of the standard operator set among these imports, or the newest version if it is not imported."""
    newest = onnx.defs.onnx_opset_version()
    return next((int(entry.version) for entry in imports if entry.domain in STANDARD_DOMAINS), newest)


def read_model(model: ModelSource) -> tuple[onnx.ModelProto, str, Path | None, int]:
    """Read a model without checks; return it with its name for messages, its file and its number of bytes.

    Raises FrontendError if the file is missing, special, or not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        return model, "the model", None, _bytes_in_memory(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        data = bytes(model)
        return _parse(data, "the model's bytes"), "the model", None, len(data)
    if not isinstance(model, (str, os.PathLike)):
        expected = "expected a path, the bytes of an ONNX file or an onnx.ModelProto"
        raise FrontendError(f"rh.from_onnx: {describe_value(model, 'rh.from_onnx')}; {expected}")
    path = Path(os.fsdecode(model))
    try:
        data = read_regular(path, _MAX_FILE_BYTES)
    except OSError as error:
        hint, reason = hint_of(path, "rh.from_onnx"), error.strerror or str(error)
        if error.errno == errno.EFBIG and hint:  # its kind explains more than its size
            reason, hint = f"it is {hint.removeprefix(', ')}", ""
        elif error.errno == errno.EFBIG:
            hint = "; save it with its weights as external data"
        raise FrontendError(f"cannot read the ONNX file {str(path)!r}: {reason}{hint}{near_file(path)}") from error
    return _parse(data, f"the file {str(path)!r}", hint_of(path, "rh.from_onnx")), str(path), path, len(data)


def _bytes_in_memory(proto: onnx.ModelProto) -> int:
    """Approximate bytes of a model. Protobuf would serialize it to count them, and cannot do so beyond 2 GiB."""
    if not proto.HasField("graph"):
        return 0
    return sum(_tensor_bytes(tensor) for _, tensor in all_tensors(proto))


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    narrow = len(tensor.float_data) + len(tensor.int32_data)
    wide = len(tensor.int64_data) + len(tensor.double_data) + len(tensor.uint64_data)
    return len(tensor.raw_data) + 4 * narrow + 8 * wide


def _parse(data: bytes, what: str, hint: str = "") -> onnx.ModelProto:
    if data[4:8] == _ORT_FORMAT:
        raise FrontendError(
            f"{what} is in ONNX Runtime's ORT format, which only ONNX Runtime reads: give the ONNX file that it was "
            "converted from"
        )
    if not data:
        raise FrontendError(f"{what} is not an ONNX model: it is empty")
    try:
        proto = onnx.load_model_from_string(data)
    except Exception as error:  # depends on the version of protobuf
        reason = f"it is {hint.removeprefix(', ')}" if hint else _first_line(error)
        raise FrontendError(f"{what} is not an ONNX model: {reason}") from error
    if not proto.HasField("graph"):
        raise FrontendError(f"{what} is not an ONNX model: it has no graph ({len(data)} bytes)")
    return proto


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
