"""Reading an ONNX model: from a file, bytes or a ModelProto, with everything a Relax import needs checked first."""

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
from .check_model import STANDARD_DOMAINS, all_tensors, check_by_onnx, check_form, check_size
from .constants import Tensors
from .external_data import ExternalData, is_external
from .node_names import subgraphs_of

# The order of nodes: ONNX wants values made before they are read; ONNX Runtime takes any order that has no cycle.


def in_order(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """A model with every node after those that it reads from, in subgraphs and functions too.

    Parameters
    ----------
    proto : onnx.ModelProto
        A model, not written to, that `check_model.check_form` has passed.

    Returns
    -------
    onnx.ModelProto
        The model itself where its order is right, else a copy; nodes that do not wait for others keep their order.

    Raises
    ------
    FrontendError
        If nothing makes what a node reads, or nodes wait for each other; names them.
    """
    if not _Lists(proto, source).unsorted:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for nodes, order in _Lists(copy, source).unsorted:
        rank = {index: place for place, index in enumerate(order)}
        indices = iter(range(len(order)))
        nodes.sort(key=lambda _, rank=rank, indices=indices: rank[next(indices)])
    return copy


class _Lists:
    """The lists of nodes of a model.

    Attributes
    ----------
    unsorted : list of (object, list of int)
        Each list that is out of order, and the indices of its nodes in order; inner lists first.
    """

    def __init__(self, proto: onnx.ModelProto, source: str) -> None:
        self.unsorted: list[tuple[Any, list[int]]] = []
        self._source = source
        self._graph(proto.graph, ())
        for function in proto.functions:
            self._nodes(function.node, set(function.input), ())

    def _graph(self, graph: onnx.GraphProto, around: Sequence[Set[str]]) -> set[str]:
        """Look at a graph inside of scopes, and return the names that it reads from them."""
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        return self._nodes(graph.node, own, around, {value.name for value in graph.output})

    def _nodes(
        self, nodes: Any, own: set[str], around: Sequence[Set[str]], outputs: Set[str] = frozenset()
    ) -> set[str]:
        makers: dict[str, int] = {}
        for index, node in enumerate(nodes):
            for name in filter(None, node.output):
                makers.setdefault(name, index)
        given, scopes = (own, *around), (own, makers.keys(), *around)
        every_read = set(outputs)
        waits: list[set[int]] = []
        for index, node in enumerate(nodes):
            read = set(filter(None, node.input))
            for position, name in enumerate(node.input):
                if name and not any(name in scope for scope in scopes):
                    raise FrontendError(
                        f"{self._source}: input {position} of node {_title(node, index)}, {name!r}, has no producer: "
                        "no input, initializer or node makes it"
                    )
            for _, graph in subgraphs_of(node):
                read |= self._graph(graph, scopes)
            # A later node's value of a name that is known around is another one.
            waits.append(
                {
                    makers[name]
                    for name in read & makers.keys()
                    if makers[name] < index or not any(name in scope for scope in given)
                }
            )
            every_read |= read
        if any(max(before, default=-1) >= index for index, before in enumerate(waits)):
            self.unsorted.append((nodes, self._sorted(nodes, waits)))
        return every_read - own - makers.keys()

    def _sorted(self, nodes: Any, waits: Sequence[Set[int]]) -> list[int]:
        missing = [len(before) for before in waits]
        readers: list[list[int]] = [[] for _ in waits]
        for index, before in enumerate(waits):
            for maker in before:
                readers[maker].append(index)
        ready = [index for index, count in enumerate(missing) if count == 0]
        heapify(ready)
        order = []
        while ready:
            order.append(heappop(ready))
            for reader in readers[order[-1]]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heappush(ready, reader)
        if len(order) < len(waits):
            cycle = ", ".join(_title(nodes[index], index) for index in _cycle(waits, set(order)))
            raise FrontendError(
                f"{self._source}: a cycle of nodes, of which each reads what the next one makes, and the last what the "
                f"first one makes: {cycle}"
            )
        return order


def _cycle(waits: Sequence[Set[int]], sorted_ones: Set[int]) -> list[int]:
    """Nodes each of which waits for the next, the last for the first."""
    path = [next(index for index in range(len(waits)) if index not in sorted_ones)]
    places = {path[0]: 0}
    while True:
        following = min(waits[path[-1]] - sorted_ones)
        if following in places:
            return path[places[following] :]
        places[following] = len(path)
        path.append(following)


def _title(node: onnx.NodeProto, index: int) -> str:
    return f"{node.name or f'{node.op_type}_{index}'!r} ({node.op_type})"


ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"
"""A model as users may give it."""

# The identifier of ONNX Runtime's files for phones, behind the first offset.
_ORT_FORMAT = b"ORTM"

# Protobuf reads no more.
_MAX_FILE_BYTES = 2**31


@dataclass(frozen=True)
class OnnxModel:
    """A checked model.

    Attributes
    ----------
    proto : onnx.ModelProto
        With its nodes in order; the user's own object if that is what was given and in order: read-only.
    source : str
        Name in messages: the file, or "the model".
    opset : int
        Version of the standard operator set.
    tensors : Tensors
        Reads its tensors, those with external data too.
    limits : ImportLimits
        The most that it may become.
    nbytes : int
        Bytes of the model and its external data, as far as they are written.
    """

    proto: onnx.ModelProto
    source: str
    opset: int
    tensors: Tensors
    limits: ImportLimits
    nbytes: int


def load_model(model: ModelSource, limits: ImportLimits | None = None) -> OnnxModel:
    """Read and check a model.

    Parameters
    ----------
    model : ModelSource
        A file, whose external data lies in its folder; the bytes of one; or a model in memory, with its data in it.
    limits : ImportLimits, optional
        The most that it may become.

    Raises
    ------
    FrontendError
        If the file (or one with external data) is missing or no ONNX model, the model is not valid, or becomes more
        than `limits` say.
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
    """Within, every error becomes a `HeteroError`; one that nobody foresaw names the model.

    Text that is no UTF-8 fails wherever it is first read, and forms that the checks let pass anywhere.
    """
    try:
        yield
    except HeteroError:
        raise
    except Exception as error:
        raise FrontendError(f"{source} cannot be imported: {type(error).__name__}: {_first_line(error)}") from error


def _check_external(proto: onnx.ModelProto, external: ExternalData, budget: Budget) -> int:
    """Check the files of all external data and return the bytes that they hold.

    Attributes get their data here, as converters read them; but for `Constant`, they are small.
    """
    needed = 0
    for what, tensor in all_tensors(proto):
        if is_external(tensor):
            data = external.bytes_of(tensor, what)
            needed += data.nbytes
            if what.startswith("attribute") and not what.startswith("attribute 'value' of Constant '"):
                budget.take_bytes(2 * data.nbytes, what)
                tensor.raw_data = data.tobytes()
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
    return min(needed, external.written_bytes)


def opset_in(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """Version of the standard operator set among these imports; the newest where they do not name it."""
    newest = onnx.defs.onnx_opset_version()
    return next((int(entry.version) for entry in imports if entry.domain in STANDARD_DOMAINS), newest)


def read_model(model: ModelSource) -> tuple[onnx.ModelProto, str, Path | None, int]:
    """A model as it is written, unchecked: with what messages call it, its file, and its bytes.

    Raises
    ------
    FrontendError
        If the file is missing, special, or no ONNX model.
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
        hint = "; save it with its weights as external data" if error.errno == errno.EFBIG else ""
        hint = hint or hint_of(path, "rh.from_onnx") + near_file(path)
        raise FrontendError(f"cannot read the ONNX file {str(path)!r}: {error.strerror or error}{hint}") from error
    return _parse(data, f"the file {str(path)!r}", hint_of(path, "rh.from_onnx")), str(path), path, len(data)


def _bytes_in_memory(proto: onnx.ModelProto) -> int:
    """About the bytes of a model: protobuf would write the whole of it to count them, and cannot beyond 2 GiB."""
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
    except Exception as error:  # whatever protobuf raises in this version
        raise FrontendError(f"{what} is not an ONNX model{hint or f': {_first_line(error)}'}") from error
    if not proto.HasField("graph"):
        raise FrontendError(f"{what} is not an ONNX model: it has no graph ({len(data)} bytes)")
    return proto


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
