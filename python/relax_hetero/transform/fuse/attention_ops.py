"""Relax's own attention ops as `Attention`."""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, tirx

from ...encoding.expression import Expression, Term
from ...encoding.heads import Heads
from ..ir.blocks import Block, same_shape, shape_of
from ..ir.rewriting import op_name
from .attention_patterns import TYPES, Attention, NoAttention, check_known, checked_masks, shared_sizes, size_of
from .attention_results import followed
from .attention_views import View, traced

OPS = ("relax.nn.attention", "relax.nn.attention_bias")
_CAUSAL = {None: "", "TopLeft": "top_left", "BottomRight": "bottom_right"}


def find_attention_op(block: Block, index: int) -> Attention | None:
    """The attention that a binding's op is: of query (b, m, h, d), key (b, n, h, d) and value (b, n, h, e).

    Raises
    ------
    NoAttention
        Where something about it does not fit.
    """
    binding = block.bindings[index]
    call = binding.value
    if op_name(call) not in OPS or not isinstance(binding, relax.VarBinding):
        return None
    operands = list(call.args[:3])
    shapes = [shape_of(operand) or [] for operand in (*operands, binding.var)]
    types = {str(expr.ty.dtype) for expr in (*operands, binding.var)}
    causal = call.attrs.causal_mask
    is_known = len(types) == 1 and types <= {*TYPES} and all(len(shape) == 4 for shape in shapes)
    if not is_known or call.attrs.window_size is not None:
        found = [str(operand.ty) for operand in operands]
        raise NoAttention(f"found {found}, expected tensors of known shape and of one type among {TYPES}")
    query, key, value, _ = shapes
    if not same_shape(query[:1] + query[2:3], key[:1] + key[2:3]):
        raise NoAttention(f"found query {query} and key {key}, expected one batch and number of heads")
    sizes: dict[str, Any] = {"b": query[0], "h": query[2], "g": key[2], "m": query[1], "n": key[1]}
    sizes.update({"d": query[3], "e": value[3]})
    numbers = [sizes[name] for name in "hde"]
    if not all(isinstance(number, tirx.IntImm) for number in numbers):
        raise NoAttention(f"found {query}, expected numbers of heads and widths")
    names = _CAUSAL[None if causal is None else str(causal)]
    if names == "bottom_right" and not (size_of(sizes["m"]) <= size_of(sizes["n"]) and size_of(sizes["m"]) > 0):
        raise NoAttention(f"causal with {query[1]} queries and {key[1]} keys")
    views = [
        traced(block, View.of(operand, [("b",), (length,), (heads,), (width,)]), sizes, (width,))
        for operand, length, heads, width in zip(operands, "mnn", "hgg", "dde", strict=True)
    ]
    if views[2].factor != 1.0:
        views[2] = View.of(operands[2], [("b",), ("n",), ("g",), ("e",)])
    result, passed = followed(block, View.of(binding.var, [("b",), ("m",), ("h",), ("e",)]), sizes)
    own = call.attrs.scale
    scale = 1.0 / math.sqrt(int(sizes["d"])) if own is None else float(own.value if hasattr(own, "value") else own)
    factor = Term("number", (), (scale * views[0].factor * views[1].factor,))
    scores = Expression(Term("multiply", (Term("operand", (), (0,)), factor)))
    masks = list(call.args[3:])
    if masks:
        scores = Expression(Term("add", (scores.term, Term("operand", (), (1,)))))
        checked_masks(masks, [sizes[name] for name in "bhmn"], sizes, scores)
    check_known(views, sizes)
    heads = Heads(views[0].map, views[1].map, views[2].map, result.map, shared_sizes(sizes))
    end = passed[-1] if passed else index
    return Attention(
        end,
        [*(view.value for view in views), *masks],
        Heads.parse(str(heads)),
        scores,
        names,
        inside=[index, *passed],
    )
