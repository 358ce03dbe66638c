"""Report on an ONNX model without compilation: supported nodes, their devices, and missing ops."""

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
from .onnx.node_names import NodeInfo, name_nodes, variable_name, walk_nodes
from .onnx.onnx_model import ModelSource, OnnxModel, errors_of, load_model
from .onnx.support import has_converter, opset_of
from .onnx.survey import Survey, no_converter, survey_nodes
from .placed_import import ImportSource, node_of_variable, placed_module

if TYPE_CHECKING:
    from tvm import relax

    from ..target.make_vdevice import VDeviceEntry

Status: TypeAlias = Literal["supported", "refused", "not looked at"]

_COLUMNS = ["op", "domain", "opset", "nodes", "supported", "refused", "not looked at", "devices"]


@dataclass(frozen=True)
class NodeReport:
    """Support of one node of a model.

    Attributes
    ----------
    name : str
        Name in `from_onnx`.
    op : str
        Op type.
    domain : str
        Domain of the op; ``ai.onnx`` for the standard one.
    opset : int or None
        Version of the domain that the model imports, or None.
    status : Status
        "refused" nodes must be changed; those "not looked at" may be supported or not.
    reason : str
        Reason if it is not supported, else empty.
    devices : tuple of str
        Names of the devices that can run it, such as ``llvm:0``; all devices for nodes that are folded or inlined.
    on_host : bool
        True if it needs the host CPU on any device, for example to read sizes.
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
    """Support of all nodes of a model; true if all are supported.

    Attributes
    ----------
    model : str
        File name, or "the model".
    devices : tuple of str
        Names of the requested devices.
    nodes : tuple of NodeReport
        All nodes in order; those nested in branches, loops and functions follow their node.
    problems : tuple of str
        Errors of import or placement that do not belong to a node.
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
        """The nodes that must be changed."""
        return tuple(node for node in self.nodes if node.status == "refused")

    def to_json(self) -> dict[str, Any]:
        """The attributes and `supported` as JSON data."""
        return {"supported": self.supported, **asdict(self)}

    def __str__(self) -> str:
        text = io.StringIO()
        show(self.tables(), text)
        return text.getvalue().rstrip()

    def tables(self) -> Iterator[Shown]:
        """Tables and lines: op types with counts, then every unsupported node."""
        rows = [(node.op, node.domain, node.opset) for node in self.nodes]
        by_status = Counter((row, node.status) for row, node in zip(rows, self.nodes, strict=True))
        devices: dict[tuple[str, str, int | None], dict[str, None]] = {}
        on_host = {row for row, node in zip(rows, self.nodes, strict=True) if node.on_host}
        for row, node in zip(rows, self.nodes, strict=True):
            devices.setdefault(row, {}).update(dict.fromkeys(node.devices))
        cells = []
        for row, count in sorted(Counter(rows).items(), key=lambda item: (item[0][1], item[0][0])):
            counts = [by_status[row, status] for status in ("supported", "refused", "not looked at")]
            device_text = ", ".join(devices[row]) + (" and the host" if row in on_host and devices[row] else "")
            count_texts = [str(number) if number else "" for number in counts]
            opset = "?" if row[2] is None else str(row[2])
            cells.append([*row[:2], opset, str(count), *count_texts, device_text])
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
    """Report which nodes of an ONNX model are supported on which devices, without compilation.

    The model is imported. The outputs of a refused node become parameters of the types that ONNX infers, so that later
    nodes can be examined; if a type is unknown, they are "not looked at".

    Parameters
    ----------
    model_or_path : str, PathLike, bytes or onnx.ModelProto
        See `from_onnx`.
    vdevices : list of str, dict, Target or VDevice, optional
        Devices to test; default this CPU.
    shapes : mapping, optional
        Sizes of inputs or named dimensions; see `from_onnx`.
    limits : ImportLimits, optional
        See `from_onnx`.

    Returns
    -------
    report : OnnxReport
        Report; its text is a table, and it is true if all nodes are supported.

    Raises
    ------
    FrontendError
        If the file is missing or not a valid ONNX model, or its inputs cannot have these `shapes`.
    VDeviceError
        If a device string is invalid.
    """
    devices = parse_vdevices("llvm" if vdevices is None else vdevices)
    model = load_model(model_or_path, limits)
    with errors_of(model.source):
        try:
            model, _ = with_coded_strings(model)
            refused = []
        except FrontendError as error:  # the survey continues; converters refuse strings
            refused = [str(error)]
        nodes = name_nodes(model.proto)
        survey = _survey(model, nodes, shapes)
        problems = [*survey.problems, *refused]
        node_devices = _node_devices(survey, nodes, devices, problems)
        rows = _rows(model, nodes, survey, node_devices)
    names = tuple(device_name(device, devices) for device in devices)
    return OnnxReport(model.source, names, tuple(rows), tuple(dict.fromkeys(problems)))


def _survey(model: OnnxModel, nodes: list[NodeInfo], shapes: Shapes | None) -> Survey:
    defaults = default_inputs(model)
    try:
        inputs = graph_inputs(model.proto.graph, shapes, defaults)
        inputs_without_defaults = graph_inputs(model.proto.graph, shapes)
    except FrontendError as error:
        if shapes:  # they may cause the error
            raise
        return Survey(problems=[str(error)])
    survey = survey_nodes(model, nodes, inputs)
    is_complete = not defaults or not (survey.rejected or survey.unknown or survey.problems)
    return survey if is_complete else survey_nodes(model, nodes, inputs_without_defaults)  # as `import_nodes` does


@dataclass(frozen=True)
class _NodeDevice:
    """A device that runs the whole model, and the nodes whose sizes the host reads."""

    device: str
    on_host: frozenset[str]


def _node_devices(
    survey: Survey, nodes: list[NodeInfo], devices: list[relax.VDevice], problems: list[str]
) -> list[_NodeDevice]:
    """The devices that can run the whole model; reasons of others are added to `problems`."""
    if survey.graph is None:
        return []
    outputs = [f"output_{index}" for index in range(len(survey.graph.outputs))]
    names = {variable_name(node.name): node.name for node in walk_nodes(nodes)}
    results = []
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
        results.append(_NodeDevice(name, frozenset(names[owner] for owner in owners if owner is not None)))
    return results


def _rows(
    model: OnnxModel, nodes: list[NodeInfo], survey: Survey, node_devices: list[_NodeDevice]
) -> Iterator[NodeReport]:
    devices = tuple(device.device for device in node_devices)
    on_host = frozenset().union(*(device.on_host for device in node_devices))
    functions = function_table(model.proto)
    for node in nodes:
        for inner in walk_nodes([node]):
            status, reason = _status(inner, node, survey, has_converter(inner, functions))
            supported_devices = devices if status == "supported" else ()
            domain, opset = inner.domain or "ai.onnx", opset_of(inner.domain, model)
            own = inner.name, inner.op_type, domain, opset
            yield NodeReport(*own, status, reason, supported_devices, inner.name in on_host)


def _status(node: NodeInfo, owner: NodeInfo, survey: Survey, has_own_converter: bool) -> tuple[Status, str]:
    """Status and reason of a node; `owner` is the node of the main graph that it is or is nested in."""
    if not has_own_converter:
        return "refused", no_converter(node)
    if survey.graph is None and owner not in survey.rejected and owner not in survey.unknown:
        return "not looked at", "the import ends before it"
    if node is owner:
        if node in survey.rejected:
            return "refused", survey.rejected[node]
        return ("not looked at", survey.unknown[node]) if node in survey.unknown else ("supported", "")
    if owner in survey.rejected or owner in survey.unknown:
        return "not looked at", f"node {owner.name!r}, which holds it, is not supported"
    return "supported", ""
