"""The operator of attention with a cache: ``relax.hetero.cached_attention``, in TVMScript below ``R.hetero``.

It computes everything in a decoder layer between the joint projection of queries, keys and values and the output
projection. It overwrites its operand `pages` with the new keys and values: a caller that needs the old ones has to copy
them first. MaterializeEncodings turns it into calls of kernels that work in place.
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
ROWS = ("decode", "verify", "chunk")
PAGES = 1  # index of the operand that is written in place

_FIRST_OPTIONAL = 5
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
    sinks: bool
    shared_values: int


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
    sinks: bool = False,
    shared_values: int = 0,
) -> relax.Call:
    """Write new keys and values into the cache, then compute the attention of the new queries to their sequences' keys.

    Queries and keys are normalized per head if `norms` says so, then rotated; then row i's key and value are written
    to the page of its position; then its queries attend to the keys of its sequence at positions
    ``max(0, p_i - window + 1)`` to ``p_i``. A score is ``scale * q . k``, with `softcap` c ``c * tanh(score / c)``.
    Arithmetic is in float32; query head h reads head ``h // (heads // kv_heads)`` of keys and values.

    Parameters
    ----------
    qkv : relax.Expr
        (rows, (heads + 2 * kv_heads) * size) of float32, float16 or bfloat16: queries of all heads, then keys, then
        values, unless they are shared.
    pages : relax.Expr
        (pages, kv_heads, elements), see `relax_hetero.encoding.pages`; overwritten.
    table : relax.Expr
        (slots, max_pages) of int32: column j is the page of a slot's positions 64 * j to 64 * j + 63, -1 without one.
        Keys of missing pages are left out.
    sequences : relax.Expr
        (rows,) of int32: the slot of a row's sequence; -1: a row that writes nothing, and whose result is arbitrary
        but finite.
    positions : relax.Expr
        (rows,) of int32: the position of a row in its sequence.
    others : relax.Expr
        With `rotary`, the rotation of each row's position, (rows, r) of float32, ``r <= size``: the cosines of r/2
        angles, then their sines. Then the factors of the `norms` of queries and keys, each (size,) of float32. Then
        with `sinks`, (heads,) of float32.
    heads, kv_heads, size : int
        Heads of queries; heads of keys and values; elements of a head. `heads` is a multiple of `kv_heads`.
    scale : float
        Factor of the scores.
    window : int
        Number of latest keys that a query sees, its own included; 0: all.
    softcap : float
        Bound of the scores; 0: none.
    rotary : str
        "halves": element j of a head is rotated with element j + r/2; "pairs": element 2j with 2j + 1; "": none.
        Elements from r on are not changed.
    norms : str
        Operands that get an RMS norm with factors, queries or keys: "", "q", "k" or "qk".
    eps : float
        Number that the norms add to the mean of squares.
    rows : str
        "decode": every row belongs to another sequence. "verify": rows may belong to one, at consecutive positions;
        each sees the rows before it. "chunk": all rows belong to the sequence of row 0, at
        consecutive positions, rows with sequence -1 last; each row sees the rows before it.
    sinks : bool
        Whether the softmax of a head has one more score, its sink, without a key and a value.
    shared_values : int
        Number of last elements of a key, normalized and rotated, that are the value, too, so that pages have them
        once; 0: values are of their own, and have `size` elements.

    Returns
    -------
    relax.Call
        A tuple: (rows, heads * value size) of the type of `qkv`, and the pages.

    Raises
    ------
    EncodingError
        If an attribute is not valid, or an operand is not a Relax expression.
    """
    numbers = float(scale), window, float(softcap)
    attrs = CachedAttentionAttrs(heads, kv_heads, size, *numbers, rotary, norms, float(eps), rows, sinks, shared_values)
    _check_attributes(attrs)
    return make_call(CACHED_ATTENTION, [qkv, pages, table, sequences, positions, *others], attrs)


def optional_operands(attrs: CachedAttentionAttrs) -> list[str]:
    """Names of the operands after `positions`: "rotation", "q_norm", "k_norm", "sinks", where present."""
    norms = [f"{letter}_norm" for letter in str(attrs.norms)]
    return ["rotation"] * bool(attrs.rotary) + norms + ["sinks"] * bool(attrs.sinks)


def _check_attributes(attrs: CachedAttentionAttrs) -> None:
    for name, choices in (("rotary", ROTARIES), ("norms", NORMS), ("rows", ROWS)):
        if getattr(attrs, name) not in choices:
            raise EncodingError(f"{CACHED_ATTENTION}: found {name}={getattr(attrs, name)!r}, expected one of {choices}")
    for name in ("heads", "kv_heads", "size"):
        if int(getattr(attrs, name)) < 1:
            raise EncodingError(f"{CACHED_ATTENTION}: found {name}={getattr(attrs, name)}, expected 1 at least")
    if int(attrs.heads) % int(attrs.kv_heads):
        raise EncodingError(
            f"{CACHED_ATTENTION}: found {attrs.heads} heads of queries, expected a multiple of the "
            f"{attrs.kv_heads} heads of keys"
        )
    if not 0 <= int(attrs.shared_values) <= int(attrs.size):
        raise EncodingError(
            f"{CACHED_ATTENTION}: found shared_values={attrs.shared_values}, expected 0 to size={attrs.size}"
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
    optional = optional_operands(attrs)
    if len(call.args) != _FIRST_OPTIONAL + len(optional):
        raise EncodingError(
            f"{CACHED_ATTENTION}: found {len(call.args)} operands, expected {_FIRST_OPTIONAL + len(optional)}: "
            f"qkv, pages, table, sequences, positions{''.join(', ' + name for name in optional)}"
        )
    heads, kv_heads, size = int(attrs.heads), int(attrs.kv_heads), int(attrs.size)
    value_size = int(attrs.shared_values) or size
    shared = bool(attrs.shared_values)
    qkv = _operand(call, 0, "qkv", _ACTIVATIONS, [None, (heads + (1 if shared else 2) * kv_heads) * size])
    dtype = str(call.args[PAGES].ty.dtype) if isinstance(call.args[PAGES].ty, relax.TensorType) else "float16"
    elements = head_elements(size, dtype, shared) if dtype in PAGE_TYPES else None
    _operand(call, PAGES, "pages", PAGE_TYPES, [None, kv_heads, elements])
    _operand(call, 2, "table", ("int32",), [None, None])
    _operand(call, 3, "sequences", ("int32",), [qkv[0]])
    _operand(call, 4, "positions", ("int32",), [qkv[0]])
    for index, name in enumerate(optional, _FIRST_OPTIONAL):
        if name == "rotation":
            _check_rotation(call, index, qkv[0], size)
        else:
            _operand(call, index, name, ("float32",), [heads if name == "sinks" else size])
    qkv_type, pages_type = call.args[0].ty, call.args[PAGES].ty
    vdevice = qkv_type.vdevice or pages_type.vdevice
    out = relax.TensorType([qkv[0], heads * value_size], qkv_type.dtype, vdevice)
    return tvm.ir.TupleType(
        [out, relax.TensorType(list(pages_type.shape.values), pages_type.dtype, pages_type.vdevice or vdevice)]
    )


def _check_rotation(call: relax.Call, index: int, rows: Any, size: int) -> None:
    rotary_size = number(_operand(call, index, "rotation", ("float32",), [rows, None])[1])
    if not isinstance(rotary_size, int) or rotary_size % 2 or not 0 < rotary_size <= size:
        raise EncodingError(
            f"{CACHED_ATTENTION}: operand {index} (rotation) has rows of {rotary_size}, "
            f"expected an even number of at most {size}"
        )


def _operand(call: relax.Call, index: int, name: str, dtypes: tuple[str, ...], expected: list[Any]) -> list[Any]:
    """The extents of an operand after a check of its type and shape; `expected` has None for any extent."""
    subject, ty = f"{CACHED_ATTENTION}: operand {index} ({name})", call.args[index].ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in dtypes:
        raise EncodingError(f"{subject} is a {ty}, expected a tensor of {' or '.join(dtypes)}")
    extents = extents_of(call, index)
    fits = len(extents) == len(expected) and not any(
        size is not None and differ(extent, size) for extent, size in zip(extents, expected, strict=True)
    )
    if not fits:
        shape = ", ".join("any" if size is None else str(number(size)) for size in expected)
        raise EncodingError(f"{subject} has shape {[number(extent) for extent in extents]}, expected ({shape})")
    return extents


register_op(CACHED_ATTENTION, cached_attention, infer_cached_attention)
