"""`rh.show`: a Relax module at any stage as a graph, in notebooks, as a table and as a page.

`module_data` collects nodes, edges and kernels, `function_picture` draws a function as SVG. A kernel call is a node
with the kernel's ops; functions that TVM fused are drawn as their ops. Allocations and checks of lowered modules are
left out.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from ..artifact.commands import Dispatch
from ..artifact.file_hints import describe_value
from ..display.html import Column, Markup, colour, device_html, escaped, folded, paragraph, table, view
from ..display.text import bytes_text, plural, text_table
from ..errors import HeteroError, VDeviceError
from ..target.element_types import bytes_for
from ..target.vdevice import device_name, vdevices_of
from ..transform.ir.extents import dim_or_script, known_extents
from ..transform.ir.kernels import call_vdevice, called_prim_func, operations_of, ops_of, precision_of
from ..transform.ir.op_names import TRANSFER
from ..transform.ir.remarks import remarks_of
from ..transform.ir.rewriting import handle, is_tensor_constant, op_name, relax_functions, tensor_types
from ..transform.record.region_attrs import regions_of
from .page import page_of
from .written_report import report_path, write_page

Flow: TypeAlias = "frozenset[int] | tuple[Flow, ...]"  # nodes that compute a value, by field for tuples

_NOTHING: frozenset[int] = frozenset()
_RUN_TIME_TRANSFER = "relax_hetero.to_device"
_HIDDEN = ("vm.builtin.", "relax_hetero.pinned_storage")
_HIDDEN_OPS = ("relax.vm.", "relax.memory.", "relax.builtin.", "relax.call_builtin_with_ctx")

UNPLACED = "unplaced"  # device of values that have no device yet


def module_data(
    mod: tvm.IRModule,  # module at any stage
    title: str = "",  # title of the report; default: the names of its functions
) -> dict[str, Any]:
    """Collect the data of a report of kind "module".

    Returns JSON data. Raises VDeviceError if the module's list of vdevices is invalid.
    """
    graph = _Graph(mod)
    functions = [graph.add_function(gv, func) for gv, func in relax_functions(mod) if not _is_primitive(func)]
    names = [function["name"] for function in functions]
    return {
        **{"schema": 1, "kind": "module", "title": title or ", ".join(names[:4])},
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "versions": {"tvm": str(tvm.__version__)},
        **{"machine": None, "notes": graph.notes(), "devices": graph.devices(), "functions": functions},
        **{"nodes": graph.nodes, "edges": graph.edges(), "groups": graph.groups},
        **{"layouts": [], "timeline": None, "memory": [], "profile": None, "tables": []},
        **{"bench": None, "chat": None, "passes": None},
    }


def _allocates_sizes(value: relax.Expr) -> bool:
    """Return whether a value is the shape heap of a lowered function."""
    callee = value.args[0] if op_name(value) == "relax.call_builtin_with_ctx" else None
    return isinstance(callee, relax.ExternFunc) and str(callee.global_symbol) == "vm.builtin.alloc_shape_heap"


def _is_primitive(func: relax.Function) -> bool:
    return bool(func.attrs and func.attrs.get("Primitive"))


class _Graph:
    """Builds the nodes and edges of a module, function by function."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self._mod, self._vdevices = mod, vdevices_of(mod)
        self._names = [device_name(vdevice, self._vdevices) for vdevice in self._vdevices]
        self._edges: dict[tuple[int, int, str], int | None] = {}
        self._function, self._group = "", -1
        placement = remarks_of(mod).placement
        entries = placement.entries if placement is not None else ()
        self._reasons = {(entry.function, entry.variable): entry.reason for entry in entries}
        self._constants: dict[int, int] = {}
        self._shape_heaps: set[relax.Var] = set()
        self._regions = {region.name: region for region in regions_of(mod)}

    def add_function(self, gv: tvm.ir.GlobalVar, func: relax.Function) -> dict[str, Any]:
        """Add the nodes of a function; return its entry in the data."""
        self._function, self._constants = gv.name_hint, {}
        env: dict[relax.Var, Flow] = {}
        inputs = []
        for param in func.params:
            node = self._node("input", param.name, None, param.ty)
            env[param] = frozenset((node,))
            inputs.append(node)
        result = self._sequence(func.body, env)
        fields = result if isinstance(result, tuple) else (result,)
        types = func.ret_ty.fields if isinstance(func.ret_ty, tvm.ir.TupleType) else [func.ret_ty]
        outputs = []
        for index, flow in enumerate(fields):
            ty = types[index] if index < len(types) else None
            node = self._node("output", f"output_{index}" if len(fields) > 1 else "output", None, ty)
            self._connect(flow, node)
            sources = [self.nodes[source] for source in _flat(flow)]
            if self.nodes[node]["device"] == UNPLACED and sources:
                self.nodes[node]["device"] = sources[0]["device"]
            outputs.append(node)
        return {"name": gv.name_hint, "inputs": inputs, "outputs": outputs}

    def _sequence(self, expr: relax.Expr, env: dict[relax.Var, Flow]) -> Flow:
        if not isinstance(expr, relax.SeqExpr):
            return self._value(expr, env, "")
        for block in expr.blocks:
            for binding in block.bindings:
                if _allocates_sizes(binding.value):
                    self._shape_heaps.add(binding.var)
                env[binding.var] = self._value(binding.value, env, binding.var.name, binding.var.ty)
        return self._value(expr.body, env, "")

    def _value(self, value: relax.Expr, env: dict[relax.Var, Flow], name: str, ty: Any = None) -> Flow:
        if isinstance(value, relax.Var):
            return env.get(value, _NOTHING)
        if isinstance(value, relax.Tuple):
            return tuple(self._value(field, env, name) for field in value.fields)
        if isinstance(value, relax.TupleGetItem):
            flow = self._value(value.tuple_value, env, name)
            return flow[value.index] if isinstance(flow, tuple) and value.index < len(flow) else flow
        if is_tensor_constant(value):
            return frozenset((self._constant(value),))
        if isinstance(value, relax.SeqExpr):
            return self._sequence(value, env)
        if isinstance(value, relax.If):
            node = self._node("op", name, "if", ty)
            for operand in (value.cond, value.true_branch, value.false_branch):
                self._connect(self._value(operand, env, name), node)
            return frozenset((node,))
        if isinstance(value, relax.Call):
            return self._call(value, env, name, ty if ty is not None else value.ty)
        return _NOTHING

    def _call(self, call: relax.Call, env: dict[relax.Var, Flow], name: str, ty: Any) -> Flow:
        kernel = called_prim_func(self._mod, call)
        callee = self._mod.functions.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function) and _is_primitive(callee):
            return self._inline(call, callee, env)
        if kernel is not None:
            return self._kernel_call(call, kernel, env, name, ty)
        op = _callee_name(call)
        if op == "relax.memory.view" or op == "relax.memory.ensure_zero_offset":
            return self._value(call.args[0], env, name)
        if op.startswith((*_HIDDEN, *_HIDDEN_OPS)):
            return _NOTHING
        is_transfer = op in (TRANSFER, _RUN_TIME_TRANSFER)
        node = self._node("transfer" if is_transfer else "op", name, op, ty, call)
        for arg in call.args:
            self._connect(self._value(arg, env, name), node)
        return frozenset((node,))

    def _kernel_call(
        self, call: relax.Call, kernel: tvm.ir.GlobalVar, env: dict[relax.Var, Flow], name: str, ty: Any
    ) -> Flow:
        func = self._mod.functions[kernel]
        direct = isinstance(call.op, tvm.ir.GlobalVar)
        arguments = list(call.args if direct else call.args[1:])
        if any(isinstance(arg, relax.Var) and arg in self._shape_heaps for arg in arguments):
            return _NOTHING  # computes sizes
        # A kernel that is called directly writes to tensors that were allocated for it.
        outputs = [a for a in arguments if direct and isinstance(a, relax.Var) and env.get(a) == _NOTHING]
        outputs = [arg for arg in outputs if any(tensor_types(arg.ty))]
        if direct and not outputs and not any(tensor_types(ty)) and not ops_of(func):
            return _NOTHING  # computes shapes
        result = tvm.ir.TupleType([arg.ty for arg in outputs]) if outputs else ty
        ops = ops_of(func)
        node = self._node("op", outputs[0].name if outputs else name, ", ".join(ops) or kernel.name_hint, result, call)
        if self._group < 0:
            self._add_group(kernel.name_hint, node, func)
        for arg in arguments:
            if not any(arg is out for out in outputs):
                self._connect(self._value(arg, env, name), node)
        for out in outputs:
            env[out] = frozenset((node,))
        return frozenset((node,))

    def _inline(self, call: relax.Call, func: relax.Function, env: dict[relax.Var, Flow]) -> Flow:
        """Add the ops of a function that TVM fused, as a group."""
        inner = {p: self._value(a, env, "") for p, a in zip(func.params, call.args, strict=False)}
        outer, first = self._group, len(self.nodes)
        if outer < 0:
            self._group = len(self.groups)
            self.groups.append(_group(self._group, self._function, call.op.name_hint, ""))
        flow = self._sequence(func.body, inner)
        if outer < 0:
            nodes = [node for node in self.nodes[first:] if node["kind"] != "constant"]
            device = nodes[0]["device"] if nodes else UNPLACED
            self.groups[self._group].update(nodes=[node["id"] for node in nodes], device=device)
        self._group = outer
        return flow

    def _add_group(self, kernel: str, node: int, func: tirx.PrimFunc) -> None:
        number = len(self.groups)
        group = _group(number, self._function, kernel, self.nodes[node]["device"])
        region = self._regions.get(kernel)
        if region is None:
            group.update(precision=precision_of(func) or None, operations=operations_of(func) or None)
        else:
            kernels = [command.kernel for command in region.commands if isinstance(command, Dispatch)]
            group.update(region=kernel, notes=[f"runs {plural(len(kernels), 'kernel')}: {', '.join(kernels)}"])
            self.nodes[node]["op"] = f"{kernel} ({plural(len(kernels), 'kernel')})"
        group["nodes"] = [node]
        self.groups.append(group)
        self.nodes[node]["group"] = number

    def _constant(self, value: relax.Expr) -> int:
        key = handle(value)
        if key not in self._constants:
            self._constants[key] = self._node("constant", "constant", None, value.ty)
        return self._constants[key]

    def _node(self, kind: str, name: str, op: str | None, ty: Any, call: relax.Call | None = None) -> int:
        tensors = list(tensor_types(ty)) if ty is not None else []
        vdevice = next((tensor.vdevice for tensor in tensors if tensor.vdevice is not None), None)
        if vdevice is None and call is not None:
            vdevice = call_vdevice(call)
        number = len(self.nodes)
        entry = {
            **{"id": number, "function": self._function, "kind": kind, "name": str(name), "op": op, "onnx": []},
            **{"device": self._device(vdevice), "values": [_tensor(tensor) for tensor in tensors]},
            **{"group": self._group if self._group >= 0 and kind != "constant" else None},
            "reason": self._reasons.get((self._function, str(name))),
        }
        self.nodes.append(entry)
        return number

    def _device(self, vdevice: relax.VDevice | None) -> str:
        if vdevice is None:
            return UNPLACED
        try:
            return device_name(vdevice, self._vdevices)
        except VDeviceError:  # not in the module's list
            return str(vdevice.target.kind.name) if vdevice.target is not None else UNPLACED

    def _connect(self, flow: Flow, to: int) -> None:
        for source in dict.fromkeys(_flat(flow)):
            nbytes = [value["bytes"] for value in self.nodes[source]["values"]]
            total = sum(nbytes) if nbytes and None not in nbytes else None
            self._edges.setdefault((source, to, self.nodes[source]["name"]), total)

    def edges(self) -> list[dict[str, Any]]:
        """Edges without duplicates."""
        kinds = [node["kind"] for node in self.nodes]
        return [
            {
                **{"from": source, "to": to, "value": value, "bytes": nbytes},
                "transfer": "transfer" in (kinds[source], kinds[to]),
            }
            for (source, to, value), nbytes in self._edges.items()
        ]

    def devices(self) -> list[dict[str, Any]]:
        """Devices of the module, and `UNPLACED` if a node has no device."""
        used = {node["device"] for node in self.nodes}
        targets = {name: str(vdevice.target) for name, vdevice in zip(self._names, self._vdevices, strict=True)}
        kinds = {name: str(v.target.kind.name) for name, v in zip(self._names, self._vdevices, strict=True)}
        return [
            self._describe(name, targets.get(name, ""), kinds.get(name, ""))
            for name in (*targets, *sorted(used - targets.keys()))
        ]

    def _describe(self, name: str, target: str, kind: str) -> dict[str, Any]:
        nodes = [node for node in self.nodes if node["device"] == name]
        ops = [node for node in nodes if node["kind"] == "op"]
        transfers = [node for node in nodes if node["kind"] == "transfer"]
        return {
            **{"name": name, "target": target, "kind": kind, "optional": False, "ops": len(ops)},
            **{"op_bytes": _total_bytes(ops), "param_bytes": _total_bytes([n for n in nodes if n["kind"] == "input"])},
            **{"constant_bytes": _total_bytes([n for n in nodes if n["kind"] == "constant"])},
            **{"transfers_in": len(transfers), "transfer_bytes": _total_bytes(transfers), "peak": None},
        }

    def notes(self) -> list[str]:
        """Summary of the module."""
        kinds = [node["kind"] for node in self.nodes]
        devices = {name for node in self.nodes if node["kind"] == "op" for name in str(node["device"]).split("+")}
        counts = (plural(kinds.count("op"), "op"), plural(len(devices), "device"))
        return [f"{counts[0]} on {counts[1]}, {plural(kinds.count('transfer'), 'transfer')}."]


def _group(number: int, function: str, kernel: str, device: str) -> dict[str, Any]:
    empty = "region step precision operations bytes calls seconds share share_of_peak bound".split()
    fields = {"id": number, "function": function, "kernel": kernel, "device": device, "nodes": []}
    return {**fields, **dict.fromkeys(empty), "notes": []}


def _callee_name(call: relax.Call) -> str:
    """Name of the callee: an op, a function of the module, or a packed function."""
    op = op_name(call)
    if op is not None and op not in ("relax.call_packed", "relax.call_dps_packed", "relax.call_pure_packed"):
        return op
    callee = call.op if op is None else call.args[0]
    if isinstance(callee, relax.ExternFunc):
        return str(callee.global_symbol)
    return str(getattr(callee, "name_hint", None) or getattr(callee, "name", "call"))


def _flat(flow: Flow) -> Iterator[int]:
    if isinstance(flow, tuple):
        for field in flow:
            yield from _flat(field)
    else:
        yield from sorted(flow)


def _tensor(ty: relax.TensorType) -> dict[str, Any]:
    extents = known_extents(ty)
    dtype = str(ty.dtype) if ty.dtype is not None else ""
    if extents is None:
        shape: list[int | str] = ["?"] * max(int(ty.ndim), 0)
        return {"shape": shape, "dtype": dtype, "bytes": None, "layout": None}
    is_static = all(isinstance(extent, int) for extent in extents)
    nbytes = bytes_for(tuple(extents), dtype) if is_static else None
    return {"shape": [dim_or_script(extent) for extent in extents], "dtype": dtype, "bytes": nbytes, "layout": None}


def _total_bytes(nodes: list[dict[str, Any]]) -> int:
    return sum(value["bytes"] or 0 for node in nodes for value in node["values"])


_SWEEPS = 4  # number of passes that reorder nodes within layers to reduce crossings


@dataclass(frozen=True)
class Layers:
    """Layered drawing of a graph."""

    # Nodes of each row, from left to right; negative numbers are dummy nodes, through which long edges pass.
    rows: list[list[int]]
    paths: dict[tuple[int, int], list[int]]  # nodes of each edge from its source to its target, including dummy nodes


def layers_of(nodes: Sequence[int], edges: Iterable[tuple[int, int]], close: Iterable[int] = ()) -> Layers:
    """Lay out an acyclic graph in rows (Sugiyama's method).

    `nodes`: nodes in topological order; `edges`: edges, of which those against this order are ignored; `close`: nodes
    that, if they have no predecessor, lie just above their first successor, as weights do.
    """
    position = {node: index for index, node in enumerate(nodes)}
    sorted_edges = sorted({(a, b) for a, b in edges if a in position and b in position and position[a] < position[b]})
    predecessors: dict[int, list[int]] = {node: [] for node in nodes}
    successors: dict[int, list[int]] = {node: [] for node in nodes}
    for a, b in sorted_edges:
        predecessors[b].append(a)
        successors[a].append(b)
    row: dict[int, int] = {}
    for node in nodes:
        row[node] = 1 + max((row[predecessor] for predecessor in predecessors[node]), default=-1)
    for node in close:
        if successors[node] and not predecessors[node]:
            row[node] = max(0, min(row[successor] for successor in successors[node]) - 1)
    rows: list[list[int]] = [[] for _ in range(1 + max(row.values(), default=-1))]
    for node in nodes:
        rows[row[node]].append(node)
    paths: dict[tuple[int, int], list[int]] = {}
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    dummy = -1
    for a, b in sorted_edges:
        path = [a]
        for index in range(row[a] + 1, row[b]):
            rows[index].append(dummy)
            path.append(dummy)
            dummy -= 1
        path.append(b)
        paths[a, b] = path
        for upper, lower in zip(path, path[1:], strict=False):
            below.setdefault(upper, []).append(lower)
            above.setdefault(lower, []).append(upper)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for index in range(len(rows)) if downwards else reversed(range(len(rows))):
            _sort(rows[index], above if downwards else below, _columns(rows))
    return Layers(rows, paths)


def _columns(rows: Sequence[Sequence[int]]) -> dict[int, float]:
    """Position of each node relative to the middle of its row."""
    return {node: index - (len(row) - 1) / 2 for row in rows for index, node in enumerate(row)}


def _sort(row: list[int], neighbours: Mapping[int, Sequence[int]], columns: Mapping[int, float]) -> None:
    """Sort a row by the barycentres of its nodes' neighbours."""

    def barycentre(node: int) -> float:
        around = [columns[neighbour] for neighbour in neighbours.get(node, ())]
        return sum(around) / len(around) if around else columns[node]

    row.sort(key=barycentre)


_BOX_WIDTH, _GAP, _BOX_HEIGHT, _ROW_HEIGHT, _DUMMY_WIDTH = 148, 16, 36, 66, 18
MAX_NODES = 250  # maximum number of nodes of a picture; larger ones would not be readable


def function_picture(data: Mapping[str, Any], function: str) -> Markup | None:
    """Draw a function of a report's data as SVG, from inputs at the top to results, without scripts.

    Constants are not drawn; each node says how many it reads. Returns None if the function has more than `MAX_NODES`
    nodes.
    """
    nodes = {n["id"]: n for n in data["nodes"] if n["function"] == function and n["kind"] != "constant"}
    if not nodes or len(nodes) > MAX_NODES:
        return None
    constants = {n["id"] for n in data["nodes"] if n["kind"] == "constant"}
    reads = Counter(edge["to"] for edge in data["edges"] if edge["from"] in constants)
    edges = {(e["from"], e["to"]): e for e in data["edges"] if e["from"] in nodes and e["to"] in nodes}
    # Nodes without predecessors lie just above their successors, so that the first row is not too wide.
    layers = layers_of(_topological_order(nodes, edges), edges, close=nodes)
    centres, width = _positions(layers)
    names = [device["name"] for device in data["devices"]]
    kernels = {node: group["kernel"] for group in data["groups"] for node in group["nodes"]}
    drawn = [_edge(edges[pair], [centres[node] for node in path]) for pair, path in layers.paths.items()]
    for number, node in nodes.items():
        drawn.append(_box(node, centres[number], names, kernels.get(number, ""), reads[number]))
    height = len(layers.rows) * _ROW_HEIGHT
    label = escaped(f"Graph of {function}: {len(nodes)} nodes")
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:none" role="img" aria-label="{label}" '
        f'font-size="11">{"".join(drawn)}</svg>'
    )


def _topological_order(nodes: Mapping[int, Any], edges: Mapping[tuple[int, int], Any]) -> list[int]:
    """Nodes in topological order."""
    in_degrees = Counter(b for _, b in edges)
    readers: dict[int, list[int]] = {}
    for a, b in edges:
        readers.setdefault(a, []).append(b)
    order = [node for node in nodes if not in_degrees[node]]
    for node in order:  # the loop appends to it
        for reader in readers.get(node, ()):
            in_degrees[reader] -= 1
            if not in_degrees[reader]:
                order.append(reader)
    return order


def _positions(layers: Layers) -> tuple[dict[int, tuple[float, float]], int]:
    """Centre of each node, and width of the picture."""
    widths = [
        sum(_BOX_WIDTH if node >= 0 else _DUMMY_WIDTH for node in row) + _GAP * (len(row) + 1) for row in layers.rows
    ]
    width = max(widths)
    centres = {}
    for index, row in enumerate(layers.rows):
        x = (width - widths[index]) / 2 + _GAP
        for node in row:
            size = _BOX_WIDTH if node >= 0 else _DUMMY_WIDTH
            centres[node] = (x + size / 2, index * _ROW_HEIGHT + _ROW_HEIGHT / 2)
            x += size + _GAP
    return centres, width


def _edge(edge: Mapping[str, Any], points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    y += _BOX_HEIGHT / 2
    path = [f"M{x:.0f} {y:.0f}"]
    for number, (to_x, middle) in enumerate(rest):
        is_last = number == len(rest) - 1
        to_y = middle - _BOX_HEIGHT / 2
        half = (y + to_y) / 2
        path.append(f"C{x:.0f} {half:.0f} {to_x:.0f} {half:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x, to_y
        if not is_last:  # a vertical line through the row
            y += _BOX_HEIGHT
            path.append(f"V{y:.0f}")
    line = 'stroke-width="2.5" stroke-dasharray="5 3"' if edge["transfer"] else 'stroke-width="1.2"'
    title = f"{edge['value']}, {bytes_text(edge['bytes'])}"
    return (
        f'<path d="{"".join(path)}" fill="none" stroke="currentColor" stroke-opacity=".5" {line}>'
        f"<title>{escaped(title)}</title></path>"
    )


def _box(
    node: Mapping[str, Any], centre: tuple[float, float], names: Sequence[str], kernel: str, constants: int
) -> str:
    x, y = centre[0] - _BOX_WIDTH / 2, centre[1] - _BOX_HEIGHT / 2
    number = names.index(node["device"]) if node["device"] in names else -1
    values = ", ".join(value_text(value) for value in node["values"])
    weights = f"reads {constants} constant{'s' * (constants != 1)}" if constants else ""
    onnx = f"ONNX {', '.join(node['onnx'])}" if node["onnx"] else ""
    kernel = f"kernel {kernel}" if kernel else ""
    lines = [f"{node['name']}: {node['op'] or node['kind']}", f"on {node['device']}", values, kernel, weights, onnx]
    title = escaped("\n".join(line for line in [*lines, node["reason"] or ""] if line))
    fill = f'fill="{colour(number)}" fill-opacity="{".25" if node["kind"] in ("op", "transfer") else ".06"}"'
    dashes = ' stroke-dasharray="5 3"' if node["kind"] == "transfer" else ""
    radius = 17 if node["kind"] in ("input", "output") else 4
    return (
        f'<g><title>{title}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" '
        f'rx="{radius}" {fill} stroke="{colour(number)}" stroke-width="1.3"{dashes}/>'
        f'<text x="{centre[0]:.0f}" y="{y + 15:.0f}" text-anchor="middle" fill="currentColor" font-weight="600">'
        f"{escaped(_truncate(short_op(node), 22))}</text>"
        f'<text x="{centre[0]:.0f}" y="{y + 29:.0f}" text-anchor="middle" fill="currentColor" fill-opacity=".75">'
        f"{escaped(_truncate(values or node['name'], 25))}</text></g>"
    )


def short_op(node: Mapping[str, Any]) -> str:
    """Short text for a node."""
    if node["kind"] in ("input", "output", "constant"):
        return str(node["name"])
    if node["kind"] == "transfer":
        return f"to {node['device']}"
    return str(node["op"]).removeprefix("relax.")


def value_text(value: Mapping[str, Any]) -> str:
    """Format a value's type, such as ``float32[n, 64]``."""
    return f"{value['dtype']}[{', '.join(map(str, value['shape']))}]"


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


_OPEN_FUNCTIONS = 3


class ShownModule:
    """Result of `rh.show`: a picture in notebooks, a table when it is printed.

    `data`: nodes, edges, devices and kernels as JSON data.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"<ShownModule of {self.data['title']}>"

    def __str__(self) -> str:
        kernels = {node: group["kernel"] for group in self.data["groups"] for node in group["nodes"]}
        makers: dict[int, list[str]] = {}
        names = {node["id"]: node["name"] for node in self.data["nodes"]}
        for edge in self.data["edges"]:
            makers.setdefault(edge["to"], []).append(names[edge["from"]])
        rows = [
            (
                *(node["function"], node["name"], short_op(node) if node["op"] else node["kind"], node["device"]),
                *(", ".join(map(value_text, node["values"])), ", ".join(makers.get(node["id"], ()))),
                kernels.get(node["id"], ""),
            )
            for node in self.data["nodes"]
            if node["kind"] != "constant"
        ]
        head = ("function", "value", "op", "device", "type", "reads", "kernel")
        return "\n".join([text_table(head, rows, left=len(head)), *self.data["notes"]])

    def _repr_html_(self) -> str:
        return view(*self._parts())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained page with a graph to zoom, to expand and to search.

        Raises HeteroError if the file cannot be written.
        """
        write_page(page_of(self.data), report_path(path))

    def _parts(self) -> list[str]:
        names = [each["name"] for each in self.data["devices"]]
        legend = Markup(" &nbsp; ".join(device_html(name, names) for name in names))
        parts: list[str] = [paragraph(legend, Markup(" &nbsp; "), *self.data["notes"])]
        for number, function in enumerate(each["name"] for each in self.data["functions"]):
            content = self._function(function, names)
            has_more = len(self.data["functions"]) > 1
            parts.append(folded(function, content, is_open=number < _OPEN_FUNCTIONS) if has_more else content)
        return parts

    def _function(self, function: str, names: list[str]) -> Markup:
        picture = function_picture(self.data, function)
        values = self._table(function, names)
        if picture is None:
            return Markup(paragraph("The function is too large for a picture.") + folded("Its values", values))
        return Markup(picture + folded("The same as a table", values))

    def _table(self, function: str, names: list[str]) -> Markup:
        """Table of all nodes: for screen readers, and for functions too large for a picture."""
        kernels = {node: group["kernel"] for group in self.data["groups"] for node in group["nodes"]}
        columns = [
            *(Column("value"), Column("op"), Column("device"), Column("type"), Column("bytes", True)),
            *(Column("kernel"), Column("reason of its device")),
        ]
        rows = [
            (
                *(node["name"], short_op(node) if node["op"] else node["kind"], device_html(node["device"], names)),
                *(", ".join(map(value_text, node["values"])), _bytes(node)),
                *(escaped(kernels.get(node["id"], "")), node["reason"] or ""),
            )
            for node in self.data["nodes"]
            if node["function"] == function
        ]
        return table(f"Values of {function}", columns, rows)


def _bytes(node: dict[str, Any]) -> str:
    sizes = [value["bytes"] for value in node["values"]]
    return bytes_text(None if None in sizes else sum(sizes)) if sizes else ""


def show(mod: tvm.IRModule, title: str = "") -> ShownModule:
    """Show a module at any stage of compilation: its values and ops on their devices.

    It may be imported, placed, encoded, fused into kernels or lowered, also by stock TVM.

    Parameters
    ----------
    mod : tvm.IRModule
        Module of Relax functions.
    title : str, optional
        Title of a saved page; default: the names of the functions.

    Returns
    -------
    ShownModule
        A picture in notebooks, a table for ``print``; ``save("model.html")`` writes a page.

    Raises
    ------
    HeteroError
        If the argument is not a module, or has no Relax function.

    Examples
    --------
    >>> placed = rh.place(mod, ["llvm", "cuda:0"], {"*": "cuda:0"})
    >>> rh.show(placed)
    >>> rh.show(rh.transform.FormRows()(placed)).save("rows.html")
    """
    if not isinstance(mod, tvm.IRModule):
        hint = "; an executable shows itself, and explain() prints its tables" if hasattr(mod, "explain") else ""
        raise HeteroError(f"rh.show: {describe_value(mod)}; expected a tvm.IRModule{hint}")
    data = module_data(mod, title)
    if not data["functions"]:
        raise HeteroError(f"show: found no Relax function in a module of {len(mod.functions)} functions")
    return ShownModule(data)
