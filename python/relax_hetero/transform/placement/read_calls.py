"""Read calls: ops, hints and transfers, Relax functions, local functions and closures."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ...errors import PlacementError
from ...op.placement import hinted_vdevice
from ..ir.op_names import HINT, TRANSFER
from . import ops
from .callee_summary import RecursionGroup, mention
from .graph import ANY, HOST, ConstLeaf, FuncTree, Graph, Origin, Spot, Tree, nodes_of, place_text, tensors_of
from .program import CallRef, Program, Record, Unit
from .trees import Trees, names_device

PLAIN = (relax.Var, relax.DataflowVar)


class CallReader:
    """What is known of a recursion group while its functions are read, and how calls add to it.

    Attributes
    ----------
    unit, name
        The function of the module that is being read.
    callees : list of CallRef
        Of the binding that is being read.
    spot : Spot
        That binding.
    makers : dict
        Values of unknown kind -> the site that makes them: a match_cast to a tensor ties them.
    """

    def __init__(self, program: Program, units: dict[str, Unit], groups: Sequence[RecursionGroup]) -> None:
        self.program = program
        self.units = units
        self.groups = groups
        self.graph = Graph()
        self.trees = Trees(program, self.graph)
        self.access = self.trees.access
        self.unit: Unit
        self.name = ""
        self.callees: list[CallRef] = []
        self.spot = Spot("", None)
        self.makers: dict[int, int] = {}

    def _of(self, expr: relax.Expr) -> Tree:
        if type(expr) in PLAIN:
            return self.trees.variable(expr)
        return self.trees.of(expr, self._mention)

    def _mention(self, gvar: tvm.ir.GlobalVar) -> Tree:
        """The tree of a Relax function, None for a PrimFunc; notes which clone of it this place needs."""
        name = str(gvar.name_hint)
        unit = self.units.get(name)
        if unit is not None:
            self.callees.append(CallRef(unit, {}))
            return unit.tree
        callee = self.program.units.get(name)
        if callee is None:
            return None
        spot = Spot(self.name, self.spot.var, f"call of '{name}'")
        tree, ref = mention(self.graph, callee, self.groups[callee.group], spot)
        self.callees.append(ref)
        self.unit.calls.append(ref)
        return tree

    def _spot(self, record: Record) -> Spot:
        return Spot(self.name, record.var, record.op)

    def _host_read(self, record: Record, args: list[relax.Expr]) -> None:
        record.args = args
        record.trees = [self._of(arg) for arg in args]
        record.wants, record.host_read = HOST, True
        for tree in record.trees:
            for leaf in tensors_of(tree):
                if isinstance(leaf, ConstLeaf):
                    leaf.use(HOST)

    def _call(self, record: Record, call: relax.Call) -> None:
        op = call.op
        args = list(call.args)
        if type(op) is tvm.ir.Op:
            name = str(op.name)
            record.op = name
            if name == HINT or name == TRANSFER:
                self._crossing(record, call, args)
                return
            if name in ops.CALLS_OF_FIRST_ARGUMENT:
                self._op(record, call, args, ops.callee_name(call) or "")
                return
            if name == ops.MAKE_CLOSURE:
                self._make_closure(record, args)
                return
            if name in ops.INVOKE_CLOSURE:
                self._invoke(record, call, self._of(args[0]), args, first=1)
                return
            self._op(record, call, args, name)
            return
        record.op = ops.callee_name(call) or ""
        if record.op:
            self._op(record, call, args, record.op)
        elif isinstance(op, tvm.ir.GlobalVar):
            name = str(op.name_hint)
            tree = self._mention(op)
            record.op = f"call of '{name}'"
            if tree is None:
                record.op = name
                self._op(record, call, args, name)
            else:
                self._invoke(record, call, tree, args)
        elif type(op) in PLAIN and not isinstance(op.ty, relax.PackedFuncType):
            record.op = f"call of '{op.name}'"
            self._invoke(record, call, self._of(op), args)
        else:
            record.op = "call"
            self._op(record, call, args, "")

    def _op(self, record: Record, call: relax.Call, args: list[relax.Expr], name: str) -> None:
        """An op whose tensors share a device, or that the host reads, makes, or copies."""
        record.kind = "op"
        graph, var = self.graph, record.var
        if name in ops.HOST_READS:
            self._host_read(record, args)
        else:
            record.args = args
            record.trees = [self._of(arg) for arg in args]
        operands: list[int] = []
        constants: list[ConstLeaf] = []
        for tree in record.trees:
            if type(tree) is int:
                operands.append(tree)
            elif tree is not None:
                for leaf in tensors_of(tree):
                    if isinstance(leaf, ConstLeaf):
                        constants.append(leaf)
                    else:
                        operands.append(leaf)
        ties = not (record.host_read or name in ops.CROSSING)
        site = ANY
        if ties and (operands or constants or names_tensor(var.ty)):
            site = graph.add(self._spot(record))
            opaque = graph.opaque
            for node in operands:
                if node not in opaque:
                    graph.connect(node, site)
            for leaf in constants:
                leaf.use(site)
            record.wants = site
        record.site = site
        record.stale = (not record.host_read) and ops.may_write(call)
        home = record.home = self.trees.make(var.ty, var, self.name)
        record.produced = home
        self.trees.declare(var.ty, home, Origin("variable", var.name, self.name), operands)
        if len(call.ty_args) and names_device_in(call.ty_args):
            self._declare_ty_args(record, call)
        made_on_host = name in ops.HOST_MADE and self.program.host >= 0
        for node in nodes_of(home):
            if made_on_host:
                graph.made_on_host.add(node)
            elif site != ANY:
                if node in graph.opaque:
                    self.makers[node] = site
                else:
                    graph.connect(site, node)
        if made_on_host:
            record.produced = HOST

    def _declare_ty_args(self, record: Record, call: relax.Call) -> None:
        """``out_ty`` fixes results as an annotation does; where both differ, it fixes the op and they the results."""
        types = list(call.ty_args)
        ty = types[0] if len(types) == 1 else tvm.ir.TupleType(types)
        origin = Origin("out_ty", record.var.name, self.name)
        self._declare_out(ty, record.home, record.site, origin)

    def _declare_out(self, ty: tvm.ir.Type, tree: Tree, site: int, origin: Origin) -> None:
        if isinstance(ty, relax.TensorType) and ty.vdevice is not None and isinstance(tree, int):
            device = self.program.index_of(ty.vdevice, f"'{origin.name}' in function '{origin.function}'")
            known = self.graph.fixed.get(tree)
            if known is None:
                self.graph.fixed[tree] = (device, origin)
            elif known[0] != device and site != ANY:
                self.graph.fixed.setdefault(site, (device, origin))
        elif isinstance(ty, tvm.ir.TupleType) and isinstance(tree, tuple):
            for sub_ty, sub in zip(ty.fields, tree, strict=False):
                self._declare_out(sub_ty, sub, site, origin)

    def _crossing(self, record: Record, call: relax.Call, args: list[relax.Expr]) -> None:
        """A hint or a transfer: the result is fixed, the operand is not tied to it."""
        var, is_hint = record.var, record.op == HINT
        vdevices = self.program.vdevices
        vdevice = hinted_vdevice(call, vdevices) if is_hint else call.attrs.dst_vdevice
        device = self.program.index_of(vdevice, record.op)
        record.kind, record.device = ("hint" if is_hint else "to_vdevice"), device
        record.args, record.trees = args, [self._of(args[0])]
        home = record.home = record.produced = self.trees.make(var.ty, var, self.name)
        origin = Origin(record.kind, var.name, self.name)
        constant = self.constant_of(record.trees[0])
        if constant is not None and isinstance(home, int):
            self.graph.constants[home] = constant
        for leaf in tensors_of(record.trees[0]):
            if isinstance(leaf, ConstLeaf):
                leaf.use(ANY, device)
            elif is_hint:
                self.graph.hints.setdefault(leaf, []).append((device, origin))
        for node in nodes_of(home):
            self.graph.fixed[node] = (device, origin)
        self._check_crossing(var.ty, args[0].ty, home, record)

    def constant_of(self, tree: Tree) -> relax.Expr | None:
        """The constant that a tensor is, if it is one."""
        if isinstance(tree, ConstLeaf):
            return tree.expr
        return self.graph.constants.get(tree) if isinstance(tree, int) else None

    def _check_crossing(self, ty: tvm.ir.Type, source: tvm.ir.Type, tree: Tree, record: Record) -> None:
        """The annotation of a crossing's result must agree, unless inference took it over from the operand."""
        if isinstance(ty, tvm.ir.TupleType) and isinstance(tree, tuple):
            sources = source.fields if isinstance(source, tvm.ir.TupleType) else [source] * len(tree)
            for sub, sub_source, sub_tree in zip(ty.fields, sources, tree, strict=False):
                self._check_crossing(sub, sub_source, sub_tree, record)
        elif isinstance(ty, relax.TensorType) and ty.vdevice is not None and isinstance(tree, int):
            declared = self.program.index_of(ty.vdevice, record.op)
            if declared == record.device:
                return
            names = self.program.names
            inherits = isinstance(source, relax.TensorType) and source.vdevice is not None
            if not inherits or self.program.index_of(source.vdevice, record.op) != declared:
                raise PlacementError(
                    f"{place_text(record.op, record.var.name, self.name)} is to {names[record.device]}, but its "
                    f"annotation says {names[declared]}"
                )
            self.graph.hearsay[tree] = declared

    def _make_closure(self, record: Record, args: list[relax.Expr]) -> None:
        """The function with its last parameters bound."""
        record.kind, record.args = "op", args
        func, bound = self._of(args[0]), self._of(args[1])
        record.trees = [func, bound]
        if not isinstance(func, FuncTree) or not isinstance(bound, tuple):
            self._unknown_callee(record)
            record.home = record.produced = self.trees.make(record.var.ty, record.var, self.name)
            return
        free = len(func.params) - len(bound)
        record.wants = [None, self.trees.tie(bound, func.params[free:], self._spot(record))]
        record.home = record.produced = FuncTree(func.params[:free], func.ret)

    def _invoke(self, record: Record, call: relax.Call, func: Tree, args: list[relax.Expr], first: int = 0) -> None:
        """A call of a Relax function, a local function or a closure: arguments are passed, results received."""
        if not isinstance(func, FuncTree):
            self._unknown_callee(record)
            self._op(record, call, args, "")
            return
        record.kind, record.args = "call", args
        record.stale = ops.may_write(call)
        spot = self._spot(record)
        record.trees = [None] * first + [self._of(arg) for arg in args[first:]]
        if first:
            passed = record.trees[1]
            record.wants = [None, self.trees.tie(passed, func.params, spot)]
        else:
            record.wants = [
                self.trees.tie(tree, param, spot) for tree, param in zip(record.trees, func.params, strict=False)
            ]
        var = record.var
        record.home = self.trees.make(var.ty, var, self.name) if not isinstance(func.ret, FuncTree) else func.ret
        record.produced = func.ret
        if record.home is not func.ret:
            self.trees.tie(func.ret, record.home, spot)
            origin = Origin("variable", var.name, self.name)
            self.trees.declare(var.ty, record.home, origin, (func.ret,), fieldwise=True)

    def _unknown_callee(self, record: Record) -> None:
        if len(self.program.vdevices) > 1:
            raise PlacementError(
                f"{place_text(record.op, record.var.name, self.name)}: the function it calls is not known here, so "
                "neither are the devices it takes its arguments on; call it by name, or as a local function"
            )


def names_tensor(ty: tvm.ir.Type) -> bool:
    """Whether an op with a result of this type makes something that may be a tensor."""
    if isinstance(ty, tvm.ir.TupleType):
        return any(names_tensor(field) for field in ty.fields)
    return isinstance(ty, (relax.TensorType, relax.AnyType))


def names_device_in(types: Sequence[tvm.ir.Type]) -> bool:
    """Whether any of the types names a vdevice."""
    return any(names_device(ty) for ty in types)
