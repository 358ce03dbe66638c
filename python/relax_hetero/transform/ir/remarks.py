"""Remarks of the passes about a module: one typed record, which travels with the module.

Each field of the record is a module attribute in JSON. A global info would be more natural, but TVMScript writes one
that is defined in Python as a reference to metadata, and could not parse the module's text.

Passes add to the record of a module that has one (`RecordRemarks`). Other modules are not touched, so that programs
before and after a pass can be compared; there `collect_placement`, `collect_encodings` and `collect_fusions` collect
the remarks. `kernel_nodes` maps kernels to nodes of the model's graph, and `operand_text` writes operands for messages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, get_type_hints

import tvm
from tvm import relax

from ...artifact.checks import CheckSpec
from ...artifact.commands import SingleCall
from ...artifact.model_graph import CONSTANT, INPUT, KINDS, OP, OUTPUT, FunctionGraph, ModelGraph
from ...artifact.schedule import Schedule
from ...artifact.typed_data import from_data, to_data
from ...op.quantized_matmul import DEQUANTIZE_BLOCKS
from ...target.vdevice import device_name, vdevices_of
from .blocks import used_vars
from .collecting import OPEN_COLLECTIONS, is_collecting
from .kernels import call_vdevice, called_prim_func, ops_of, precision_of
from .module_attrs import COMMANDS
from .op_names import HINT, TRANSFER
from .reports import DispatchEntry, EncodingReport, FusionReport, MissedFusion, PlacementReport
from .requirements import text_of
from .rewriting import op_name, relax_functions, walk_bindings

# Nodes of the model's graph that each kernel call computes.
#
# Values keep their names through the passes, and a pass that stores a value in another form adds a suffix:
# "n2_encoded" is the value "n2". So the results of most kernels name a node of the graph (`AnnotateGraph`). A kernel
# computes that node and its predecessors, up to the results of other kernels.

# Suffixes of a value in another form: encoded, in rows, with scratch memory, cast, on a device, as a field.
_SUFFIX = re.compile(
    r"encoded|plain|packed|scratch|rows|attended|whole|made|product|sum|own|shared|constant|taken|numbers|phases|wide"
    r"|part\d*|float\d+|bfloat16|int\d+|uint\d+|llvm|cuda|\d+"
)
_DEFAULT_NAME = re.compile(r"(lv|gv)\d*")  # default names of passes; the model may use the same ones for other values


def kernel_nodes(
    mod: tvm.IRModule,
    named: tuple[str, relax.Function],  # a function with its name
    graph: ModelGraph | None,  # graph of the placed module
    aliases: Mapping[str, Sequence[str]],  # variable to the values that it aliases or concatenates
    inside: Mapping[str, Sequence[str]],  # variable to the values that its fused kernel computes
) -> dict[relax.Var, tuple[int, ...]]:
    """The nodes of each kernel call of a function whose dispatches are formed.

    Returns the nodes by the variable of each kernel call. A node belongs to at most one kernel; kernels that only
    rearrange or check values have none.
    """
    for function in graph.functions if graph is not None else ():
        if graph is not None and function.name == named[0]:
            return _Kernels(mod, function, graph.texts, aliases, inside).nodes_of(named[1])
    return {}


class _Kernels:
    """The kernels of one function, and the nodes of their results: their heads."""

    def __init__(
        self,
        mod: tvm.IRModule,
        graph: FunctionGraph,
        texts: tuple[str, ...],
        aliases: Mapping[str, Sequence[str]],
        inside: Mapping[str, Sequence[str]],
    ) -> None:
        self._mod, self._aliases, self._inside, self._nodes = mod, aliases, inside, graph.nodes
        self._kinds = [KINDS[node.kind] for node in graph.nodes]
        self._names: dict[str, int] = {}
        ambiguous: set[str] = set()
        for index, node in enumerate(graph.nodes):
            if self._kinds[index] not in (CONSTANT, OUTPUT):
                name = texts[node.name]
                ambiguous.update([name] * (name in self._names))
                self._names[name] = index
        for name in ambiguous:
            del self._names[name]
        self._ancestor_bits = self._ancestors()
        # Other nodes were computed at compile time; block-quantized weights are unpacked by the kernels that read them.
        varying = sum(
            1 << index
            for index, node in enumerate(graph.nodes)
            if self._kinds[index] == INPUT or texts[node.op] == DEQUANTIZE_BLOCKS
        )
        self._is_computed = [bool(bits & varying) for bits in self._ancestor_bits]
        self._heads: dict[relax.Var, set[int]] = {}
        self._nodes_by_var: dict[relax.Var, frozenset[int]] = {}

    def _ancestors(self) -> list[int]:
        """For each node a bit mask of the nodes that it depends on, itself included."""
        masks: list[int] = []
        for index, node in enumerate(self._nodes):
            bits = 1 << index
            for read, _ in node.pairs():
                bits |= masks[read]
            masks.append(bits)
        return masks

    def nodes_of(self, func: relax.Function) -> dict[relax.Var, tuple[int, ...]]:
        for param in func.params:
            self._nodes_by_var[param] = frozenset(self._named(param.name))
        makers: dict[relax.Var, relax.Var] = {}
        for binding in walk_bindings(func):
            var, value = binding.var, binding.value
            reads = self._reads(value)
            named = self._plausible(self._named(var.name), reads, var.name)
            if called_prim_func(self._mod, value) is not None:
                makers[var] = var
                # The result may be one of the kernel's values in another layout.
                within = [] if named else map(self._named, reversed(self._inside.get(var.name, ())))
                named = next(filter(None, within), named)
                self._heads[var] = set() if named & reads else set(named)
            else:
                # A field or a view of a kernel's result may have the name that the result lacks.
                maker = next((makers[used] for used in used_vars(value) if used in makers), None)
                is_open = maker is not None and not self._heads[maker] and not named & reads
                if maker is not None and op_name(value) not in (TRANSFER, HINT):
                    makers[var] = maker
                    if is_open:
                        self._heads[maker] |= named
            self._nodes_by_var[var] = frozenset(named or reads)
        return self._assigned()

    def _named(self, name: str) -> set[int]:
        """The nodes of a variable, whose name may have suffixes."""
        while True:
            if name in self._names:
                return {self._names[name]}
            if name in self._aliases:
                return {self._names[alias] for alias in self._aliases[name] if alias in self._names}
            name, _, suffix = name.rpartition("_")
            if not name or not _SUFFIX.fullmatch(suffix):
                return set()

    def _plausible(self, named: set[int], reads: frozenset[int], name: str) -> set[int]:
        """The nodes `named`, unless `name` is a default one and they do not depend on the nodes that are read."""
        fits = all(any(self._ancestor_bits[node] >> read & 1 for node in named) for read in reads)
        return named if fits or not _DEFAULT_NAME.match(name) else set()

    def _reads(self, value: relax.Expr) -> frozenset[int]:
        return frozenset(node for var in used_vars(value) for node in self._nodes_by_var.get(var, ()))

    def _assigned(self) -> dict[relax.Var, tuple[int, ...]]:
        """The nodes of each kernel: its heads, and their predecessors up to other heads, inputs and transfers."""
        # If several kernels make one value, the last one owns it.
        owners = {head: var for var, heads in self._heads.items() for head in heads if self._kinds[head] == OP}
        nodes_by_kernel: dict[relax.Var, list[int]] = {var: [] for var in self._heads}
        for head, var in owners.items():
            nodes_by_kernel[var].append(head)
        assigned = set(owners)
        for var in self._heads:
            pending = list(nodes_by_kernel[var])
            while pending:
                for read, _ in self._nodes[pending.pop()].pairs():
                    if read not in assigned and self._kinds[read] == OP and self._is_computed[read]:
                        assigned.add(read)
                        nodes_by_kernel[var].append(read)
                        pending.append(read)
        return {var: tuple(sorted(nodes)) for var, nodes in nodes_by_kernel.items()}


Aliases: TypeAlias = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class Remarks:
    """Remarks of the passes about a module; a field is None until a pass sets it."""

    placement: PlacementReport | None = None  # reason of each value's device, by the import or the first RealizeVDevice
    placement_estimate: Any = None  # estimate by the cost model that placed the module, as JSON data
    encodings: EncodingReport | None = None  # layouts of encodings on each device, by SpecializeEncodings
    # Kernels and their ops, by FormDispatches, and missed fusions with their reasons, by any pass.
    fusions: FusionReport | None = None
    # The kernel calls outside of command buffers, by FormCommandBuffers.
    single_calls: tuple[SingleCall, ...] | None = None
    schedules: tuple[Schedule, ...] | None = None  # steps in which functions go through queues, by FormSchedules
    checks: tuple[CheckSpec, ...] | None = None  # checks of values that kernels make, by number, by CheckValues
    # ``function/variable`` of a product over a mesh to the reason of its sharding, by PartitionByMesh.
    shardings: dict[str, str] | None = None
    origins: dict[str, str] | None = None  # variable to the name of its node in the model's file, by the import
    graph: ModelGraph | None = None  # the ops of the placed model and their operands, by AnnotateGraph
    # Function to variable to the variables that it aliases or concatenates; function "" stands for all functions. By
    # AnnotateGraph, and by passes that make one product of several.
    aliases: Aliases | None = None

    def to_data(self) -> dict[str, Any]:
        """JSON data by field; reasons of devices include those of shardings."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.placement is not None and self.shardings:
            names = [f"{each.function}/{each.variable.partition('@')[0]}" for each in self.placement.entries]
            reasons = zip(self.placement.entries, map(self.shardings.get, names), strict=True)
            values["placement"] = PlacementReport(
                [
                    replace(entry, reason=f"{entry.reason}; {reason}") if reason and entry.kind == "op" else entry
                    for entry, reason in reasons
                ]
            )
        return {name: to_data(value) for name, value in values.items()}


def _attribute(name: str) -> str:
    return f"relax_hetero.{name}"


@functools.lru_cache(maxsize=64)
def _read(name: str, text: str) -> Any:
    return from_data(get_type_hints(Remarks)[name], json.loads(text))


def remarks_of(mod: tvm.IRModule) -> Remarks:
    """Remarks about a module. Each text is parsed once; the reports are shared, so callers must not change them."""
    attrs = mod.attrs or {}
    names = [field.name for field in fields(Remarks)]
    return Remarks(**{name: _read(name, str(attrs[_attribute(name)])) for name in names if _attribute(name) in attrs})


def with_remarks(mod: tvm.IRModule, **remarks: Any) -> tvm.IRModule:
    """Set some fields of the module's record; None removes a field."""
    for name, value in remarks.items():
        if value is not None:
            mod = mod.with_attr(_attribute(name), json.dumps(to_data(value)))
        elif mod.attrs and _attribute(name) in mod.attrs:
            mod = mod.without_attr(_attribute(name))
    return mod


def records_remarks(mod: tvm.IRModule) -> bool:
    """Return whether the module has a record for the remarks of passes."""
    return bool(mod.attrs and _attribute("fusions") in mod.attrs)


@dataclass
class PendingRemarks:
    """Remarks of the passes that ran while this was open."""

    placements: list[PlacementReport] = field(default_factory=list)
    encodings: list[EncodingReport] = field(default_factory=list)
    fusions: FusionReport = field(default_factory=FusionReport)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def add_to(self, mod: tvm.IRModule) -> tvm.IRModule:
        """The module with these remarks in its record; the same module if there are none."""
        fused = self.fusions.dispatches or self.fusions.missed
        if not (self.placements or self.encodings or fused or self.aliases):
            return mod
        before = remarks_of(mod)
        new: dict[str, Any] = {}
        if self.placements and before.placement is None:  # later runs see the transfers of the first one as ops
            new["placement"] = self.placements[0]
        if self.encodings:
            new["encodings"] = _joined(before.encodings, self.encodings[-1])
        if self.aliases:
            aliases = before.aliases or {}
            new["aliases"] = {**aliases, "": {**aliases.get("", {}), **self.aliases}}
        fusions = before.fusions or FusionReport()
        is_recorded = any(COMMANDS in func.attrs for func in mod.functions.values())
        dispatches = fusions.dispatches if is_recorded and fusions.dispatches else self.fusions.dispatches
        missed = [*fusions.missed, *(entry for entry in self.fusions.missed if entry not in fusions.missed)]
        new["fusions"] = FusionReport(dispatches or fusions.dispatches, missed)
        return with_remarks(mod, **{name: value for name, value in new.items() if value != getattr(before, name)})


def _joined(before: EncodingReport | None, now: EncodingReport) -> EncodingReport:
    """The report of a module that was specialized before: earlier cancelled ops are not in the module any more."""
    if before is None:
        return now
    cancelled = [*before.cancelled, *(entry for entry in now.cancelled if entry not in before.cancelled)]
    latest = now if now.ops or now.transfers else before
    return EncodingReport(latest.ops, latest.transfers, cancelled)


@contextlib.contextmanager
def _open() -> Iterator[PendingRemarks]:
    remarks = PendingRemarks()
    token = OPEN_COLLECTIONS.set((*OPEN_COLLECTIONS.get(), remarks))
    try:
        yield remarks
    finally:
        OPEN_COLLECTIONS.reset(token)


def recording(work: Callable[[tvm.IRModule], tvm.IRModule], mod: tvm.IRModule) -> tvm.IRModule:
    """Run a pass, and add its remarks to the module's record, if it has one."""
    if not records_remarks(mod):
        return work(mod)
    with _open() as remarks:
        result = work(mod)
    return remarks.add_to(result)


@contextlib.contextmanager
def collect_placement() -> Iterator[list[PlacementReport]]:
    """A list to which every `RealizeVDevice` that runs inside the ``with`` block adds its report."""
    with _open() as remarks:
        yield remarks.placements


@contextlib.contextmanager
def collect_encodings() -> Iterator[list[EncodingReport]]:
    """A list to which every `SpecializeEncodings` that runs inside the ``with`` block adds its report."""
    with _open() as remarks:
        yield remarks.encodings


@contextlib.contextmanager
def collect_fusions() -> Iterator[FusionReport]:
    """A report to which the passes that run inside the ``with`` block add."""
    with _open() as remarks:
        yield remarks.fusions


def publish(report: PlacementReport | EncodingReport) -> None:
    """Add a report to all open collections."""
    for remarks in OPEN_COLLECTIONS.get():
        if isinstance(report, PlacementReport):
            remarks.placements.append(report)
        else:
            remarks.encodings.append(report)


def record_missed(function: str, variable: str, op: str, reason: str) -> None:
    """Record a missed fusion in all open collections, once."""
    entry = MissedFusion(function, variable, op, reason)
    for remarks in OPEN_COLLECTIONS.get():
        if entry not in remarks.fusions.missed:
            remarks.fusions.missed.append(entry)


def record_merged(variable: str, members: Sequence[str]) -> None:
    """Record that a variable concatenates the values of others."""
    for remarks in OPEN_COLLECTIONS.get():
        remarks.aliases[variable] = list(members)


def record_dispatches(mod: tvm.IRModule, inside: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Record the kernel calls of a module whose dispatches are formed.

    `inside`: function and variable to the names of the values that its fused kernel computes.
    """
    if not is_collecting():
        return
    vdevices = vdevices_of(mod)
    before = remarks_of(mod)
    aliases = before.aliases or {}
    entries = []
    for gv, func in relax_functions(mod):
        inside_here = {variable: names for (function, variable), names in inside.items() if function == gv.name_hint}
        aliases_here = {**aliases.get("", {}), **aliases.get(gv.name_hint, {})}
        nodes = kernel_nodes(mod, (gv.name_hint, func), before.graph, aliases_here, inside_here)
        for binding in walk_bindings(func):
            kernel = called_prim_func(mod, binding.value)
            if kernel is None:
                continue
            vdevice = call_vdevice(binding.value)
            device = device_name(vdevice, vdevices) if vdevice is not None else ""
            code = mod.functions[kernel]
            names = (gv.name_hint, binding.var.name, kernel.name_hint, device)
            computed = nodes.get(binding.var, ())
            entries.append(DispatchEntry(*names, ops_of(code), precision_of(code), computed))
    for remarks in OPEN_COLLECTIONS.get():
        remarks.fusions.dispatches = entries


# Operands and types of calls as text for messages.

_MAX_LISTED = 6  # operands, fields of a tuple, or extents in a message; longer lists are cut


def operand_text(arg: relax.Expr) -> str:
    """An operand's name, if it has one, and type."""
    if isinstance(arg, relax.Var):
        return f"{arg.name}: {type_text(arg.ty)}"
    if isinstance(arg, tvm.ir.GenericConst):
        return f"a constant: {type_text(arg.ty)}"
    if isinstance(arg, relax.Tuple):
        return f"({_listed([operand_text(field) for field in arg.fields])})"
    if isinstance(arg, relax.ShapeExpr):
        return f"({_listed(list(map(text_of, arg.values)))})"
    if isinstance(arg, tvm.ir.GlobalVar):
        return repr(str(arg.name_hint))
    text = str(arg)
    return text if len(text) <= 80 and "\n" not in text else type(arg).__name__


def type_text(ty: tvm.ir.Type) -> str:
    """A type, without its device: ``"float32[2, n]"``."""
    if isinstance(ty, relax.TensorType):
        dtype = str(ty.dtype).removeprefix("T.") if ty.dtype is not None else "any type"
        if isinstance(ty.shape, relax.ShapeExpr):
            return f"{dtype}[{_listed(list(map(text_of, ty.shape.values)))}]"
        return f"{dtype} of {ty.ndim if ty.ndim >= 0 else 'any number of'} dimensions"
    if isinstance(ty, tvm.ir.TupleType):
        return f"({_listed([type_text(field) for field in ty.fields])})"
    if type(ty) is tvm.ir.Type:
        return "of no type"
    return str(ty).removeprefix("R.")


def _listed(texts: list[str]) -> str:
    more = f", … ({len(texts)})" if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more
