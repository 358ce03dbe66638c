"""The graph of a Relax module at any stage, as data: nodes on devices, the values between them, kernels.

Calls of kernels, by `call_tir` or directly once results are allocated, are nodes with the kernel's ops; functions that
TVM fused are drawn as the ops inside of them. What a lowered module does to allocate and to check is left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from ..artifact.commands import Dispatch
from ..errors import VDeviceError
from ..target.element_types import bytes_for
from ..target.vdevice import device_name, vdevices_of
from ..transform.ir.extents import NoTextError, dim_text, known_extents
from ..transform.ir.kernels import call_vdevice, called_prim_func, operations_of, ops_of, precision_of
from ..transform.ir.op_names import TRANSFER
from ..transform.ir.remarks import remarks_of
from ..transform.ir.rewriting import handle, is_tensor_constant, op_name, relax_functions, tensor_types
from ..transform.record.region_attrs import regions_of

Flow: TypeAlias = "frozenset[int] | tuple[Flow, ...]"
"""The nodes that a value comes from, field by field of a tuple."""

_NOTHING: frozenset[int] = frozenset()
_RUN_TIME_TRANSFER = "relax_hetero.to_device"
_HIDDEN = ("vm.builtin.", "relax_hetero.pinned_storage")
_HIDDEN_OPS = ("relax.vm.", "relax.memory.", "relax.builtin.", "relax.call_builtin_with_ctx")

UNPLACED = "unplaced"
"""In place of a device, where a value has none yet."""


def module_data(mod: tvm.IRModule, title: str = "") -> dict[str, Any]:
    """A module as the data of a report of kind "module".

    Parameters
    ----------
    mod : tvm.IRModule
        At any stage.
    title : str
        Title of the report; default: the names of its functions.

    Returns
    -------
    dict
        JSON data.

    Raises
    ------
    VDeviceError
        The module's list of vdevices is none.
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
    """Return whether a value is the memory in which a lowered function keeps its sizes."""
    callee = value.args[0] if op_name(value) == "relax.call_builtin_with_ctx" else None
    return isinstance(callee, relax.ExternFunc) and str(callee.global_symbol) == "vm.builtin.alloc_shape_heap"


def _is_primitive(func: relax.Function) -> bool:
    return bool(func.attrs and func.attrs.get("Primitive"))


class _Graph:
    """Nodes and edges of a module, filled in function by function."""

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
        self._sizes: set[relax.Var] = set()
        self._regions = {region.name: region for region in regions_of(mod)}

    def add_function(self, gv: tvm.ir.GlobalVar, func: relax.Function) -> dict[str, Any]:
        """The nodes of a function; its entry in the data."""
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
        for number, flow in enumerate(fields):
            ty = types[number] if number < len(types) else None
            node = self._node("output", f"output_{number}" if len(fields) > 1 else "output", None, ty)
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
                    self._sizes.add(binding.var)
                env[binding.var] = self._value(binding.value, env, binding.var.name, binding.var.ty)
        return self._value(expr.body, env, "")

    def _value(self, value: relax.Expr, env: dict[relax.Var, Flow], name: str, ty: Any = None) -> Flow:
        if isinstance(value, relax.Var):
            return env.get(value, _NOTHING)
        if isinstance(value, relax.Tuple):
            return tuple(self._value(part, env, name) for part in value.fields)
        if isinstance(value, relax.TupleGetItem):
            whole = self._value(value.tuple_value, env, name)
            return whole[value.index] if isinstance(whole, tuple) and value.index < len(whole) else whole
        if is_tensor_constant(value):
            return frozenset((self._constant(value),))
        if isinstance(value, relax.SeqExpr):
            return self._sequence(value, env)
        if isinstance(value, relax.If):
            node = self._node("op", name, "if", ty)
            for part in (value.cond, value.true_branch, value.false_branch):
                self._connect(self._value(part, env, name), node)
            return frozenset((node,))
        if isinstance(value, relax.Call):
            return self._call(value, env, name, ty if ty is not None else value.ty)
        return _NOTHING

    def _call(self, call: relax.Call, env: dict[relax.Var, Flow], name: str, ty: Any) -> Flow:
        kernel = called_prim_func(self._mod, call)
        callee = self._mod.functions.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function) and _is_primitive(callee):
            return self._inlined(call, callee, env)
        if kernel is not None:
            return self._kernel_call(call, kernel, env, name, ty)
        op = _called(call)
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
        if any(isinstance(arg, relax.Var) and arg in self._sizes for arg in arguments):
            return _NOTHING  # it computes sizes
        # Called directly, a kernel writes to tensors that were allocated for it.
        written = [a for a in arguments if direct and isinstance(a, relax.Var) and env.get(a) == _NOTHING]
        written = [arg for arg in written if any(tensor_types(arg.ty))]
        if direct and not written and not any(tensor_types(ty)) and not ops_of(func):
            return _NOTHING  # it computes shapes
        result = tvm.ir.TupleType([arg.ty for arg in written]) if written else ty
        ops = ops_of(func)
        node = self._node("op", written[0].name if written else name, ", ".join(ops) or kernel.name_hint, result, call)
        if self._group < 0:
            self._add_group(kernel.name_hint, node, func)
        for arg in arguments:
            if not any(arg is out for out in written):
                self._connect(self._value(arg, env, name), node)
        for out in written:
            env[out] = frozenset((node,))
        return frozenset((node,))

    def _inlined(self, call: relax.Call, func: relax.Function, env: dict[relax.Var, Flow]) -> Flow:
        """The ops of a function that TVM fused, as a group."""
        inner = {p: self._value(a, env, "") for p, a in zip(func.params, call.args, strict=False)}
        outer, first = self._group, len(self.nodes)
        if outer < 0:
            self._group = len(self.groups)
            self.groups.append(_group(self._group, self._function, call.op.name_hint, ""))
        flow = self._sequence(func.body, inner)
        if outer < 0:
            mine = [node for node in self.nodes[first:] if node["kind"] != "constant"]
            self.groups[self._group].update(
                nodes=[node["id"] for node in mine], device=mine[0]["device"] if mine else UNPLACED
            )
        self._group = outer
        return flow

    def _add_group(self, kernel: str, node: int, func: tirx.PrimFunc) -> None:
        number = len(self.groups)
        entry = _group(number, self._function, kernel, self.nodes[node]["device"])
        region = self._regions.get(kernel)
        if region is None:
            entry.update(precision=precision_of(func) or None, operations=operations_of(func) or None)
        else:
            inside = [command.kernel for command in region.commands if isinstance(command, Dispatch)]
            entry.update(region=kernel, notes=[f"runs {_plural(len(inside), 'kernel')}: {', '.join(inside)}"])
            self.nodes[node]["op"] = f"{kernel} ({_plural(len(inside), 'kernel')})"
        entry["nodes"] = [node]
        self.groups.append(entry)
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
        except VDeviceError:  # of a target that the module does not list
            return str(vdevice.target.kind.name) if vdevice.target is not None else UNPLACED

    def _connect(self, flow: Flow, to: int) -> None:
        for source in dict.fromkeys(_flat(flow)):
            values = self.nodes[source]["values"]
            nbytes = [value["bytes"] for value in values]
            total = sum(nbytes) if nbytes and None not in nbytes else None
            self._edges.setdefault((source, to, self.nodes[source]["name"]), total)

    def edges(self) -> list[dict[str, Any]]:
        """The edges, each once."""
        kinds = [node["kind"] for node in self.nodes]
        return [
            {
                **{"from": source, "to": to, "value": value, "bytes": nbytes},
                "transfer": "transfer" in (kinds[source], kinds[to]),
            }
            for (source, to, value), nbytes in self._edges.items()
        ]

    def devices(self) -> list[dict[str, Any]]:
        """The module's devices, and the missing one where something is on none."""
        used = {node["device"] for node in self.nodes}
        targets = {name: str(vdevice.target) for name, vdevice in zip(self._names, self._vdevices, strict=True)}
        kinds = {name: str(v.target.kind.name) for name, v in zip(self._names, self._vdevices, strict=True)}
        return [
            self._describe(name, targets.get(name, ""), kinds.get(name, ""))
            for name in (*targets, *_rest(used, targets))
        ]

    def _describe(self, name: str, target: str, kind: str) -> dict[str, Any]:
        mine = [node for node in self.nodes if node["device"] == name]
        ops = [node for node in mine if node["kind"] == "op"]
        moved = [node for node in mine if node["kind"] == "transfer"]
        return {
            **{"name": name, "target": target, "kind": kind, "optional": False, "ops": len(ops)},
            **{"op_bytes": _bytes(ops), "param_bytes": _bytes([n for n in mine if n["kind"] == "input"])},
            **{"constant_bytes": _bytes([n for n in mine if n["kind"] == "constant"])},
            **{"transfers_in": len(moved), "transfer_bytes": _bytes(moved), "peak": None},
        }

    def notes(self) -> list[str]:
        """A line on the whole."""
        kinds = [node["kind"] for node in self.nodes]
        devices = {node["device"] for node in self.nodes if node["kind"] == "op"}
        counts = (_plural(kinds.count("op"), "op"), _plural(len(devices), "device"))
        return [f"{counts[0]} on {counts[1]}, {_plural(kinds.count('transfer'), 'transfer')}."]


def _rest(used: set[str], known: dict[str, str]) -> list[str]:
    return sorted(used - known.keys())


def _group(number: int, function: str, kernel: str, device: str) -> dict[str, Any]:
    empty = (
        "region",
        "step",
        "precision",
        "operations",
        "bytes",
        "calls",
        "seconds",
        "share",
        "share_of_peak",
        "bound",
    )
    about = {"id": number, "function": function, "kernel": kernel, "device": device, "nodes": []}
    return {**about, **dict.fromkeys(empty), "notes": []}


def _called(call: relax.Call) -> str:
    """Callee: an op, a function of the module, or one that is registered."""
    op = op_name(call)
    if op is not None and op not in ("relax.call_packed", "relax.call_dps_packed", "relax.call_pure_packed"):
        return op
    callee = call.op if op is None else call.args[0]
    if isinstance(callee, relax.ExternFunc):
        return str(callee.global_symbol)
    return str(getattr(callee, "name_hint", None) or getattr(callee, "name", "call"))


def _flat(flow: Flow) -> Iterator[int]:
    if isinstance(flow, tuple):
        for part in flow:
            yield from _flat(part)
    else:
        yield from sorted(flow)


def _tensor(ty: relax.TensorType) -> dict[str, Any]:
    extents = known_extents(ty)
    dtype = str(ty.dtype) if ty.dtype is not None else ""
    if extents is None:
        shape: list[int | str] = ["?"] * max(int(ty.ndim), 0)
        return {"shape": shape, "dtype": dtype, "bytes": None, "layout": None}
    known = all(isinstance(extent, int) for extent in extents)
    nbytes = bytes_for(tuple(extents), dtype) if known else None
    return {"shape": [_extent(extent) for extent in extents], "dtype": dtype, "bytes": nbytes, "layout": None}


def _extent(extent: Any) -> int | str:
    try:
        return dim_text(extent)
    except NoTextError:
        return str(extent)


def _bytes(nodes: list[dict[str, Any]]) -> int:
    return sum(value["bytes"] or 0 for node in nodes for value in node["values"])


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
