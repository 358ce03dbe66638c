"""`rh.place`: devices for any Relax module by rules over names, or by cost."""

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
    """Place a Relax module over several devices, wherever it came from.

    Parameters
    ----------
    mod : tvm.IRModule
        From `from_torch`, `from_onnx`, `relax.frontend.nn`, TVM's own importers or TVMScript.
    placement : mapping, list of (pattern, device) pairs, or "auto"
        Glob patterns in order, the first that matches a binding deciding. A pattern is matched against the binding's
        name, its op (``matmul`` or ``relax.matmul``), the names of its spans, and the modules that it is in: the
        dotted parts of its name, or of the parameters that it reads (``layers.0.fc`` for ``layers.0.fc.weight``).
        An op that reads no parameter is in the module of the operand that is computed last.
        ``"auto"`` lets `cost_model` choose for the function "main".
    vdevices : list of str, dict, Target or VDevice, optional
        The devices, the first one the default. Default: those that the module has.
    cost_model, objective, memory_limit
        As `from_onnx` takes them.

    Returns
    -------
    mod : tvm.IRModule
        With every value on its device and transfers in place. Bindings that no rule matches stay where annotations and
        hints put them, else they go to the default device; functions that others call follow their callers.

    Raises
    ------
    FrontendError
        If a pattern matches nothing, or arguments do not fit each other.
    VDeviceError
        If a device string names nothing among the vdevices.
    PlacementError
        If the module has no Relax function (for "auto": no "main"), or no placement fits `memory_limit`.
    """
    if not isinstance(mod, tvm.IRModule):
        raise FrontendError(f"rh.place: {describe_value(mod)}; expected a tvm.IRModule")
    given = vdevices if vdevices is not None else (vdevices_of(mod) or None)
    check_placement(given, placement, cost_model, objective, memory_limit)
    devices = list(vdevices_of(mod)) if vdevices is None else parse_vdevices(given)
    if vdevices is not None:
        mod = with_vdevices(mod, devices)
    functions = {gvar: func for gvar, func in mod.functions.items() if isinstance(func, relax.Function)}
    if not functions or (placement == "auto" and "main" not in {str(gvar.name_hint) for gvar in functions}):
        raise PlacementError('the module has no Relax function "main" to place')
    if any(_has_devices(func) for func in functions.values()):
        mod = realize_vdevice(mod, insert_copies=True)[0]
        functions = {gvar: func for gvar, func in mod.functions.items() if isinstance(func, relax.Function)}
    graphs = {gvar: _graph_of(func) for gvar, func in functions.items()}
    nodes = [node for graph in graphs.values() for node in dict.fromkeys(graph.owners.values())]
    if isinstance(placement, str):
        (main,) = (gvar for gvar in graphs if str(gvar.name_hint) == "main")
        plan = place_graph(graphs[main], devices, cost_model, objective, memory_limit)
        chosen = {info: plan.vdevices[info.name] for info in dict.fromkeys(graphs[main].owners.values())}
        nodes = list(chosen)
    else:
        plan = None
        # Each function has its own names, and a rule has to match in one of them.
        assign_devices(nodes, placement, devices)
        chosen = {}
        for graph in graphs.values():
            own = list(dict.fromkeys(graph.owners.values()))
            matched = matching_patterns(own, placement)
            rules = [(pattern, device) for pattern, device in rule_pairs(placement) if pattern in matched.values()]
            by_name = assign_devices(own, rules, devices)
            chosen |= {info: by_name[info.name] for info in own if info.name in matched}
    called = _called(functions.values())
    out = mod.clone()
    for gvar, func in functions.items():
        otherwise = None if str(gvar.name_hint) in called else default_vdevice(devices)
        out[gvar] = annotated_function(func, graphs[gvar], chosen, otherwise)
    placed, report = realize_vdevice(out, insert_copies=True)
    return with_reasons(placed, report, nodes, plan or ({} if isinstance(placement, str) else placement))


def _bindings(expr: relax.Expr) -> Iterator[relax.Binding]:
    """Bindings in program order, those of branches before the `If`'s own."""
    if not isinstance(expr, relax.SeqExpr):
        return
    for block in expr.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _bindings(binding.value.true_branch)
                yield from _bindings(binding.value.false_branch)
            yield binding


def _has_devices(func: relax.Function) -> bool:
    """Return whether hints, annotations or transfers say where something is."""
    types = [var.ty for var in func.params] + [binding.var.ty for binding in _bindings(func.body)]
    is_placed = any(isinstance(ty, relax.TensorType) and ty.vdevice is not None for ty in types)
    values = [binding.value for binding in _bindings(func.body)]
    return is_placed or any(is_hint(value) or _op_of(value) == "relax.to_vdevice" for value in values)


def _called(functions: Iterable[relax.Function]) -> set[str]:
    found = set()
    for func in functions:
        for binding in _bindings(func.body):
            op = getattr(binding.value, "op", None)
            if isinstance(op, tvm.ir.GlobalVar):
                found.add(str(op.name_hint))
    return found


def _op_of(value: relax.Expr) -> str:
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


def _graph_of(func: relax.Function) -> ImportedGraph:
    """A function as a graph whose nodes are its bindings."""
    owners: dict[relax.Var, NodeInfo] = {}
    homes = {param: str(param.name).rpartition(".")[0] for param in func.params}
    order = {param: -1 for param in func.params}
    weights = {param for param in func.params if homes[param]}
    taken: dict[str, int] = {}
    for position, binding in enumerate(_bindings(func.body)):
        name = str(binding.var.name)
        reads = [var for var in relax.analysis.free_vars(binding.value) if var in homes]
        own = [homes[var] for var in reads if var in weights]
        if own and all(var in weights for var in reads):
            weights.add(binding.var)
        home = name.rpartition(".")[0] or (own[0] if own else "")
        if not home and reads:
            home = homes[max(reads, key=order.__getitem__)]
        homes[binding.var], order[binding.var] = home, position
        op = _op_of(binding.value)
        inside = [".".join(home.split(".")[:count]) for count in range(1, home.count(".") + 2)] if home else []
        params = [str(var.name) for var in reads if var in weights]
        aliases = dict.fromkeys([name, op, op.removeprefix("relax."), op.rsplit(".", 1)[-1], *inside, *params])
        spans = [str(span.source_name.name) for span in (binding.span, binding.value.span) if span is not None]
        number = taken.get(name, 0)
        taken[name] = number + 1
        unique = f"{name}_{number}" if number else name
        owners[binding.var] = NodeInfo(unique, (*aliases, *spans), op, "", "")
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    return ImportedGraph(tvm.IRModule(), [], list(func.params), bindings, [func.body.body], owners, {}, {})
