"""Storage of element types that LLVM cannot compute with (fp8, int4 …) as bytes.

An imported graph moves such tensors (reshapes, transposes, concatenations, loops and branches), and converters read
their bytes. Here all of them become bytes: parameters are unpacked at the beginning of the graph, outputs packed at its
end. Parameters and outputs keep their types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import tvm
from tvm import relax, te, tirx

from ..errors import FrontendError
from ..op.traits import traits_of
from .onnx.control_flow.subgraphs import ImportedLoop
from .onnx.importer import ImportedGraph
from .onnx.node_names import NodeInfo
from .ops.storage_types import STORAGE_TYPES, stored_array

_VIEW = "relax.memory.view"

_ConvertField = Callable[[relax.Expr, tvm.ir.Type], relax.Expr]


def with_narrow_storage(graph: ImportedGraph) -> ImportedGraph:
    """Replace such elements by bytes, except in parameters and outputs.

    Raises FrontendError if a node computes with such elements without a converter that supports them; the text has its
    name.
    """
    return _StorageRewriter(graph).graph() if _has_narrow(graph) else graph


def _has_narrow(graph: ImportedGraph) -> bool:
    values = [*graph.params, *graph.outputs, *graph.owners]
    return any(_is_narrow(value.ty) for value in values) or any(
        _is_narrow(param.ty) for loop in graph.loops for param in loop.params
    )


def _is_narrow(ty: tvm.ir.Type) -> bool:
    if isinstance(ty, tvm.ir.TupleType):
        return any(map(_is_narrow, ty.fields))
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in STORAGE_TYPES


def _storage_type(ty: tvm.ir.Type) -> tvm.ir.Type:
    if isinstance(ty, tvm.ir.TupleType):
        return tvm.ir.TupleType([_storage_type(field) for field in ty.fields])
    if isinstance(ty, tvm.ir.FuncType):
        return relax.FuncType([_storage_type(param) for param in ty.params], _storage_type(ty.ret), ty.purity)
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in STORAGE_TYPES:
        return ty
    dtype = STORAGE_TYPES[str(ty.dtype)]
    return relax.TensorType(ty.shape, dtype) if ty.shape is not None else relax.TensorType(None, dtype, ndim=ty.ndim)


class _StorageRewriter:
    """Copies the bindings of one graph with storage types."""

    def __init__(self, graph: ImportedGraph) -> None:
        self._graph = graph
        self._builder = relax.BlockBuilder(graph.module)
        self._owners: dict[relax.Var, NodeInfo] = {}
        self._values: dict[relax.Var, relax.Expr] = {}
        self._owner: NodeInfo | None = None

    def graph(self) -> ImportedGraph:
        graph = self._graph
        loops = [self._loop(loop) for loop in graph.loops]
        self._builder.begin_scope(graph.params)
        try:
            first = self._collect_bindings(lambda: self._unpack_params(graph.params))
            inner = self._bindings(graph.bindings)
            outputs: list[relax.Expr] = []
            last = self._collect_bindings(lambda: outputs.extend(self._pack_output(output) for output in graph.outputs))
        finally:
            self._builder.end_scope()
        results = {
            info: [var for var in map(self._expr, values) if isinstance(var, relax.Var)]
            for info, values in graph.results.items()
        }
        return replace(
            graph,
            module=self._builder.get(),
            bindings=[*first, *inner, *last],
            outputs=outputs,
            owners=self._owners,
            results=results,
            loops=loops,
        )

    def _loop(self, loop: ImportedLoop) -> ImportedLoop:
        params, captured = ([self._var(var) for var in variables] for variables in (loop.params, loop.captured))
        relax.expr._update_type(loop.gv, _storage_type(loop.gv.ty))
        return replace(
            loop,
            params=params,
            captured=captured,
            bindings=self._bindings(loop.bindings),
            result=self._expr(loop.result),
        )

    def _collect_bindings(self, emit: Callable[[], object]) -> list[relax.Binding]:
        self._builder._begin_binding_block()
        try:
            emit()
        finally:
            bindings = list(self._builder._end_block().bindings)
        if bindings:
            assert self._owner is not None
            for binding in bindings:
                self._owners.setdefault(binding.var, self._owner)
        return bindings

    def _unpack_params(self, params: Iterable[relax.Var]) -> None:
        for param in params:
            reader = self._reader(param) if _is_narrow(param.ty) else None
            if reader is not None:
                self._owner = reader
                self._values[param] = self._unpack(param, param.ty)

    def _reader(self, var: relax.Var) -> NodeInfo | None:
        """The first node that reads a parameter."""
        for binding in self._graph.bindings:
            if var in relax.analysis.free_vars(binding.value):
                return self._graph.owners[binding.var]
        return None

    def _convert_fields(self, value: relax.Expr, ty: tvm.ir.TupleType, convert: _ConvertField) -> relax.Tuple:
        """Convert each field of a tuple."""
        items = (relax.TupleGetItem(value, index) for index in range(len(ty.fields)))
        fields = value.fields if isinstance(value, relax.Tuple) else map(self._builder.emit, items)
        return relax.Tuple([convert(part, field) for part, field in zip(fields, ty.fields, strict=True)])

    def _unpack(self, value: relax.Expr, ty: tvm.ir.Type) -> relax.Expr:
        """Convert a parameter to its storage."""
        if isinstance(ty, tvm.ir.TupleType):
            return self._builder.emit(self._convert_fields(value, ty, self._unpack))
        if not _is_narrow(ty):
            return value
        if ty.shape is None:
            raise FrontendError(f"input {value.name!r} of type {ty.dtype} has an unknown rank; give it with shapes=")
        dtype, bits = str(ty.dtype), int(tvm.DataType(str(ty.dtype)).bits)
        if bits == 8:
            return self._builder.emit(relax.op.memory.view(value, dtype=STORAGE_TYPES[dtype]))
        per_byte = 8 // bits
        count = _product(ty.shape)
        size = tvm.sym.Analyzer().simplify(tirx.floordiv(count + (per_byte - 1), per_byte))
        flat = self._builder.emit(relax.op.memory.view(value, relax.ShapeExpr([size]), "uint8"))

        def element(i: tirx.Var, x: te.Tensor) -> tirx.Expr:
            shift = (per_byte - 1 - tirx.floormod(i, per_byte)) * bits
            byte = tirx.Cast("int32", x(tirx.floordiv(i, per_byte)))
            code = tirx.bitwise_and(
                tirx.shift_right(byte, tirx.Cast("int32", shift)), tirx.const((1 << bits) - 1, "int32")
            )
            if STORAGE_TYPES[dtype] == "int8":
                half = tirx.const(1 << (bits - 1), "int32")
                code = tirx.bitwise_xor(code, half) - half
            return tirx.Cast(STORAGE_TYPES[dtype], code)

        numbers = self._builder.emit_te(
            lambda x: te.compute((count,), lambda i: element(i, x), name="unpacked"), flat, primfunc_name_hint="unpack"
        )
        return self._builder.emit(relax.op.reshape(numbers, ty.shape))

    def _pack_output(self, output: relax.Expr) -> relax.Expr:
        if output in self._graph.params:
            return output
        if isinstance(output, relax.Var):
            self._owner = self._graph.owners.get(output, self._owner)
        return self._pack(self._expr(output), output.ty) if _is_narrow(output.ty) else self._expr(output)

    def _pack(self, value: relax.Expr, ty: tvm.ir.Type) -> relax.Expr:
        """Convert storage to an output of its type."""
        if isinstance(ty, tvm.ir.TupleType):
            return self._convert_fields(value, ty, self._pack)
        if not _is_narrow(ty):
            return value
        if self._owner is None:
            raise FrontendError(f"an output of type {ty.dtype} is not made by a node")
        dtype, bits = str(ty.dtype), int(tvm.DataType(str(ty.dtype)).bits)
        if bits == 8:
            return self._builder.emit(relax.op.memory.view(value, dtype=dtype))
        if ty.shape is None:
            raise FrontendError(f"an output of type {dtype} has an unknown rank; expected a known one")
        # Allocate a byte per element, since stock TVM's inference assumes so for views.
        per_byte, count = 8 // bits, _product(ty.shape)
        flat = self._builder.emit(relax.op.reshape(value, relax.ShapeExpr([count])))

        def byte(i: tirx.Var, x: te.Tensor) -> tirx.Expr:
            codes = tirx.const(0, "int32")
            for position in range(per_byte):
                index = i * per_byte + position
                code = tirx.bitwise_and(tirx.Cast("int32", x(index)), tirx.const((1 << bits) - 1, "int32"))
                code = tirx.if_then_else(index < count, code, tirx.const(0, "int32"))
                codes = codes + tirx.shift_left(code, tirx.const((per_byte - 1 - position) * bits, "int32"))
            return tirx.Cast("uint8", codes)

        packed = self._builder.emit_te(
            lambda x: te.compute((count,), lambda i: byte(i, x), name="packed"), flat, primfunc_name_hint="pack"
        )
        return self._builder.emit(relax.op.memory.view(packed, ty.shape, dtype))

    def _bindings(self, bindings: Iterable[relax.Binding]) -> list[relax.Binding]:
        return [self._binding(binding) for binding in bindings]

    def _binding(self, binding: relax.Binding) -> relax.Binding:
        self._owner = self._graph.owners.get(binding.var, self._owner)
        value = self._expr(binding.value)
        var = self._var(binding.var)
        if self._owner is not None:
            self._owners[var] = self._owner
        if isinstance(binding, relax.MatchCast):
            return relax.MatchCast(var, value, _storage_type(binding.ty))
        return relax.VarBinding(var, value)

    def _var(self, var: relax.Var) -> relax.Var:
        if _is_narrow(var.ty):
            self._values[var] = relax.Var(var.name, _storage_type(var.ty))
        storage_var = self._values.get(var, var)
        assert isinstance(storage_var, relax.Var)
        return storage_var

    def _expr(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self._values.get(expr, expr)
        if isinstance(expr, tvm.ir.GenericConst) and _is_narrow(expr.ty):
            return relax.const(tvm.runtime.tensor(stored_array(expr.value)))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._expr(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._expr(expr.tuple_value), expr.index)
        if isinstance(expr, relax.If):
            branches = (self._branch(branch) for branch in (expr.true_branch, expr.false_branch))
            return self._with_type(relax.If(self._expr(expr.cond), *branches), expr)
        if isinstance(expr, relax.Call) and not tvm.ir.is_prim_expr(expr):
            return self._call(expr)
        return expr

    def _call(self, call: relax.Call) -> relax.Expr:
        args = [self._expr(arg) for arg in call.args]
        narrow = next((value.ty for value in (call, *call.args) if _is_narrow_value(value)), None)
        if narrow is not None:
            self._refuse_computation(call, narrow)
        if (
            isinstance(call.op, tvm.ir.Op)
            and call.op.name == _VIEW
            and args[0].ty.dtype == _storage_type(call.ty).dtype
        ):
            return args[0]
        ty_args = [_storage_type(ty) for ty in call.ty_args]
        return self._with_type(relax.Call(call.op, args, call.attrs, ty_args, call.span), call)

    def _refuse_computation(self, call: relax.Call, narrow: tvm.ir.Type) -> None:
        if isinstance(call.op, tvm.ir.GlobalVar) or traits_of(call.op.name).ignores_numbers:
            return
        what = call.args[0].name_hint if call.op.name == "relax.call_tir" else call.op.name.removeprefix("relax.")
        while isinstance(narrow, tvm.ir.TupleType):
            narrow = next(filter(_is_narrow, narrow.fields))
        raise FrontendError(
            f"node {self._owner}: {what} cannot compute with elements of type {narrow.dtype}; cast them before"
        )

    def _branch(self, branch: relax.Expr) -> relax.Expr:
        if not isinstance(branch, relax.SeqExpr):
            return self._expr(branch)
        blocks = [type(block)(self._bindings(block.bindings)) if block.bindings else block for block in branch.blocks]
        result = relax.SeqExpr(blocks, self._expr(branch.body))
        relax.expr._update_type(result, result.body.ty)
        return result

    def _with_type(self, expr: relax.Expr, like: relax.Expr) -> relax.Expr:
        if like.ty is not None:
            relax.expr._update_type(expr, _storage_type(like.ty))
        return expr


def _is_narrow_value(value: relax.Expr) -> bool:
    if isinstance(value, relax.Tuple):
        return any(map(_is_narrow_value, value.fields))
    return not tvm.ir.is_prim_expr(value) and value.ty is not None and _is_narrow(value.ty)


def _product(shape: relax.ShapeExpr) -> tirx.Expr:
    return tvm.sym.Analyzer().simplify(prod(shape.values, start=tirx.const(1, "int64")))
