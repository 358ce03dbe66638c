"""The operator ``relax.hetero.shard``: where a value over a mesh has its parts, in TVMScript ``R.hetero.shard``.

Placements are GSPMD's: ``"R"`` (each device has the whole value) and ``"S[a]"`` (axis `a` is split into equal parts, in
the order of the devices). `PartitionByMesh` carries the operator out, and removes it.
"""

from __future__ import annotations

import re

import tvm
import tvm_ffi
from tvm import relax

from ..errors import PlacementError
from .definition import check_attrs, make_call, register_op

SHARD = "relax.hetero.shard"
_PLACEMENT = re.compile(r"R|S\[(?P<axis>0|[1-9][0-9]*)\]")


@tvm_ffi.dataclasses.py_class("relax_hetero.ShardAttrs")
class ShardAttrs(tvm.ir.Attrs):
    """Attributes of shard; see `shard`."""

    placement: str


def shard(x: relax.Expr, placement: str) -> relax.Call:
    """Say where the devices of a mesh have the parts of a value.

    Parameters
    ----------
    x : relax.Expr
        A tensor. The result is on the mesh of its variable's annotation, by default on that of `x`.
    placement : str
        ``"R"`` or ``"S[a]"``.

    Returns
    -------
    relax.Call
        The same value.

    Raises
    ------
    PlacementError
        If the placement is neither, or the axis is not one of `x`.
    """
    split_axis(placement)
    return make_call(SHARD, [x], ShardAttrs(placement))


def split_axis(placement: str) -> int | None:
    """The axis that a placement splits; None for ``"R"``.

    Parameters
    ----------
    placement : str
        ``"R"`` or ``"S[a]"``.

    Raises
    ------
    PlacementError
        If it is neither.
    """
    match = _PLACEMENT.fullmatch(placement) if isinstance(placement, str) else None
    if match is None:
        raise PlacementError(f"{SHARD}: placement is {placement!r}, expected 'R' or 'S[a]' with an axis a from 0")
    return None if match["axis"] is None else int(match["axis"])


def infer_shard(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `shard`; PlacementError for an axis that the operand lacks."""
    check_attrs(call, ShardAttrs)
    ty, axis = call.args[0].ty, split_axis(str(call.attrs.placement))
    if not isinstance(ty, relax.TensorType):
        raise PlacementError(f"{SHARD}: the operand is a {ty}, expected a tensor")
    if axis is not None and ty.ndim >= 0 and axis >= ty.ndim:
        raise PlacementError(
            f"{SHARD}: placement is {str(call.attrs.placement)!r}, expected an axis of the operand, {ty.ndim} in all"
        )
    return ty


register_op(SHARD, shard, infer_shard)
