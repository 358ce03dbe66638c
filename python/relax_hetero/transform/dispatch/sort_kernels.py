"""Kernels of sorts and scans: our own on GPUs, as stock ones have data races between the threads of a block.

Sorts and top-k are in `tir.cuda.loops.sort`, cumulative sums and products in `tir.cuda.loops.scan`. CPUs use TVM's
kernels: top-k and scans here, because TVM's DispatchSortScan lets calls of one shape share a kernel, which it refuses
for CPUs of two targets. Sorts on CPUs, and sorts on GPUs along an axis of symbolic length, are left to that pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import tvm
from tvm import relax, te, tirx, topi

from ...target.backend import backend_of
from ...target.vdevice import is_cpu
from ...tir.core.builder import plain_extent
from ...tir.cuda.loops.scan import ScanProblem, scan_kernel, tiles_kernel, tiles_of, totals_kernel, totals_problem
from ...tir.cuda.loops.sort import SortProblem, sort_kernel, sort_steps
from ..ir.blocks import shape_of, tensor_type
from ..ir.extents import Symbols
from ..ir.kernels import opaque_kernel
from ..ir.rewriting import tensor_types, typed

Legalize: TypeAlias = "Callable[[relax.BlockBuilder, relax.Call], relax.Expr]"
"""Legalization of an op, as `relax.transform.LegalizeOps` takes it."""


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    return {
        "relax.sort": _by_device(_sort),
        "relax.argsort": _by_device(_argsort),
        "relax.topk": _by_device(_topk, _stock_topk),
        "relax.cumsum": _by_device(partial(_scan, "sum"), partial(_stock_scan, topi.cumsum)),
        "relax.cumprod": _by_device(partial(_scan, "prod"), partial(_stock_scan, topi.cumprod)),
    }


def _by_device(on_gpus: Legalize, on_cpus: Legalize | None = None) -> Legalize:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        vdevice = call.args[0].ty.vdevice
        if vdevice is None or shape_of(call.args[0]) is None:
            return call
        if on_cpus is not None and is_cpu(vdevice):
            return on_cpus(builder, call)
        return on_gpus(builder, call) if backend_of(vdevice.target).has_sorts else call

    return legalize


def call_kernel(
    builder: relax.BlockBuilder, kernel: tirx.PrimFunc, operands: list[relax.Expr], ty: tvm.ir.Type, name: str
) -> relax.Call:
    """A call of a kernel, added to the module under `name`, that FuseOps fuses with no other."""
    gv = builder.add_func(opaque_kernel(kernel), name)
    return typed(relax.call_tir(gv, relax.Tuple(operands), list(tensor_types(ty))), ty)


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
    attrs, results = call.attrs, str(call.attrs.ret_type)
    indices = "" if results == "values" else str(attrs.dtype)
    count = next(tensor_types(call.ty)).shape.values[int(attrs.axis)]
    return _sorted(builder, call, bool(attrs.largest), results != "indices", indices, count)


def _sorted(
    builder: relax.BlockBuilder, call: relax.Call, descending: bool, values: bool, indices: str, count: Any
) -> relax.Expr:
    """The first `count` elements of each sorted line, all by default; the call itself if its length is symbolic."""
    data = call.args[0]
    shape = tuple(map(Symbols().dim, data.ty.shape.values))
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
    """Emit the kernels of a sort but the last, and return the call of that.

    `ty`: type of the result, or results. `name`: name of the kernels.
    """
    others = [extent for axis, extent in enumerate(data.ty.shape.values) if axis != problem.axis]
    pairs: list[relax.Expr] = []
    for step in sort_steps(problem):
        kernel = sort_kernel(problem, step)
        operands = [data] * (step.is_first or step.is_last and problem.values) + pairs
        if step.is_last:
            return call_kernel(builder, kernel, operands, ty, name)
        types = [tensor_type([*others, step.output_length], dtype, data.ty) for dtype in problem.pair_types]
        pairs_type = types[0] if len(types) == 1 else tvm.ir.TupleType(types)
        result = builder.emit(call_kernel(builder, kernel, operands, pairs_type, name), f"{name}_pairs")
        pairs = (
            [result] if len(types) == 1 else [builder.emit(relax.TupleGetItem(result, i)) for i in range(len(types))]
        )
    raise AssertionError("a sort has a last step")


def _scan(kind: str, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, axis = call.args[0], call.attrs.axis
    rank = int(data.ty.ndim)
    if axis is None and rank != 1:
        size = prod(data.ty.shape.values, start=tvm.tirx.IntImm("int64", 1))
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
    name = f"cum{kind}"
    if tiles_of(problem) == 1:
        return call_kernel(builder, scan_kernel(problem), [data], call.ty, name)
    totals_of_tiles = totals_problem(problem)
    ty = tensor_type(totals_of_tiles.shape, totals_of_tiles.dtype, data.ty)
    totals = builder.emit(call_kernel(builder, totals_kernel(problem), [data], ty, name))
    offsets = builder.emit(call_kernel(builder, scan_kernel(totals_of_tiles), [totals], ty, name))
    return call_kernel(builder, tiles_kernel(problem), [data, offsets], call.ty, name)
