"""The operator ``relax.hetero.shard``: where a value over a mesh has its parts, in TVMScript ``R.hetero.shard``.

Placements are those of TVM's ``R.dist`` and GSPMD, one for each axis of the mesh: ``"R"`` (replicated along it) and
``"S[a]"`` (axis `a` of the value is split into equal parts, in the order of the devices). `PartitionByMesh` carries the
operator out, and removes it.
"""

from __future__ import annotations

import re

import tvm
import tvm_ffi
from tvm import relax

from ..errors import PlacementError
from .definition import check_attrs, make_call, register_op

SHARD = "relax.hetero.shard"
_PLACEMENT = re.compile(r"\s*(?:R|S\[(?P<axis>0|[1-9][0-9]*)\])\s*")


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
        ``"R"`` or ``"S[a]"`` for each axis of the mesh, as in ``"S[0], R"`` for two. The extent of axis `a` is known,
        and a multiple of the number of devices along the axis of the mesh, which `PartitionByMesh` checks.

    Returns
    -------
    relax.Call
        The same value.

    Raises
    ------
    PlacementError
        If the placement is something else, or an axis is not one of `x`.
    """
    split_axes(placement)
    return make_call(SHARD, [x], ShardAttrs(placement))


def split_axes(placement: str) -> list[int | None]:
    """The axis that is split along each axis of the mesh; None for ``"R"``.

    `placement`: ``"R"`` or ``"S[a]"`` for each axis of the mesh. Raises PlacementError if it is something else.
    """
    matches = [_PLACEMENT.fullmatch(text) for text in placement.split(",")] if isinstance(placement, str) else [None]
    axes = [None if match is None or match["axis"] is None else int(match["axis"]) for match in matches]
    if None in matches:
        is_partial = isinstance(placement, str) and "P" in placement.replace(" ", "").split(",")
        hint = "; sums ('P') follow from ops and cannot be asked for" if is_partial else ""
        raise PlacementError(
            f"{SHARD}: placement is {placement!r}, expected 'R' or 'S[a]' with an axis a from 0, for each axis of the "
            f"mesh, as in 'S[0], R'{hint}"
        )
    return axes


def infer_shard(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `shard`; PlacementError for an axis that the operand lacks."""
    check_attrs(call, ShardAttrs)
    ty, axes = call.args[0].ty, split_axes(str(call.attrs.placement))
    if not isinstance(ty, relax.TensorType):
        raise PlacementError(f"{SHARD}: the operand is a {ty}, expected a tensor")
    if ty.ndim >= 0 and any(axis is not None and axis >= ty.ndim for axis in axes):
        raise PlacementError(
            f"{SHARD}: placement is {str(call.attrs.placement)!r}, expected axes of the operand, {ty.ndim} in all"
        )
    return ty


register_op(SHARD, shard, infer_shard)
