"""Sorts and scans of GPUs: kernels of our own, as stock ones let threads of a block read what others are writing.

An element's place in the sorted order is the number of elements that come before it, which every thread counts for
itself: the work grows with the square of the length, and no two threads ever write the same memory. Equal elements keep
their order, and NaN is greater than every number. Cumulative sums and products are `tir.cuda.loops.scan`.

Sorts and scans of CPUs stay as they are, for TVM's DispatchSortScan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import relax, te, tirx

from ...tir.cuda.loops.scan import ScanProblem, scan_kernel
from ...tir.math.extremes import is_nan
from ..ir.extents import Symbols, known_extents
from ..ir.rewriting import typed

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_OPAQUE = 8
_ALONE = {"op_pattern": _OPAQUE}


def legalizations() -> dict[str, Legalize]:
    """By op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.sort": _of_gpus(_sort),
        "relax.argsort": _of_gpus(_argsort),
        "relax.topk": _of_gpus(_topk),
        "relax.cumsum": _of_gpus(partial(_scan, "sum")),
        "relax.cumprod": _of_gpus(partial(_scan, "prod")),
    }


def _of_gpus(legalize: Legalize) -> Legalize:
    def of_gpus(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        vdevice = call.args[0].ty.vdevice
        is_gpu = vdevice is not None and vdevice.target.kind.name == "cuda"
        return legalize(builder, call) if is_gpu and known_extents(call.args[0].ty) is not None else call

    return of_gpus


def _sort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def kernel(x: te.Tensor) -> te.Tensor:
        return _sorted(x, int(call.attrs.axis), bool(call.attrs.descending), None, "int64")[0]

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="sort", primfunc_attrs=_ALONE)


def _argsort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def kernel(x: te.Tensor) -> te.Tensor:
        return _sorted(x, int(call.attrs.axis), bool(call.attrs.descending), None, str(call.ty.dtype))[1]

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="argsort", primfunc_attrs=_ALONE)


def _topk(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs, wanted = call.attrs, str(call.attrs.ret_type)
    types = list(call.ty.fields) if isinstance(call.ty, tvm.ir.TupleType) else [call.ty]
    axis = int(attrs.axis)
    count = types[0].shape.values[axis]

    def kernel(x: te.Tensor) -> list[te.Tensor] | te.Tensor:
        values, indices = _sorted(x, axis, bool(attrs.largest), count, str(attrs.dtype))
        return [values, indices] if wanted == "both" else values if wanted == "values" else indices

    return builder.call_te(kernel, call.args[0], primfunc_name_hint="topk", primfunc_attrs=_ALONE)


def _sorted(x: te.Tensor, axis: int, descending: bool, count: Any, index_type: str) -> tuple[te.Tensor, te.Tensor]:
    """The first `count` values and where they stood, all by default."""
    axis = axis % len(x.shape)
    length = x.shape[axis]
    shape = [*x.shape[:axis], length if count is None else count, *x.shape[axis + 1 :]]
    other, from_ = (te.reduce_axis((0, length), name=name) for name in ("other", "from_"))

    def at(place: Sequence[Any], number: Any) -> list[Any]:
        return [*place[:axis], number, *place[axis + 1 :]]

    def before(*place: Any) -> Any:
        mine, others = x(*place), x(*at(place, other))
        comes = _comes_before(others, mine, other < place[axis], descending)
        return te.sum(tirx.Select(comes, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=[other])

    rank = te.compute(x.shape, before, name="rank")

    def source(*place: Any) -> Any:
        is_here = tirx.EQ(rank(*at(place, from_)), tirx.Cast("int32", place[axis]))
        return te.sum(tirx.Select(is_here, tirx.Cast(index_type, from_), tirx.const(0, index_type)), axis=[from_])

    indices = te.compute(shape, source, name="indices")
    values = te.compute(shape, lambda *place: x(*at(place, indices(*place))), name="values")
    return values, indices


def _comes_before(one: Any, other: Any, is_earlier: Any, descending: bool) -> Any:
    if str(one.ty.dtype) == "bool":
        one, other = tirx.Cast("int32", one), tirx.Cast("int32", other)
    is_ahead = one > other if descending else one < other
    is_before = tirx.any(is_ahead, tirx.all(tirx.EQ(one, other), is_earlier))
    if "float" not in str(one.ty.dtype):
        return is_before
    first, second = (one, other) if descending else (other, one)
    nan_ahead = tirx.all(is_nan(first), tirx.Not(is_nan(second)))
    both = tirx.all(is_nan(one), is_nan(other), is_earlier)
    return tirx.any(nan_ahead, both, is_before)


def _scan(kind: str, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, axis = call.args[0], call.attrs.axis
    rank = int(data.ty.ndim)
    if axis is None and rank != 1:
        size = tvm.tirx.IntImm("int64", 1)
        for extent in data.ty.shape.values:
            size = size * extent
        data = builder.emit(relax.op.reshape(data, [size]))
        axis, rank = 0, 1
    symbols = Symbols()
    problem = ScanProblem(
        tuple(map(symbols.dim, data.ty.shape.values)),
        int(axis or 0) % rank,
        str(data.ty.dtype),
        str(call.ty.dtype),
        kind,
        bool(call.attrs.exclusive),
    )
    kernel = scan_kernel(problem).without_attr("global_symbol").with_attr("op_pattern", _OPAQUE)
    gv = builder.add_func(kernel, f"cum{kind}")
    return typed(relax.call_tir(gv, relax.Tuple([data]), call.ty), call.ty)
