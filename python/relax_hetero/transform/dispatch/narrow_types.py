"""Element types that LLVM does not compute with, on CPUs: 8-bit floats become bytes and float32, others are refused.

TVM hands arithmetic on such types to LLVM, which ends in an error of LLVM, in a crash, or in wrong numbers. Here
an op that moves 8-bit floats moves bytes, and one that computes does so in float32, as ml_dtypes does for numpy:
the result is rounded to its type. Elements of less than a byte are packed, and no op reads those.

Before::

    z: R.Tensor((4,), "float8_e5m2") = R.add(x, y)

After, with kernels in place of the conversions::

    a: R.Tensor((4,), "float32") = number_of(R.memory.view(x, dtype="uint8"))
    b: R.Tensor((4,), "float32") = number_of(R.memory.view(y, dtype="uint8"))
    c: R.Tensor((4,), "uint8") = code_of(R.add(a, b))
    z: R.Tensor((4,), "float8_e5m2") = R.memory.view(c, dtype="float8_e5m2")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tvm
from tvm import relax, te, tirx

from ...op.traits import ELEMENTWISE, ops_where, relax_ops
from ...target.vdevice import is_cpu
from ...tir.math.narrow_floats import FLOAT8, FLOATS, code_of, number_of
from ...vm.device.tensor_arrays import host_array
from ..ir.op_names import CAST
from ..ir.rewriting import is_tensor_constant, op_name, with_args
from .sort_kernels import Legalize

_Convert = Callable[[relax.Expr], relax.Expr]

_FLOAT8 = {name for name in FLOATS if name.startswith("float8")}
_MOVES = ops_where(lambda op: op.ignores_numbers and (op.moves or op.is_elementwise) and not op.needs_no_kernel)
_COMPUTES = (ELEMENTWISE - _MOVES) | ops_where(lambda op: op.kind == "reduction") | {*relax_ops("argmax argmin matmul")}
_NO_BOOLEANS = frozenset(
    relax_ops(
        """subtract divide floor_divide mod floor_mod power sum prod mean cumsum cumprod matmul nn.relu clip negative
        abs square"""
    )
)
"""Ops without a stock kernel for booleans; numpy computes them in integers, or refuses them."""


def refused_type(call: relax.Call) -> str | None:
    """The first element type of an op's tensors that CPUs cannot compute this op with; None if there is none."""
    name = op_name(call)
    for ty in _tensors(call):
        dtype = str(ty.dtype)
        if ty.vdevice is not None and not is_cpu(ty.vdevice):
            return None
        is_narrow = dtype in FLOATS or tvm.DataType(dtype).bits < 8 and dtype != "bool"
        if is_narrow and not (dtype in _FLOAT8 and name in _MOVES | _COMPUTES):
            return dtype
        if dtype in _FLOAT8 - set(FLOAT8) and name in _COMPUTES and (name != CAST or dtype == str(call.ty.dtype)):
            return dtype  # powers of two have no zero, and no sign
        if dtype == "bool" and name in _NO_BOOLEANS:
            return dtype
    return None


def legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; other types use those of `others`, else TVM's."""
    result = {}
    for name in _MOVES | _COMPUTES:
        otherwise = others.get(name) or tvm.ir.Op.get(name).get_attr("FLegalize")
        if otherwise is not None:
            result[name] = _move_legalization(otherwise) if name in _MOVES else _compute_legalization(otherwise)
    return result


def _move_legalization(otherwise: Legalize) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _has_float8_on_cpu(call):
            return otherwise(builder, call)
        return _converted(
            builder, call, otherwise, lambda arg: _bytes(builder, arg), lambda x, ty: _as_float8(builder, x, ty)
        )

    return legalize


def _compute_legalization(otherwise: Legalize) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _has_float8_on_cpu(call):
            return otherwise(builder, call)

        def number(arg: relax.Expr) -> relax.Expr:
            return _as_float32(builder, arg)

        def rounded(result: relax.Expr, ty: relax.TensorType) -> relax.Expr:
            return _to_float8(builder, result, str(ty.dtype))

        if op_name(call) != CAST:
            return _converted(builder, call, otherwise, number, rounded)
        # A cast names its result's type: to an 8-bit float it goes by way of float32.
        operand = call.args[0]
        source = number(operand) if str(operand.ty.dtype) in _FLOAT8 else operand
        dtype = "float32" if str(call.ty.dtype) in _FLOAT8 else str(call.ty.dtype)
        if str(source.ty.dtype) != dtype:
            cast = builder.normalize(relax.op.astype(source, dtype))
            source = builder.emit(otherwise(builder, cast))
        return rounded(source, call.ty) if str(call.ty.dtype) in _FLOAT8 else source

    return legalize


def _converted(
    builder: relax.BlockBuilder,
    call: relax.Call,
    legalize: Legalize,
    enter: _Convert,
    leave: Callable[[relax.Expr, relax.TensorType], relax.Expr],
) -> relax.Expr:
    """The op on converted tensors: `enter` converts its 8-bit operands, `leave` converts results back."""

    def convert(arg: relax.Expr) -> relax.Expr:
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([convert(field) for field in arg.fields])
        return enter(arg) if _is_float8(arg.ty) else arg

    inner = builder.normalize(with_args(call, [convert(arg) for arg in call.args]))
    result = builder.emit(legalize(builder, inner))
    if isinstance(call.ty, tvm.ir.TupleType):
        results = (builder.emit(relax.TupleGetItem(result, index)) for index in range(len(call.ty.fields)))
        fields = zip(results, call.ty.fields, strict=True)
        return relax.Tuple([leave(field, ty) if _is_float8(ty) else field for field, ty in fields])
    return leave(result, call.ty) if _is_float8(call.ty) else result


def _bytes(builder: relax.BlockBuilder, data: relax.Expr) -> relax.Expr:
    if is_tensor_constant(data):
        return relax.const(tvm.runtime.tensor(host_array(data.value).view("uint8")))
    return builder.emit(relax.op.memory.view(data, dtype="uint8"))


def _as_float8(builder: relax.BlockBuilder, data: relax.Expr, ty: relax.TensorType) -> relax.Expr:
    return builder.emit(relax.op.memory.view(data, dtype=str(ty.dtype)))


def _as_float32(builder: relax.BlockBuilder, data: relax.Expr) -> relax.Expr:
    dtype = str(data.ty.dtype)

    def kernel(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: number_of(tirx.Cast("uint32", x(*i)), dtype), name="number")

    return builder.emit(builder.call_te(kernel, _bytes(builder, data), primfunc_name_hint="number_of"))


def _to_float8(builder: relax.BlockBuilder, data: relax.Expr, dtype: str) -> relax.Expr:
    def kernel(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: code_of(x(*i), dtype, saturates=False), name="code")

    codes = builder.emit(builder.call_te(kernel, data, primfunc_name_hint="code_of"))
    return builder.emit(relax.op.memory.view(codes, dtype=dtype))


def _has_float8_on_cpu(call: relax.Call) -> bool:
    tensors = list(_tensors(call))
    return any(map(_is_float8, tensors)) and all(
        ty.shape is not None and (ty.vdevice is None or is_cpu(ty.vdevice)) for ty in tensors
    )


def _is_float8(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in _FLOAT8


def _tensors(call: relax.Call) -> Iterator[relax.TensorType]:
    """The types of an op's tensors, those in tuples included."""
    pending: list[tvm.ir.Type] = [call.ty, *(arg.ty for arg in call.args if isinstance(arg, relax.Expr))]
    while pending:
        ty = pending.pop()
        if isinstance(ty, tvm.ir.TupleType):
            pending += list(ty.fields)
        elif isinstance(ty, relax.TensorType):
            yield ty
