"""Finding attention among plain ops: two products with a softmax between them.

Taken in are, between the products, whatever is elementwise (scale, masks, ``where``), before them scales, and around
them permutations, reshapes, slices and repeated heads. Nothing inside has another user.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from ...encoding.encoding import DYNAMIC
from ...encoding.expression import Expression, Term
from ...encoding.heads import NAMES, STATIC, Heads
from ..ir.blocks import Block, broadcast, is_one, same_shape, shape_of
from ..ir.op_names import PERMUTE, RESHAPE
from ..ir.rewriting import op_name
from .attention_chain import HALVES, Scores, Weighted, scores_before, weighted_after
from .attention_results import followed
from .attention_views import View, regrouped, sharing, traced
from .causal_masks import without_triangle

_SOFTMAX = "relax.nn.softmax"
TYPES = ("float32", *HALVES)
"""Of operands and result; scores are of float32."""


class NoAttention(Exception):
    """What was found in place of attention; the message is for `decline`."""


@dataclass
class Attention:
    """What one `R.hetero.attention` will do.

    Attributes
    ----------
    end : int
        Index of the binding it takes the place of.
    operands : list of relax.Expr
        Query, key, value, masks.
    heads : Heads
    scores : Expression
    causal : str
    nan_to_zero : bool
    inside : list of int
        Bindings that vanish, beside those that nobody uses any more.
    """

    end: int
    operands: list[relax.Expr]
    heads: Heads
    scores: Expression
    causal: str = ""
    nan_to_zero: bool = False
    inside: list[int] = field(default_factory=list)


def find_attention(block: Block, index: int) -> Attention | None:
    """The attention around the softmax at an index of a block.

    Returns
    -------
    Attention or None
        None where the softmax is not between two products at all.

    Raises
    ------
    NoAttention
        Where it is, but something does not fit.
    """
    softmax = block.bindings[index]
    if op_name(softmax.value) != _SOFTMAX or not isinstance(softmax, relax.VarBinding):
        return None
    found = scores_before(block, softmax.value.args[0])
    after = weighted_after(block, index)
    if found is None or after is None:
        return None
    shape = shape_of(softmax.var)
    if shape is None or int(softmax.value.attrs.axis) % len(shape) != len(shape) - 1 or not 2 <= len(shape) <= 4:
        raise NoAttention(f"softmax of {softmax.var.ty} along axis {softmax.value.attrs.axis}")
    return _fit(block, index, found, after, shape)


def _fit(block: Block, index: int, before: Scores, after: Weighted, shape: list[Any]) -> Attention:
    product = before.product
    query, transposed = product.args
    second = block.bindings[after.index]
    value = second.value.args[1]
    shapes = [shape_of(expr) for expr in (query, transposed, value, second.var)]
    types = [str(expr.ty.dtype) for expr in (query, transposed, value, second.var, block.bindings[index].var)]
    if any(found is None or len(found) != len(shape) for found in shapes):
        raise NoAttention(
            f"operands of {query.ty}, {transposed.ty} and {value.ty}: expected {len(shape)} dimensions each"
        )
    if types[0] not in TYPES or set(types[:3]) != {types[0]} or set(types[3:]) != {"float32"}:
        raise NoAttention(f"found element types {types}, expected operands of one of {TYPES}, and float32 between")
    batch = _batch(block, shape, (query, transposed, value), second.var)
    if any(not _same_batch(found, shape) for found in shapes if found is not None):
        raise NoAttention("operands whose batch dimensions broadcast")
    sizes = {**batch, "m": shape[-2], "n": shape[-1], "d": shapes[0][-1], "e": shapes[2][-1]}  # type: ignore[index]
    outer = _outer(shape, sizes)
    if outer is None or not all(isinstance(sizes[name], tirx.IntImm) for name in ("h", "d", "e")):
        raise NoAttention(
            f"symbolic heads: found {query.ty} times {transposed.ty}, expected numbers of heads and widths"
        )
    view = traced(block, View.of(query, [*outer, ("m",), ("d",)]), sizes, ("d",))
    keys, values, shared = _shared_heads(block, transposed, value, outer, sizes)
    result, passed = followed(block, View.of(second.var, [*outer, ("m",), ("e",)]), sizes)
    if str(result.value.ty.dtype) != types[0]:
        raise NoAttention(f"operands of {types[0]} and a result of {result.value.ty.dtype}, expected one type")
    expression = _scaled(before.expression, view.factor * keys.factor)
    masks = checked_masks(before.operands, shape, sizes, expression)
    expression, masks, causal = without_triangle(expression, masks, size_of(sizes["m"]), size_of(sizes["n"]))
    sizes["g"] = tirx.IntImm("int64", int(sizes["h"]) // shared)
    heads = Heads(view.map, keys.map, values.map, result.map, shared_sizes(sizes))
    check_known([view, keys, values], sizes)
    return Attention(
        passed[-1] if passed else after.index,
        [view.value, keys.value, values.value, *masks],
        Heads.parse(str(heads)),
        expression,
        causal,
        after.nan_to_zero,
        [*before.inside, *after.inside, *passed],
    )


def _batch(block: Block, shape: list[Any], operands: tuple[relax.Expr, ...], result: relax.Var) -> dict[str, Any]:
    """Sizes of batch and heads. One dimension may be both: if a reshape shows which."""
    one = tirx.IntImm("int64", 1)
    if len(shape) == 4:
        return {"b": shape[0], "h": shape[1]}
    if len(shape) == 2:
        return {"b": one, "h": one}
    for operand in operands:
        call = block.definition(operand)
        while op_name(call) in (PERMUTE, "relax.multiply"):
            call = block.definition(call.args[0])
        found = shape_of(call.args[0]) if op_name(call) == RESHAPE else None
        if (
            found is not None
            and len(found) == 4
            and regrouped((("b", "h"),), shape[:1], {"b": found[0], "h": found[1]})
        ):
            return {"b": found[0], "h": found[1]}
    if isinstance(shape[0], tirx.IntImm):
        return {"b": one, "h": shape[0]}
    return {"b": shape[0], "h": one}


def _outer(shape: list[Any], sizes: dict[str, Any]) -> list[tuple[str, ...]] | None:
    """The batch dimensions of all operands."""
    if len(shape) == 4:
        return [("b",), ("h",)]
    if len(shape) == 2:
        return []
    if is_one(sizes["h"]):
        return [("b",)]
    return [("h",)] if is_one(sizes["b"]) else [("b", "h")]


def _same_batch(found: list[Any], shape: list[Any]) -> bool:
    return same_shape(found[:-2], shape[:-2])


def _shared_heads(
    block: Block, transposed: relax.Expr, value: relax.Expr, outer: list[tuple[str, ...]], sizes: dict[str, Any]
) -> tuple[View, View, int]:
    """Views of key and value, and how many heads share one of theirs."""
    shared = sharing(block, transposed)
    heads = int(sizes["h"])
    for ratio in dict.fromkeys((shared, 1)):
        if heads % ratio:
            continue
        sizes = {**sizes, "g": tirx.IntImm("int64", heads // ratio), "r": tirx.IntImm("int64", ratio)}
        own = ("g",) if ratio == 1 else ("g", "r")
        dims = [tuple(name for part in dim for name in (own if part == "h" else (part,))) for dim in outer]
        keys = traced(block, View.of(transposed, [*dims, ("d",), ("n",)]), sizes, ("d", "n"))
        values = traced(block, View.of(value, [*dims, ("n",), ("e",)]), sizes, ("e",))
        if values.factor == 1.0 and not any("r" in dim for view in (keys, values) for dim in view.dims):
            return keys, values, ratio
    raise NoAttention(f"values of {value.ty} are scaled")


def _scaled(expression: Expression, factor: float) -> Expression:
    if factor == 1.0:
        return expression
    scaled = Term("multiply", (Term("operand", (), (0,)), Term("number", (), (factor,))))
    others = [Expression.operand(index) for index in range(1, expression.num_operands)]
    return expression.substitute([Expression(scaled), *others])


def checked_masks(
    operands: list[relax.Expr], shape: list[Any], sizes: dict[str, Any], expression: Expression
) -> list[relax.Expr]:
    """The masks of scores of a shape; NoAttention where they do not fit."""
    for operand in operands:
        found = shape_of(operand)
        if found is None or broadcast(found, shape) is None or not same_shape(broadcast(found, shape) or [], shape):
            raise NoAttention(f"a mask of {operand.ty} against scores {shape}")
        if len(shape) == 3 and len(found) == 3 and not is_one(found[0]) and len(_outer(shape, sizes)[0]) != 1:  # type: ignore[index]
            raise NoAttention(f"a mask of {operand.ty}, whose first dimension is batch and heads")
        if str(operand.ty.dtype) not in ("float32", "bool"):
            raise NoAttention(f"a mask of element type {operand.ty.dtype}, expected float32 or bool")
    if expression.dtype(["float32", *(str(operand.ty.dtype) for operand in operands)]) != "float32":
        raise NoAttention(f"scores {expression} of another type than float32")
    return operands


def shared_sizes(sizes: dict[str, Any]) -> tuple[int, ...]:
    """Sizes as `Heads` has them."""
    return tuple(size_of(sizes[name]) for name in NAMES)


def size_of(extent: Any) -> int:
    """An extent as a number, `DYNAMIC` where it is symbolic."""
    return int(extent) if isinstance(extent, tirx.IntImm) else DYNAMIC


def check_known(views: list[View], sizes: dict[str, Any]) -> None:
    """A symbolic size has to be the extent of a dimension of its own in an operand."""
    alone = {dim[0] for view in views for dim in view.dims if len(dim) == 1}
    for name in NAMES:
        if name not in STATIC and size_of(sizes[name]) == DYNAMIC and name not in alone:
            raise NoAttention(f"no operand tells the size of {name}")
