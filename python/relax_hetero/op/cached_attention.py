"""The operator of attention with a cache: ``relax.hetero.cached_attention``, in TVMScript below ``R.hetero``.

It is all that a decoder's layer does between its joined projection of queries, keys and values and its output
projection. It writes the new keys and values over its operand `pages`: a caller that wants the old ones has to copy
them before. MaterializeEncodings makes kernels of it that work in place.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.pages import PAGE_TYPES, head_elements
from ..errors import EncodingError
from .definition import check_attrs, differ, extents_of, make_call, number, register_op

CACHED_ATTENTION = "relax.hetero.cached_attention"
ROTARIES = ("", "halves", "pairs")
NORMS = ("", "q", "k", "qk")
ROWS = ("decode", "chunk")
PAGES = 1
"""The number of the operand that is written in place."""

_FIRST_OTHER = 5
_ACTIVATIONS = ("float32", "float16", "bfloat16")


@tvm_ffi.dataclasses.py_class("relax_hetero.CachedAttentionAttrs")
class CachedAttentionAttrs(tvm.ir.Attrs):
    """Attributes of cached_attention; see `cached_attention`."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int
    softcap: float
    rotary: str
    norms: str
    eps: float
    rows: str


def cached_attention(
    qkv: relax.Expr,
    pages: relax.Expr,
    table: relax.Expr,
    sequences: relax.Expr,
    positions: relax.Expr,
    *others: relax.Expr,
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    rotary: str = "",
    norms: str = "",
    eps: float = 1e-6,
    rows: str = "decode",
) -> relax.Call:
    """New keys and values into the cache, and the attention of new queries to their sequences' keys.

    Queries and keys are normalized per head if `norms` says so, then rotated; then row i's key and value are written
    to the page of its position; then its queries attend to the keys of its sequence at positions
    ``max(0, p_i - window + 1)`` to ``p_i``. A score is ``scale * q . k``, with `softcap` c ``c * tanh(score / c)``.
    Arithmetic is in float32; query head h reads head ``h // (heads // kv_heads)`` of keys and values.

    Parameters
    ----------
    qkv : relax.Expr
        (rows, (heads + 2 * kv_heads) * size) of float32, float16 or bfloat16: queries of all heads, then keys, then
        values.
    pages : relax.Expr
        (pages, kv_heads, elements), see `relax_hetero.encoding.pages`; overwritten.
    table : relax.Expr
        (slots, most_pages) of int32: the page of a slot's positions 64 * j to 64 * j + 63 in column j, -1 where there
        is none. Keys of pages that are not there are left out.
    sequences : relax.Expr
        (rows,) of int32: the slot of a row's sequence; -1: a row that writes nothing, and whose result is arbitrary
        but finite.
    positions : relax.Expr
        (rows,) of int32.
    others : relax.Expr
        Where `rotary` is given, the rotation of each row's position, (rows, r) of float32, ``r <= size``: the cosines
        of r/2 angles, then their sines. Then, as `norms` says, the factors of the norm of queries, and of keys, each
        (size,) of float32.
    heads, kv_heads, size : int
        Heads of queries; heads of keys and values; and the numbers of one. `heads` is a multiple of `kv_heads`.
    scale : float
        Factor of the scores.
    window : int
        How many of the latest keys a query sees, its own included; 0: all.
    softcap : float
        0: none.
    rotary : str
        "halves": number j of a head turns with number j + r/2; "pairs": number 2j with number 2j + 1; "": none does.
        Numbers from r on stay.
    norms : str
        Which are divided by the root of the mean of their squares and multiplied by factors: "", "q", "k" or "qk".
    eps : float
        Number that the norms add to the mean of squares.
    rows : str
        "decode": every row is of another sequence. "chunk": all rows are of the sequence of row 0, at consecutive
        positions, those with sequence -1 last; each row sees those before it.

    Returns
    -------
    relax.Call
        A tuple: (rows, heads * size) of the type of `qkv`, and the pages.

    Raises
    ------
    EncodingError
        If an attribute has no meaning, or an operand is no Relax expression.
    """
    attrs = CachedAttentionAttrs(
        heads, kv_heads, size, float(scale), window, float(softcap), rotary, norms, float(eps), rows
    )
    _check_attributes(attrs)
    return make_call(CACHED_ATTENTION, [qkv, pages, table, sequences, positions, *others], attrs)


def other_operands(attrs: CachedAttentionAttrs) -> list[str]:
    """Operands after `positions`: "rotation", "q_norm", "k_norm", those that there are."""
    return ["rotation"] * bool(attrs.rotary) + [f"{letter}_norm" for letter in str(attrs.norms)]


def _check_attributes(attrs: CachedAttentionAttrs) -> None:
    for name, known in (("rotary", ROTARIES), ("norms", NORMS), ("rows", ROWS)):
        if getattr(attrs, name) not in known:
            raise EncodingError(f"{CACHED_ATTENTION}: found {name}={getattr(attrs, name)!r}, expected one of {known}")
    for name in ("heads", "kv_heads", "size"):
        if int(getattr(attrs, name)) < 1:
            raise EncodingError(f"{CACHED_ATTENTION}: found {name}={getattr(attrs, name)}, expected 1 at least")
    if int(attrs.heads) % int(attrs.kv_heads):
        raise EncodingError(
            f"{CACHED_ATTENTION}: found {attrs.heads} heads of queries, expected a multiple of the "
            f"{attrs.kv_heads} heads of keys"
        )
    for name in ("window", "softcap", "eps"):
        if not 0 <= float(getattr(attrs, name)) < math.inf:
            raise EncodingError(f"{CACHED_ATTENTION}: found {name}={getattr(attrs, name)}, expected 0 or more")
    if not math.isfinite(float(attrs.scale)):
        raise EncodingError(f"{CACHED_ATTENTION}: found scale={attrs.scale}, expected a finite number")


def infer_cached_attention(call: relax.Call, _ctx: relax.BlockBuilder) -> tvm.ir.TupleType:
    """The type of `cached_attention`; EncodingError for operands that do not fit."""
    check_attrs(call, CachedAttentionAttrs)
    attrs = call.attrs
    _check_attributes(attrs)
    others = other_operands(attrs)
    if len(call.args) != _FIRST_OTHER + len(others):
        raise EncodingError(
            f"{CACHED_ATTENTION}: found {len(call.args)} operands, expected {_FIRST_OTHER + len(others)}: "
            f"qkv, pages, table, sequences, positions{''.join(', ' + name for name in others)}"
        )
    heads, kv_heads, size = int(attrs.heads), int(attrs.kv_heads), int(attrs.size)
    qkv = _operand(call, 0, "qkv", _ACTIVATIONS, [None, (heads + 2 * kv_heads) * size])
    dtype = str(call.args[PAGES].ty.dtype) if isinstance(call.args[PAGES].ty, relax.TensorType) else "float16"
    elements = head_elements(size, dtype) if dtype in PAGE_TYPES else None
    _operand(call, PAGES, "pages", PAGE_TYPES, [None, kv_heads, elements])
    _operand(call, 2, "table", ("int32",), [None, None])
    _operand(call, 3, "sequences", ("int32",), [qkv[0]])
    _operand(call, 4, "positions", ("int32",), [qkv[0]])
    for index, name in enumerate(others, _FIRST_OTHER):
        if name == "rotation":
            _check_rotation(call, index, qkv[0], size)
        else:
            _operand(call, index, name, ("float32",), [size])
    first, pages = call.args[0].ty, call.args[PAGES].ty
    vdevice = first.vdevice or pages.vdevice
    out = relax.TensorType([qkv[0], heads * size], first.dtype, vdevice)
    return tvm.ir.TupleType([out, relax.TensorType(list(pages.shape.values), pages.dtype, pages.vdevice or vdevice)])


def _check_rotation(call: relax.Call, index: int, rows: Any, size: int) -> None:
    turned = number(_operand(call, index, "rotation", ("float32",), [rows, None])[1])
    if not isinstance(turned, int) or turned % 2 or not 0 < turned <= size:
        raise EncodingError(
            f"{CACHED_ATTENTION}: operand {index} (rotation) has rows of {turned}, "
            f"expected an even number of at most {size}"
        )


def _operand(call: relax.Call, index: int, name: str, dtypes: tuple[str, ...], expected: list[Any]) -> list[Any]:
    """The extents of an operand of one of some types; `expected` has None for extents that are free."""
    where, ty = f"{CACHED_ATTENTION}: operand {index} ({name})", call.args[index].ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in dtypes:
        raise EncodingError(f"{where} is a {ty}, expected a tensor of {' or '.join(dtypes)}")
    found = extents_of(call, index)
    fits = len(found) == len(expected) and not any(
        extent is not None and differ(its, extent) for its, extent in zip(found, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if extent is None else str(number(extent)) for extent in expected)
        raise EncodingError(f"{where} has shape {[number(extent) for extent in found]}, expected ({wanted})")
    return found


register_op(CACHED_ATTENTION, cached_attention, infer_cached_attention)
