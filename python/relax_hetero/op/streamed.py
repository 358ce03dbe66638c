"""Operators of weights that a CPU keeps and a GPU multiplies: ``R.hetero.stream`` and ``R.hetero.panel_fragments``.

A transfer of a constant is carried out once, when the module is compiled. `stream` copies it in each call, after the
work that its order says, so that copies of several layers take turns in the GPU's memory. The CPU's panels become
fragments there. FormQuantizedMatmuls inserts both.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.block_formats import block_format
from ..encoding.block_panels import PanelPlan
from ..encoding.block_weights import Fragments
from ..errors import EncodingError
from .definition import check_attrs, make_call, register_op

STREAM, PANEL_FRAGMENTS = "relax.hetero.stream", "relax.hetero.panel_fragments"


def stream(x: relax.Expr, after: relax.Expr) -> relax.Call:
    """Copy a tensor, even a constant, in each call to the device of a value that is computed before.

    Parameters
    ----------
    x : relax.Expr
        A tensor.
    after : relax.Expr
        A tensor; the copy begins when it is computed.

    Raises
    ------
    EncodingError
        If an operand is not a Relax expression, or, once types are inferred, not a tensor.
    """
    return make_call(STREAM, [x, after], None)


def infer_stream(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `stream`; EncodingError for an operand that is not a tensor."""
    for index, operand in enumerate(call.args):
        if not isinstance(operand.ty, relax.TensorType):
            raise EncodingError(f"{STREAM}: operand {index} is a {operand.ty}, expected a tensor")
    ty, after = (operand.ty for operand in call.args)
    return relax.TensorType(ty.shape, str(ty.dtype), after.vdevice)


@tvm_ffi.dataclasses.py_class("relax_hetero.PanelFragmentsAttrs")
class PanelFragmentsAttrs(tvm.ir.Attrs):
    """Attributes of panel_fragments; see `panel_fragments`."""

    columns: int
    depth: int
    experts: int
    format: str
    part: int


def panel_fragments(
    panels: relax.Expr, *, columns: int, depth: int, experts: int, format: str, part: int = 0
) -> relax.Call:
    """Turn experts in a CPU's panels into a part of their fragments for a GPU; no number changes.

    Parameters
    ----------
    panels : relax.Expr
        Bytes, as `relax_hetero.encoding.block_panels` packs them.
    columns, depth, experts : int
        Extents of the weights: columns of an expert, a multiple of 16, weights of a column, and experts.
    format : str
        A name of `relax_hetero.encoding.block_formats.FILE_FORMATS`.
    part : int
        0 for the weights; 1 and 2 for scales and minimums or factors, as `relax_hetero.encoding.block_weights` packs
        them.

    Raises
    ------
    EncodingError
        If the operand is not a Relax expression, or, once types are inferred, does not have the bytes of the panels.
    """
    return make_call(PANEL_FRAGMENTS, [panels], PanelFragmentsAttrs(columns, depth, experts, format, part))


def infer_panel_fragments(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `panel_fragments`; EncodingError for an operand that does not fit."""
    check_attrs(call, PanelFragmentsAttrs)
    attrs, ty = call.attrs, call.args[0].ty
    columns, depth, experts = int(attrs.columns), int(attrs.depth), int(attrs.experts)
    form, layout = block_format(str(attrs.format)), Fragments()
    shape = [int(extent) for extent in ty.shape.values]
    panel = PanelPlan(form, depth, 1).panel_bytes
    fits = len(shape) == 2 and shape[1] % panel == 0 and shape[0] == experts * -(-columns // (shape[1] // panel or 1))
    if not fits or str(ty.dtype) != "uint8" or not layout.fits_matrices(columns):
        raise EncodingError(
            f"{PANEL_FRAGMENTS}: operand 0 is a {ty}, expected bytes of panels of {experts} experts with {columns} "
            f"columns of {depth} weights in {form.name}, a multiple of 16 columns"
        )
    shapes = layout.shapes(columns, form, depth, experts)
    return relax.TensorType(shapes[int(attrs.part)], layout.part_types(form)[int(attrs.part)], ty.vdevice)


register_op(STREAM, stream, infer_stream)
register_op(PANEL_FRAGMENTS, panel_fragments, infer_panel_fragments)
