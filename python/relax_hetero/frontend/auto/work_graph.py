"""Work graph of a function: arithmetic and bytes of each unit of placement, and the values between units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import tvm
import tvm_ffi
from tvm import relax

from ...op.traits import Traits, traits_of

OUTSIDE = -1  # index of the caller, which writes the inputs and reads the outputs

NamesOf = Callable[[relax.Var], str]
Loops: TypeAlias = "Mapping[tvm.ir.GlobalVar, Sequence[relax.Binding]]"

_MAX_TRIPS = 2**32  # exporters write larger numbers for loops that a condition ends


class Work(NamedTuple):
    """An op."""

    flops: float  # arithmetic operations
    bytes: float  # bytes read and written
    product: str = ""  # element type of the operands of a product or convolution; "" for other ops
    is_kernel: bool = True  # False if it is fused into the kernel of an operand


@dataclass
class WorkUnit:
    """Unit of placement: the bindings of one ONNX node, including the branches of an `If` or the body of a loop."""

    names: list[str]  # names of its nodes
    ops: list[Work] = field(default_factory=list)
    # Identity of each constant that it reads -> bytes; units share equal constants.
    weights: dict[int, float] = field(default_factory=dict)
    windows: float = 0  # bytes of 3x3 filters, which CPUs may store in Winograd's form


@dataclass
class WorkValue:
    """A value between units: its bytes, and the indices of its producer and readers, where OUTSIDE is the caller."""

    size: float
    producer: int
    readers: list[int]
    is_map: bool = False  # True if it may be a feature map, which convolutions store with channels last


@dataclass
class WorkGraph:
    """Units in program order, the values between them, and the sizes assumed for symbolic dimensions."""

    units: list[WorkUnit]
    values: list[WorkValue]
    assumed_sizes: dict[str, int] = field(default_factory=dict)


def work_graph(
    # Parts of the function; bindings in program order.
    params: Iterable[relax.Var],
    bindings: Iterable[relax.Binding],
    outputs: Iterable[relax.Expr],
    name_of: NamesOf,  # variable -> name; bindings of one name are one unit, even if others are between them
    symbolic_extent: int,  # assumed size of symbolic dimensions, and trips of loops with a dynamic number
    loops: Loops | None = None,  # function of a loop -> its bindings; a call of it is one unit
) -> WorkGraph:
    """Build the work graph of a function."""
    return _GraphBuilder(name_of, symbolic_extent, loops or {}).graph(params, bindings, outputs)


class _GraphBuilder:
    def __init__(self, name_of: NamesOf, symbolic_extent: int, loops: Loops) -> None:
        self._name_of = name_of
        self._loops = loops
        self._extent = symbolic_extent
        self._units: list[WorkUnit] = []
        self._unit_of: dict[str, int] = {}
        self._values: dict[relax.Var, WorkValue] = {}
        self._bound: set[relax.Var] = set()
        self._map_ranks: set[int] = set()  # of results of convolutions
        self._symbols: set[str] = set()

    def graph(
        self, params: Iterable[relax.Var], bindings: Iterable[relax.Binding], outputs: Iterable[relax.Expr]
    ) -> WorkGraph:
        for param in params:
            self._values[param] = WorkValue(self._size(param.ty), OUTSIDE, [])
        for binding in bindings:
            unit = self._unit_index(binding)
            self._units[unit].ops += self._work(binding.value)
            self._units[unit].weights |= self._weight_bytes(binding.value)
            self._units[unit].windows += self._window_bytes(binding.value)
            for var in relax.analysis.free_vars(binding.value):
                self._add_reader(var, unit)
            self._values[binding.var] = WorkValue(self._size(binding.var.ty), unit, [])
            self._bound.add(binding.var)
            if isinstance(binding.value, relax.Call) and _traits(binding.value).kind.startswith("conv"):
                self._map_ranks.add(binding.var.ty.ndim)
        for output in outputs:
            for var in relax.analysis.free_vars(output):
                self._add_reader(var, OUTSIDE)
        crossing = {var: value for var, value in self._values.items() if value.readers and value.size > 0}
        for var, value in crossing.items():
            value.readers = list(dict.fromkeys(value.readers))
            value.is_map = isinstance(var.ty, relax.TensorType) and var.ty.ndim in self._map_ranks
        return WorkGraph(self._units, list(crossing.values()), dict.fromkeys(sorted(self._symbols), self._extent))

    def _unit_index(self, binding: relax.Binding) -> int:
        name = self._name_of(binding.var)
        if name not in self._unit_of:
            self._unit_of[name] = len(self._units)
            self._units.append(WorkUnit([name]))
        unit = self._unit_of[name]
        for inner in _inner_bindings(binding.value, self._loops):
            inner_name = self._name_of(inner.var)
            if self._unit_of.setdefault(inner_name, unit) == unit and inner_name not in self._units[unit].names:
                self._units[unit].names.append(inner_name)
        return unit

    def _add_reader(self, var: relax.Var, reader: int) -> None:
        value = self._values.get(var)
        if value is not None and value.producer != reader and reader not in value.readers[-1:]:
            value.readers.append(reader)

    def _weight_bytes(self, value: relax.Expr) -> dict[int, float]:
        sizes: dict[int, float] = {}

        def add(constant: tvm.ir.GenericConst) -> None:
            sizes[hash(constant.value)] = self._size(constant.ty)

        loop_bindings = self._body(value) if isinstance(value, relax.Call) else []
        for expr in (value, *(binding.value for binding in loop_bindings)):
            tvm_ffi.structural_walk(expr, (tvm.ir.GenericConst, add))
        return sizes

    def _body(self, call: relax.Call) -> Sequence[relax.Binding]:
        """The bindings of a called loop; empty for other calls."""
        return self._loops.get(call.op, ()) if isinstance(call.op, tvm.ir.GlobalVar) else ()

    def _loop_work(self, call: relax.Call, body: Sequence[relax.Binding]) -> list[Work]:
        """The work of all trips, as if each kernel ran once for all of them."""
        limit = call.args[1]
        is_static = isinstance(limit, tvm.ir.GenericConst) and int(limit.value.numpy()) < _MAX_TRIPS
        trips = int(limit.value.numpy()) if is_static else self._extent
        loops = {gv: inner for gv, inner in self._loops.items() if gv != call.op}
        body_graph = _GraphBuilder(self._name_of, self._extent, loops)
        ops = [work for binding in body for work in body_graph._work(binding.value)]
        return [op._replace(flops=op.flops * trips, bytes=op.bytes * trips) for op in ops]

    def _window_bytes(self, value: relax.Expr) -> float:
        """Bytes of a convolution's filter if Winograd's form applies; 0 within branches."""
        if not isinstance(value, relax.Call) or _traits(value).kind != "conv" or len(value.attrs.strides) < 2:
            return 0
        weight, steps = value.args[1], {*map(int, value.attrs.strides[-2:]), *map(int, value.attrs.dilation[-2:])}
        is_window = self._dims(weight.ty)[-2:] == [3, 3] and steps == {1} and str(weight.ty.dtype) == "float32"
        return self._size(weight.ty) if is_window else 0

    def _work(self, value: relax.Expr) -> list[Work]:
        """The work of each op in a bound value; for an `If`, that of the larger branch."""
        if isinstance(value, relax.If):
            branches = [
                [work for binding in _bindings(branch) for work in self._work(binding.value)]
                for branch in (value.true_branch, value.false_branch)
            ]
            return max(branches, key=lambda ops: (sum(op.flops for op in ops), sum(op.bytes for op in ops)))
        if isinstance(value, relax.Call) and self._body(value):
            return self._loop_work(value, self._body(value))
        if not isinstance(value, relax.Call) or self._size(value.ty) == 0 or not _traits(value).flops:
            return []
        traits = _traits(value)
        args, result_bytes = [*_tensor_args(value)], self._size(value.ty)
        sizes = [self._size(arg.ty) for arg in args]
        if traits.joins_operand and any(arg in self._bound for arg in args if isinstance(arg, relax.Var)):
            # The fused kernel keeps the operand in registers and writes the result in its place.
            return [Work(self._flops(value), sum(sizes) - max(sizes), is_kernel=False)]
        is_product = traits.kind in ("product", "conv", "conv_transpose")
        return [Work(self._flops(value), result_bytes + sum(sizes), str(value.args[0].ty.dtype) if is_product else "")]

    def _flops(self, call: relax.Call) -> float:
        kind, result_elements = _traits(call).kind, self._elements(call.ty)
        if kind == "product":
            return 2 * result_elements * self._dims(call.args[0].ty)[-1]
        if kind == "conv_transpose":
            return 2 * self._elements(call.args[0].ty) * math.prod(self._dims(call.args[1].ty)[1:])
        if kind == "conv":
            return 2 * result_elements * math.prod(self._dims(call.args[1].ty)[1:])
        if kind == "attention":
            keys = self._dims(call.args[1].ty)
            return 4 * self._elements(call.args[0].ty) * (keys[1] if len(keys) > 1 else 1)
        if kind == "einsum":
            return 2 * math.prod(self._elements(arg.ty) for arg in _tensor_args(call)) / max(result_elements, 1)
        if kind in ("max_pool", "avg_pool"):
            return result_elements * math.prod(int(size) for size in call.attrs.pool_size)
        largest = max([result_elements, *(self._elements(arg.ty) for arg in _tensor_args(call))])
        return largest * _traits(call).flops

    def _dims(self, ty: tvm.ir.Type) -> list[int]:
        if not isinstance(ty, relax.TensorType):
            return [1]
        if isinstance(ty.shape, relax.ShapeExpr):
            self._symbols.update(str(dim) for dim in ty.shape.values if isinstance(dim, tvm.tirx.Var))
            return [int(dim) if isinstance(dim, tvm.tirx.IntImm) else self._extent for dim in ty.shape.values] or [1]
        return [self._extent] * max(int(ty.ndim), 1)

    def _elements(self, ty: tvm.ir.Type) -> float:
        if isinstance(ty, tvm.ir.TupleType):
            return sum(self._elements(field) for field in ty.fields)
        return math.prod(self._dims(ty)) if isinstance(ty, relax.TensorType) else 0

    def _size(self, ty: tvm.ir.Type) -> float:
        """Bytes of all tensors in a type; 0 for shapes and numbers, which stay on the host."""
        if isinstance(ty, tvm.ir.TupleType):
            return sum(self._size(field) for field in ty.fields)
        return self._elements(ty) * _itemsize(ty) if isinstance(ty, relax.TensorType) else 0


def _itemsize(ty: relax.TensorType) -> float:
    bits = tvm.DataType(str(ty.dtype)).bits if ty.dtype is not None and str(ty.dtype) not in ("", "void") else 32
    return bits / 8 if bits != 1 else 1


def _traits(call: relax.Call) -> Traits:
    return traits_of(str(call.op.name) if isinstance(call.op, tvm.ir.Op) else None)


def _tensor_args(call: relax.Call) -> Iterator[relax.Expr]:
    for arg in call.args:
        if isinstance(arg, relax.Tuple):
            yield from arg.fields
        elif not tvm.ir.is_prim_expr(arg):
            yield arg


def _bindings(expr: relax.Expr) -> Iterator[relax.Binding]:
    if isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            yield from block.bindings


def _inner_bindings(value: relax.Expr, loops: Loops) -> Iterator[relax.Binding]:
    bindings: list[relax.Binding] = []
    if isinstance(value, relax.If):
        bindings = [binding for branch in (value.true_branch, value.false_branch) for binding in _bindings(branch)]
    elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar) and value.op in loops:
        bindings = list(loops[value.op])
        loops = {gv: body for gv, body in loops.items() if gv != value.op}  # the body ends with a recursive call
    for binding in bindings:
        yield binding
        yield from _inner_bindings(binding.value, loops)
