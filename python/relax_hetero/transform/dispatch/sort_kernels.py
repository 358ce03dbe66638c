"""Sorts and scans of GPUs: kernels of our own, as stock ones let threads of a block read what others are writing.

Sorts, and top-k, are `tir.cuda.loops.sort`; cumulative sums and products are `tir.cuda.loops.scan`. Those of CPUs are
TVM's kernels. Its DispatchSortScan is left the ops that it gives a kernel for each call; top-k and scans of one shape
share theirs, which the pass refuses where they are on CPUs of two targets. Sorts of GPUs along an axis of symbolic
length stay as they are, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import relax, te, tirx, topi

from ...target.backend import backend_of
from ...target.vdevice import is_cpu
from ...tir.core.builder import plain_extent
from ...tir.cuda.loops.scan import ScanProblem, scan_kernel, tiles_kernel, tiles_of, totals_kernel, totals_problem
from ...tir.cuda.loops.sort import SortProblem, sort_kernel, sort_steps
from ..ir.blocks import shape_of, tensor_type
from ..ir.extents import Symbols
from ..ir.rewriting import tensor_types, typed

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_WITHOUT_PATTERN = 8


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.sort": _of_gpus(_sort),
        "relax.argsort": _of_gpus(_argsort),
        "relax.topk": _of_gpus(_topk, _stock_topk),
        "relax.cumsum": _of_gpus(partial(_scan, "sum"), partial(_stock_scan, topi.cumsum)),
        "relax.cumprod": _of_gpus(partial(_scan, "prod"), partial(_stock_scan, topi.cumprod)),
    }


def _of_gpus(legalize: Legalize, of_cpus: Legalize | None = None) -> Legalize:
    def of_gpus(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        vdevice = call.args[0].ty.vdevice
        if vdevice is None or shape_of(call.args[0]) is None:
            return call
        if of_cpus is not None and is_cpu(vdevice):
            return of_cpus(builder, call)
        return legalize(builder, call) if backend_of(vdevice.target).has_sorts else call

    return of_gpus


def _stock_topk(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    return builder.call_te(
        topi.topk, call.args[0], int(attrs.k), int(attrs.axis), attrs.ret_type, not attrs.largest, attrs.dtype
    )


def _stock_scan(scan: Callable[..., te.Tensor], builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    axis = None if attrs.axis is None else int(attrs.axis)
    return builder.call_te(scan, call.args[0], axis, attrs.dtype, bool(attrs.exclusive))


def _sort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _sorted(builder, call, bool(call.attrs.descending), True, "", None)


def _argsort(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _sorted(builder, call, bool(call.attrs.descending), False, str(call.ty.dtype), None)


def _topk(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs, wanted = call.attrs, str(call.attrs.ret_type)
    indices = "" if wanted == "values" else str(attrs.dtype)
    count = next(tensor_types(call.ty)).shape.values[int(attrs.axis)]
    return _sorted(builder, call, bool(attrs.largest), wanted != "indices", indices, count)


def _sorted(
    builder: relax.BlockBuilder, call: relax.Call, descending: bool, values: bool, indices: str, count: Any
) -> relax.Expr:
    """The first `count` of each sorted line, all by default; the call itself where its length is symbolic."""
    data = call.args[0]
    symbols = Symbols()
    shape = tuple(map(symbols.dim, data.ty.shape.values))
    axis = int(call.attrs.axis) % len(shape)
    length = shape[axis]
    count = length if count is None else plain_extent(count)
    if not isinstance(length, int) or not isinstance(count, int):
        return call
    problem = SortProblem(shape, axis, str(data.ty.dtype), descending, count, values, indices)
    return sorted_lines(builder, data, problem, call.ty, call.op.name.removeprefix("relax."))


def sorted_lines(
    builder: relax.BlockBuilder, data: relax.Expr, problem: SortProblem, ty: tvm.ir.Type, name: str
) -> relax.Call:
    """The call of a sort's last kernel, with those before it emitted.

    Parameters
    ----------
    ty : Type
        Type of the result, or results.
    name : str
        Name of the kernels.
    """
    others = [extent for dimension, extent in enumerate(data.ty.shape.values) if dimension != problem.axis]
    pairs: list[relax.Expr] = []
    for step in sort_steps(problem):
        kernel = sort_kernel(problem, step).without_attr("global_symbol").with_attr("op_pattern", _WITHOUT_PATTERN)
        operands = [data] * (step.is_first or step.is_last and problem.values) + pairs
        gv = builder.add_func(kernel, name)
        if step.is_last:
            return typed(relax.call_tir(gv, relax.Tuple(operands), list(tensor_types(ty))), ty)
        made = [tensor_type([*others, step.left], dtype, data.ty) for dtype in problem.pair_types]
        of_pairs = made[0] if len(made) == 1 else tvm.ir.TupleType(made)
        found = builder.emit(typed(relax.call_tir(gv, relax.Tuple(operands), made), of_pairs), f"{name}_pairs")
        pairs = [found] if len(made) == 1 else [builder.emit(relax.TupleGetItem(found, i)) for i in range(len(made))]
    raise AssertionError("a sort has a last step")


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
    name, ty = f"cum{kind}", call.ty

    def called(kernel: tirx.PrimFunc, operands: list[relax.Expr], ty: relax.TensorType) -> relax.Call:
        gv = builder.add_func(kernel.without_attr("global_symbol").with_attr("op_pattern", _WITHOUT_PATTERN), name)
        return typed(relax.call_tir(gv, relax.Tuple(operands), ty), ty)

    if tiles_of(problem) == 1:
        return called(scan_kernel(problem), [data], ty)
    totals = totals_problem(problem)
    of_totals = tensor_type(totals.shape, totals.dtype, data.ty)
    found = builder.emit(called(totals_kernel(problem), [data], of_totals))
    before = builder.emit(called(scan_kernel(totals), [found], of_totals))
    return called(tiles_kernel(problem), [data, before], ty)
