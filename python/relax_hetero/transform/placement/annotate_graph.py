"""AnnotateGraph: store the graph of the placed model as data in the module, for reports.

Before::

    y: R.Tensor((4,), "float32", "llvm:0") = R.exp(x)

After, the same with::

    I.module_attrs({"relax_hetero.graph": '{"texts": ["", "y", "relax.exp", ...], ...}'})

Later passes fuse, encode and lower the ops to kernels. The graph has the ops and the values between them, with shapes,
devices and the names of the model's file. Variables keep their names, by which FormDispatches records the ops that each
kernel computes (`transform.ir.kernel_nodes`).

Assumes a placed module in A-normal form that records remarks (`RecordRemarks`). A second run changes nothing; a
lowered module is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ...artifact.model_graph import (
    CONSTANT,
    INPUT,
    KINDS,
    OP,
    OUTPUT,
    TRANSFER,
    FunctionGraph,
    GraphNode,
    GraphValue,
    ModelGraph,
)
from ...target.vdevice import device_name, vdevices_of
from ..ir.declare import declare_pass
from ..ir.extents import dim_or_script
from ..ir.kernels import tensor_bytes
from ..ir.module_attrs import is_lowered
from ..ir.remarks import Aliases, records_remarks, remarks_of, with_remarks
from ..ir.rewriting import handle, relax_functions, tensor_types, vdevice_in, walk_bindings

_Read = tuple[int, int]  # a node of the function, and an index among its values; -1 for all of them

_TRANSFERS = ("relax.to_vdevice", "relax.hint_on_device", "relax_hetero.to_device")


def annotate_graph(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if not records_remarks(mod) or is_lowered(mod) or remarks_of(mod).graph is not None:
        return mod
    return with_remarks(mod, graph=graph_of(mod), aliases=_aliases(mod) or None)


def graph_of(mod: tvm.IRModule) -> ModelGraph:
    """The graph of a module in A-normal form, with the devices of its types."""
    tables = _Tables(mod)
    functions = tuple(_Function(tables, func).graph(str(gv.name_hint)) for gv, func in relax_functions(mod))
    return ModelGraph(tuple(tables.texts), tuple(tables.values), functions)


def _aliases(mod: tvm.IRModule) -> Aliases:
    """Variables that are bound to other variables: later passes keep only one of the names."""
    aliases: Aliases = {}
    for gv, func in relax_functions(mod):
        originals: dict[relax.Var, relax.Var] = {}
        for binding in walk_bindings(func):
            if isinstance(binding.value, relax.Var):
                originals[binding.var] = originals.get(binding.value, binding.value)
        if originals:
            aliases[str(gv.name_hint)] = {var.name: [value.name] for var, value in originals.items()}
    return aliases


AnnotateGraph = declare_pass("AnnotateGraph", annotate_graph)


class _Tables:
    """Tables of the graph's texts and values, without duplicates."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.texts: dict[str, int] = {"": 0}
        self.values: dict[GraphValue, int] = {}
        self.origins = remarks_of(mod).origins or {}
        self._vdevices = vdevices_of(mod)
        self._devices: dict[int, int] = {}

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def device(self, ty: tvm.ir.Type) -> int:
        """Index of the name of the device of the first tensor in a type."""
        vdevice = vdevice_in(ty)
        if vdevice is None:
            return 0
        key = handle(vdevice)
        if key not in self._devices:
            self._devices[key] = self.text(device_name(vdevice, self._vdevices))
        return self._devices[key]

    def values_of(self, ty: tvm.ir.Type) -> tuple[int, ...]:
        """Indices of the values of a type: one for each tensor in it."""
        return tuple(self._value(tensor) for tensor in tensor_types(ty))

    def _value(self, ty: relax.TensorType) -> int:
        dtype = "" if ty.dtype is None else str(ty.dtype.dtype if isinstance(ty.dtype, tvm.ir.PrimType) else ty.dtype)
        shape: tuple[int | str, ...] | None = None
        if isinstance(ty.shape, relax.ShapeExpr):
            shape = tuple(dim_or_script(extent) for extent in ty.shape.values)
        sizes = [extent for extent in shape or () if isinstance(extent, int)]
        is_static = shape is not None and dtype != "" and len(sizes) == len(shape)
        value = GraphValue(shape, self.text(dtype), int(tensor_bytes(sizes, tvm.DataType(dtype))) if is_static else -1)
        return self.values.setdefault(value, len(self.values))


class _Function:
    """Builder of the graph of one function."""

    def __init__(self, tables: _Tables, func: relax.Function) -> None:
        self._tables, self._func = tables, func
        self._nodes: list[GraphNode] = []
        # Reads of each variable; a tuple that is written out has one read for each field.
        self._reads: dict[relax.Var, list[_Read]] = {}
        self._constants: dict[tvm.ir.Constant, int] = {}

    def graph(self, name: str) -> FunctionGraph:
        for param in self._func.params:
            self._reads[param] = [(self._add(INPUT, param.name, "", param.ty, []), -1)]
        for read in self._sequence(self._func.body):
            self._add(OUTPUT, f"result {self._outputs()}", "", self._type_of(read), [read])
        return FunctionGraph(name, tuple(self._nodes))

    def _outputs(self) -> int:
        return sum(KINDS[node.kind] == OUTPUT for node in self._nodes)

    def _add(self, kind: str, name: str, op: str, ty: Any, reads: Sequence[_Read]) -> int:
        tables = self._tables
        values = ty if isinstance(ty, tuple) else tables.values_of(ty)
        device = 0 if isinstance(ty, tuple) else tables.device(ty)
        if isinstance(ty, tuple) and reads:
            device = self._nodes[reads[0][0]].device
        source = tables.text(tables.origins.get(name, ""))
        flat = tuple(number for read in dict.fromkeys(reads) for number in read)
        self._nodes.append(
            GraphNode(KINDS.index(kind), tables.text(name), tables.text(op), source, device, values, flat)
        )
        return len(self._nodes) - 1

    def _type_of(self, read: _Read) -> tuple[int, ...]:
        values = self._nodes[read[0]].values
        return values if read[1] < 0 else (values[read[1]],)

    def _sequence(self, body: relax.Expr) -> list[_Read]:
        if not isinstance(body, relax.SeqExpr):
            return self._reads_of(body)
        for block in body.blocks:
            for binding in block.bindings:
                self._bind(binding)
        return self._reads_of(body.body)

    def _bind(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.Function):
            return  # a local function; its calls read their arguments
        if isinstance(value, relax.If):
            reads = [
                *self._reads_of(value.cond),
                *self._sequence(value.true_branch),
                *self._sequence(value.false_branch),
            ]
            self._reads[var] = [(self._add(OP, var.name, "if", var.ty, reads), -1)]
        elif isinstance(value, relax.Call) and not tvm.ir.is_prim_expr(value):
            reads = [read for arg in value.args for read in self._reads_of(arg)]
            op = _op_text(value)
            kind = TRANSFER if op in _TRANSFERS else OP
            self._reads[var] = [(self._add(kind, var.name, op, var.ty, reads), -1)]
        else:
            self._reads[var] = self._reads_of(value)

    def _reads_of(self, expr: Any) -> list[_Read]:
        """Reads of an expression; none for shapes and attributes."""
        if isinstance(expr, relax.Var):
            return self._reads.get(expr, [])
        if isinstance(expr, tvm.ir.Constant):
            if expr not in self._constants:
                self._constants[expr] = self._add(CONSTANT, f"constant {len(self._constants)}", "", expr.ty, [])
            return [(self._constants[expr], -1)]
        if isinstance(expr, relax.Tuple):
            return [read for field in expr.fields for read in self._reads_of(field)]
        if isinstance(expr, relax.TupleGetItem):
            return self._field(expr)
        return []

    def _field(self, expr: relax.TupleGetItem) -> list[_Read]:
        reads, index = self._reads_of(expr.tuple_value), int(expr.index)
        if len(reads) == 1 and reads[0][1] < 0 and index < len(self._nodes[reads[0][0]].values):
            return [(reads[0][0], index)]
        return [reads[index]] if 1 < len(reads) > index else reads


def _op_text(call: relax.Call) -> str:
    op = call.op
    if isinstance(op, tvm.ir.Op):
        first = call.args[0] if call.args else None
        callee = getattr(first, "global_symbol", None) or getattr(first, "name_hint", None)
        is_call = op.name.startswith(("relax.call_", "relax.vm.call_"))
        return f"{op.name} {callee}" if is_call and callee else str(op.name)
    return str(getattr(op, "name_hint", None) or getattr(op, "global_symbol", None) or getattr(op, "name", "call"))
