"""`rh.place`: placement of any Relax module by rules over names, or by cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import tvm
from tvm import relax

from ..artifact.file_hints import describe_value
from ..errors import FrontendError, PlacementError
from ..op.placement import is_hint
from ..target.vdevice import default_vdevice, parse_vdevices, vdevices_of, with_vdevices
from ..transform.placement.realize_vdevice import realize_vdevice
from ..transform.shard.partition_by_mesh import partition_by_mesh
from .auto.auto_placement import place_graph
from .onnx.importer import ImportedGraph
from .onnx.name_bindings import annotated_function
from .onnx.node_names import NodeInfo
from .onnx.placement_rules import PlacementRules, assign_devices, matching_patterns, rule_pairs
from .placed_import import check_placement, with_reasons

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .auto.cost_model import CostModel, Objective


def place(
    mod: tvm.IRModule,
    placement: PlacementRules | Literal["auto"],
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
    memory_limit: MemoryLimit | None = None,
) -> tvm.IRModule:
    """Place any Relax module over several devices.

    Parameters
    ----------
    mod : tvm.IRModule
        Module from `from_torch`, `from_onnx`, `relax.frontend.nn`, TVM's importers or TVMScript.
    placement : mapping, list of (pattern, device) pairs, or "auto"
        Glob patterns; the first one that matches a binding decides. A pattern is matched against the binding's name,
        its op (``matmul`` or ``relax.matmul``), the names of its spans, and its modules: the dotted prefixes of its
        name, or of the parameters that it reads (``layers.0.fc`` for ``layers.0.fc.weight``). An op that does not read
        a parameter is in the module of the operand that is computed last. ``"auto"`` lets `cost_model` choose for the
        function "main".
    vdevices : list of str, dict, Target or VDevice, optional
        Devices; the first one is the default. By default the module's vdevices.
    cost_model, objective, memory_limit
        See `from_onnx`.

    Returns
    -------
    mod : tvm.IRModule
        Module with every value on a device, and transfers. Bindings that no rule matches keep the device of annotations
        and hints, else they go to the default device; called functions follow their callers.

    Raises
    ------
    FrontendError
        If a pattern matches nothing, or arguments contradict each other.
    VDeviceError
        If a device string is not in the vdevices.
    PlacementError
        If the module lacks a Relax function (for "auto": "main"), or no placement fits `memory_limit`.
    """
    if not isinstance(mod, tvm.IRModule):
        raise FrontendError(f"rh.place: {describe_value(mod)}; expected a tvm.IRModule")
    vdevice_entries = vdevices if vdevices is not None else (vdevices_of(mod) or None)
    check_placement(vdevice_entries, placement, cost_model, objective, memory_limit)
    devices = list(vdevices_of(mod)) if vdevices is None else parse_vdevices(vdevice_entries)
    if vdevices is not None:
        mod = with_vdevices(mod, devices)
    functions = {gvar: func for gvar, func in mod.functions.items() if isinstance(func, relax.Function)}
    if not functions or (placement == "auto" and "main" not in {str(gvar.name_hint) for gvar in functions}):
        raise PlacementError('the module has no Relax function "main" to place')
    if any(_has_devices(func) for func in functions.values()):
        mod = realize_vdevice(partition_by_mesh(mod), insert_copies=True)[0]
        functions = {gvar: func for gvar, func in mod.functions.items() if isinstance(func, relax.Function)}
    graphs = {gvar: _binding_graph(func) for gvar, func in functions.items()}
    nodes = [node for graph in graphs.values() for node in dict.fromkeys(graph.owners.values())]
    if isinstance(placement, str):
        (main,) = (gvar for gvar in graphs if str(gvar.name_hint) == "main")
        plan = place_graph(graphs[main], devices, cost_model, objective, memory_limit)
        assigned = {info: plan.vdevices[info.name] for info in dict.fromkeys(graphs[main].owners.values())}
        nodes = list(assigned)
    else:
        plan = None
        # A rule must match in at least one of the functions.
        assign_devices(nodes, placement, devices)
        assigned = {}
        for graph in graphs.values():
            infos = list(dict.fromkeys(graph.owners.values()))
            matched = matching_patterns(infos, placement)
            rules = [(pattern, device) for pattern, device in rule_pairs(placement) if pattern in matched.values()]
            by_name = assign_devices(infos, rules, devices)
            assigned |= {info: by_name[info.name] for info in infos if info.name in matched}
    callees = _called_functions(functions.values())
    out = mod.clone()
    for gvar, func in functions.items():
        default = None if str(gvar.name_hint) in callees else default_vdevice(devices)
        out[gvar] = annotated_function(func, graphs[gvar], assigned, default)
    placed, report = realize_vdevice(partition_by_mesh(out), insert_copies=True)
    return with_reasons(placed, report, nodes, plan or ({} if isinstance(placement, str) else placement))


def _bindings(expr: relax.Expr) -> Iterator[relax.Binding]:
    """Bindings in program order; those of branches precede the `If`."""
    if not isinstance(expr, relax.SeqExpr):
        return
    for block in expr.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _bindings(binding.value.true_branch)
                yield from _bindings(binding.value.false_branch)
            yield binding


def _has_devices(func: relax.Function) -> bool:
    """Return whether a function has hints, device annotations or transfers."""
    types = [var.ty for var in func.params] + [binding.var.ty for binding in _bindings(func.body)]
    is_placed = any(isinstance(ty, relax.TensorType) and ty.vdevice is not None for ty in types)
    values = [binding.value for binding in _bindings(func.body)]
    return is_placed or any(is_hint(value) or _op_name(value) == "relax.to_vdevice" for value in values)


def _called_functions(functions: Iterable[relax.Function]) -> set[str]:
    names = set()
    for func in functions:
        for binding in _bindings(func.body):
            op = getattr(binding.value, "op", None)
            if isinstance(op, tvm.ir.GlobalVar):
                names.add(str(op.name_hint))
    return names


def _op_name(value: relax.Expr) -> str:
    if not isinstance(value, relax.Call):
        return type(value).__name__
    op = value.op
    if (
        isinstance(op, tvm.ir.Op)
        and op.name.startswith("relax.call_tir")
        and isinstance(value.args[0], tvm.ir.GlobalVar)
    ):
        return str(value.args[0].name_hint)
    return str(getattr(op, "name", None) or getattr(op, "name_hint", "call"))


def _binding_graph(func: relax.Function) -> ImportedGraph:
    """Represent a function as a graph whose nodes are its bindings."""
    owners: dict[relax.Var, NodeInfo] = {}
    modules = {param: str(param.name).rpartition(".")[0] for param in func.params}
    order = {param: -1 for param in func.params}
    weights = {param for param in func.params if modules[param]}
    counts: dict[str, int] = {}
    for position, binding in enumerate(_bindings(func.body)):
        name = str(binding.var.name)
        operands = [var for var in relax.analysis.free_vars(binding.value) if var in modules]
        weight_modules = [modules[var] for var in operands if var in weights]
        if weight_modules and all(var in weights for var in operands):
            weights.add(binding.var)
        module = name.rpartition(".")[0] or (weight_modules[0] if weight_modules else "")
        if not module and operands:
            module = modules[max(operands, key=order.__getitem__)]
        modules[binding.var], order[binding.var] = module, position
        op = _op_name(binding.value)
        parents = [".".join(module.split(".")[:count]) for count in range(1, module.count(".") + 2)] if module else []
        params = [str(var.name) for var in operands if var in weights]
        aliases = dict.fromkeys([name, op, op.removeprefix("relax."), op.rsplit(".", 1)[-1], *parents, *params])
        spans = [str(span.source_name.name) for span in (binding.span, binding.value.span) if span is not None]
        number = counts.get(name, 0)
        counts[name] = number + 1
        unique = f"{name}_{number}" if number else name
        owners[binding.var] = NodeInfo(unique, (*aliases, *spans), op, "", "")
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    return ImportedGraph(tvm.IRModule(), [], list(func.params), bindings, [func.body.body], owners, {}, {})
