"""A report on an ONNX model before anything is compiled: the nodes that are supported, where, and what is missing."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..display.console import Shown, show, table
from ..display.text import plural
from ..errors import FrontendError, HeteroError
from ..target.vdevice import device_name, parse_vdevices
from ..transform.ir.remarks import remarks_of
from .import_limits import ImportLimits
from .onnx.coded_strings import with_coded_strings
from .onnx.functions import function_table
from .onnx.importer import default_inputs
from .onnx.inputs import Shapes, graph_inputs
from .onnx.model import ModelSource, OnnxModel, errors_of, load_model
from .onnx.node_names import NodeInfo, name_nodes, variable_name, walk_nodes
from .onnx.support import has_converter, opset_of
from .onnx.survey import NO_CONVERTER, Survey, survey_nodes
from .placed_import import ImportSource, node_of_variable, placed_module

if TYPE_CHECKING:
    from tvm import relax

    from ..target.make_vdevice import VDeviceEntry

Status: TypeAlias = Literal["supported", "refused", "not looked at"]

_COLUMNS = ["op", "domain", "opset", "nodes", "supported", "refused", "not looked at", "devices"]


@dataclass(frozen=True)
class NodeReport:
    """One node of a model.

    Attributes
    ----------
    name : str
        As `from_onnx` calls it.
    op : str
        Its op type.
    domain : str
        ``ai.onnx`` for ONNX's own.
    opset : int or None
        The version of the domain that the model imports; None where it imports none.
    status : Status
        "refused" nodes are to be mended; those "not looked at" may be supported or not.
    reason : str
        Why it is not supported; empty where it is.
    devices : tuple of str
        Names of the devices that can run it, such as ``llvm:0``; for nodes that the import computes, or that it
        inlines, all of them.
    on_host : bool
        Whether a CPU of the host has a part in it wherever it is placed, reading sizes for example.
    """

    name: str
    op: str
    domain: str
    opset: int | None
    status: Status
    reason: str = ""
    devices: tuple[str, ...] = ()
    on_host: bool = False


@dataclass(frozen=True)
class OnnxReport:
    """Which nodes of a model are supported; true where all are.

    Attributes
    ----------
    model : str
        The file, or "the model".
    devices : tuple of str
        Names of the devices that were asked for.
    nodes : tuple of NodeReport
        Every node in order, those inside of branches, loops and functions behind the node that holds them.
    problems : tuple of str
        Problems that keep the model from being imported or placed and belong to no node.
    """

    model: str
    devices: tuple[str, ...]
    nodes: tuple[NodeReport, ...]
    problems: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        """True if the model can be imported, and placed on each device."""
        return not self.problems and all(node.status == "supported" for node in self.nodes)

    def __bool__(self) -> bool:
        return self.supported

    @property
    def refused(self) -> tuple[NodeReport, ...]:
        """The nodes that have to be mended."""
        return tuple(node for node in self.nodes if node.status == "refused")

    def to_json(self) -> dict[str, Any]:
        """As JSON data: the attributes, and `supported`."""
        return {"supported": self.supported, **asdict(self)}

    def __str__(self) -> str:
        text = io.StringIO()
        show(self.tables(), text)
        return text.getvalue().rstrip()

    def tables(self) -> Iterator[Shown]:
        """The op types with their counts, then every node that is not supported: tables and lines."""
        rows = [(node.op, node.domain, node.opset) for node in self.nodes]
        by_status = Counter((row, node.status) for row, node in zip(rows, self.nodes, strict=True))
        devices: dict[tuple[str, str, int | None], dict[str, None]] = {}
        on_host = {row for row, node in zip(rows, self.nodes, strict=True) if node.on_host}
        for row, node in zip(rows, self.nodes, strict=True):
            devices.setdefault(row, {}).update(dict.fromkeys(node.devices))
        cells = []
        for row, count in sorted(Counter(rows).items(), key=lambda item: (item[0][1], item[0][0])):
            counts = [by_status[row, status] for status in ("supported", "refused", "not looked at")]
            places = ", ".join(devices[row]) + (" and the host" if row in on_host and devices[row] else "")
            shown = [str(number) if number else "" for number in counts]
            cells.append([row[0], row[1], "?" if row[2] is None else str(row[2]), str(count), *shown, places])
        if cells:
            yield table(f"Ops of {self.model}", _COLUMNS, cells, _COLUMNS[2:7])
        missing = [node for node in self.nodes if node.status != "supported"]
        if missing:
            columns = ["node", "op", "domain", "status", "reason"]
            lines = [[node.name, node.op, node.domain, node.status, node.reason] for node in missing]
            yield table("Not supported", columns, lines)
        yield from self.problems
        if self.supported:
            yield f"{plural(len(self.nodes), 'node')}, all supported"
        else:
            yield f"{len(self.refused):,} of {plural(len(self.nodes), 'node')} refused: the model cannot be imported"


def onnx_report(
    model_or_path: ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    shapes: Shapes | None = None,
    limits: ImportLimits | None = None,
) -> OnnxReport:
    """Which nodes of an ONNX model are supported, on which devices, and what is missing; nothing is compiled.

    The model is imported. Where a node is refused, values of the types that ONNX infers stand for its outputs, so that
    the nodes behind it are looked at, too; where a type is not known, they are "not looked at".

    Parameters
    ----------
    model_or_path : str, PathLike, bytes or onnx.ModelProto
        As for `from_onnx`.
    vdevices : list of str, dict, Target or VDevice, optional
        The devices that each node is tried on; default this CPU.
    shapes : mapping, optional
        Sizes of inputs, or of named dimensions, as for `from_onnx`.
    limits : ImportLimits, optional
        As for `from_onnx`.

    Returns
    -------
    report : OnnxReport
        Text as a table, true where everything is supported.

    Raises
    ------
    FrontendError
        If the file is missing or no valid ONNX model, or its inputs cannot have these `shapes`.
    VDeviceError
        If a device string names nothing.
    """
    devices = parse_vdevices("llvm" if vdevices is None else vdevices)
    model = load_model(model_or_path, limits)
    with errors_of(model.source):
        try:
            model, _ = with_coded_strings(model)
            refused = []
        except FrontendError as error:  # the survey goes on with strings, which converters refuse
            refused = [str(error)]
        nodes = name_nodes(model.proto)
        found = _survey(model, nodes, shapes)
        problems = [*found.problems, *refused]
        places = _node_devices(found, nodes, devices, problems)
        rows = _rows(model, nodes, found, places)
    names = tuple(device_name(device, devices) for device in devices)
    return OnnxReport(model.source, names, tuple(rows), tuple(dict.fromkeys(problems)))


def _survey(model: OnnxModel, nodes: list[NodeInfo], shapes: Shapes | None) -> Survey:
    defaults = default_inputs(model)
    try:
        inputs = graph_inputs(model.proto.graph, shapes, defaults)
        fewer = graph_inputs(model.proto.graph, shapes)
    except FrontendError as error:
        if shapes:  # these may be what is wrong
            raise
        return Survey(problems=[str(error)])
    found = survey_nodes(model, nodes, inputs)
    is_whole = not defaults or not (found.rejected or found.unknown or found.problems)
    return found if is_whole else survey_nodes(model, nodes, fewer)  # as `import_nodes` does


@dataclass(frozen=True)
class _NodeDevice:
    """A device that the whole model was put on, and the names of nodes whose sizes the host reads there."""

    device: str
    on_host: frozenset[str]


def _node_devices(
    survey: Survey, nodes: list[NodeInfo], devices: list[relax.VDevice], problems: list[str]
) -> list[_NodeDevice]:
    """The devices that take the whole model; the reasons of others are added to `problems`."""
    if survey.graph is None:
        return []
    outputs = [f"output_{index}" for index in range(len(survey.graph.outputs))]
    names = {variable_name(node.name): node.name for node in walk_nodes(nodes)}
    places = []
    for device in devices:
        name = device_name(device, devices)
        rules = [("*", device)] if nodes else []
        try:
            source = ImportSource(survey.graph, nodes, outputs)
            placed = placed_module(source, devices, rules, None, "latency", None)
        except HeteroError as error:
            problems.append(f"on {name}: {error}")
            continue
        entries = remarks_of(placed).to_data()["placement"] or []
        hosts = (entry["variable"] for entry in entries if entry["kind"] == "op" and "host" in entry["reason"])
        owners = (node_of_variable(variable, names) for variable in hosts)
        places.append(_NodeDevice(name, frozenset(names[owner] for owner in owners if owner is not None)))
    return places


def _rows(
    model: OnnxModel, nodes: list[NodeInfo], survey: Survey, node_devices: list[_NodeDevice]
) -> Iterator[NodeReport]:
    devices = tuple(place.device for place in node_devices)
    on_host = frozenset().union(*(place.on_host for place in node_devices))
    functions = function_table(model.proto)
    for node in nodes:
        for inner in walk_nodes([node]):
            status, reason = _status(inner, node, survey, has_converter(inner, functions))
            taken = devices if status == "supported" else ()
            domain, opset = inner.domain or "ai.onnx", opset_of(inner.domain, model)
            yield NodeReport(inner.name, inner.op_type, domain, opset, status, reason, taken, inner.name in on_host)


def _status(node: NodeInfo, holder: NodeInfo, survey: Survey, has_one: bool) -> tuple[Status, str]:
    """The status and its reason, of a node that `holder` of the model's own graph is or holds."""
    if not has_one:
        return "refused", NO_CONVERTER
    if survey.graph is None and holder not in survey.rejected and holder not in survey.unknown:
        return "not looked at", "the import ends before it"
    if node is holder:
        if node in survey.rejected:
            return "refused", survey.rejected[node]
        return ("not looked at", survey.unknown[node]) if node in survey.unknown else ("supported", "")
    if holder in survey.rejected or holder in survey.unknown:
        return "not looked at", f"node {holder.name!r}, which holds it, is not supported"
    return "supported", ""
