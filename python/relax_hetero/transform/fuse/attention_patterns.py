"""Matching of attention: two products with a softmax between them, written as plain ops, or Relax's own attention ops.

A match includes all elementwise ops between the products (scale, masks, ``where``), scales before them, and the
permutations, reshapes, slices and repeated heads around them. No inner value has a user outside. The first section
recognizes causal masks, the second matches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from ...encoding.encoding import DYNAMIC
from ...encoding.expression import Expression, Term
from ...encoding.heads import NAMES, STATIC, Heads
from ...target.element_types import HALF_TYPES
from ..ir.blocks import Block, broadcast, is_one, same_shape, shape_of
from ..ir.op_names import PERMUTE, RESHAPE
from ..ir.relax_expressions import scalar_of, to_expression
from ..ir.rewriting import op_name
from .attention_views import HeadsTrace, followed, regrouped, repeated_heads, rounds, traced

# Causal masks: constant triangles that hide from a query all keys after its own position. They become the attribute
# `causal`, and masks that hide nothing are removed.
#
# Before::
#
#     scores: where(x1, multiply(x0, 0.125), -3.4e38), where x1 is a constant triangle of conditions
#
# After::
#
#     scores: multiply(x0, 0.125), causal="bottom_right"
#
# The kernel then skips the keys that no query of a tile sees, half of the work.

HIDDEN = -1e30  # maximum score of a hidden key: masks are filled with such numbers, whose softmax is 0


def without_triangle(
    expression: Expression, masks: Sequence[relax.Expr], queries: int, keys: int
) -> tuple[Expression, list[relax.Expr], str]:
    """Scores without masks that are triangles or hide nothing, the remaining masks, and the causal kind ("": none).

    Parameters
    ----------
    expression : Expression
        Expression of the scores: ``x0`` is the product, ``x1``, ... are the masks.
    masks : sequence of relax.Expr
        Operands ``x1``, ``x2``, ...
    queries, keys : int
        Number of queries and of keys.
    """
    for index, mask in enumerate(masks):
        is_triangle = _is_triangle(mask, queries, keys)
        if not is_triangle and not _hides_nothing(mask):
            continue
        term = _without_mask(expression.term, index + 1, str(mask.ty.dtype) == "bool")
        if term is None:
            continue
        unmasked = Expression(term)
        if any(part.op == "operand" and part.params[0] == index + 1 for part in unmasked.terms()):
            continue
        replacements = [Expression.operand(i - (i > index + 1)) for i in range(len(masks) + 1)]
        remaining = [*masks[:index], *masks[index + 1 :]]
        expression = unmasked.substitute(replacements)
        if is_triangle:
            return expression, remaining, "bottom_right"
        return without_triangle(expression, remaining, queries, keys)
    return expression, list(masks), ""


def _is_triangle(mask: relax.Expr, queries: int, keys: int) -> bool:
    """Return whether a constant hides exactly the keys after i + keys - queries from query i."""
    if not isinstance(mask, tvm.ir.GenericConst) or not 1 < queries <= keys:
        return False
    array = mask.value.numpy()
    if array.size != queries * keys or array.shape[-2:] != (queries, keys):
        return False
    array = array.reshape(queries, keys)
    visible = np.tril(np.ones((queries, keys), bool), keys - queries)
    if array.dtype == bool:
        return bool((array == visible).all())
    return bool((array[visible] == 0).all() and (array[~visible] <= HIDDEN).all())


def _hides_nothing(mask: relax.Expr) -> bool:
    """Return whether a constant lets every query see every key."""
    if not isinstance(mask, tvm.ir.GenericConst):
        return False
    array = mask.value.numpy()
    return bool(array.all() if array.dtype == bool else (array == 0).all())


def _without_mask(term: Term, mask: int, is_condition: bool) -> Term | None:
    """A term without the mask; None if the mask is not used to hide scores."""
    operand = Term("operand", (), (mask,))
    if term.op == "where":
        condition, then, otherwise = term.args
        if otherwise.op != "number" or not otherwise.params[0] <= HIDDEN:
            return None
        if is_condition and condition == operand:
            return then
        inner = _without_mask(then, mask, is_condition)
        return None if inner is None else Term("where", (condition, inner, otherwise))
    if term.op != "add":
        return None
    for a, b in (term.args, term.args[::-1]):
        if not is_condition and b == operand:
            return a
        inner = _without_mask(a, mask, is_condition)
        if inner is not None:
            return Term("add", (inner, b))
    return None


# Matching.

_SOFTMAX, _MATMUL = "relax.nn.softmax", "relax.matmul"
ATTENTION_OPS = ("relax.nn.attention", "relax.nn.attention_bias")
_CAUSAL = {None: "", "TopLeft": "top_left", "BottomRight": "bottom_right"}
TYPES = ("float32", *HALF_TYPES)  # element types of operands and result; scores are float32


class NoAttention(Exception):
    """The reason why a pattern is not attention, for a remark."""


@dataclass
class Attention:
    """Match of one `R.hetero.attention`."""

    end: int  # index of the binding that it replaces
    operands: list[relax.Expr]  # query, key, value, masks
    heads: Heads
    scores: Expression
    causal: str = ""
    nan_to_zero: bool = False
    inside: list[int] = field(default_factory=list)  # indices of bindings that are removed, besides those without users


def find_attention(block: Block, index: int, widens: bool = False) -> Attention | None:
    """The attention around the softmax at an index of a block.

    Parameters
    ----------
    widens : bool
        Whether 16-bit scores may be computed in float32, as on devices whose products accumulate in float32.

    Returns
    -------
    Attention or None
        None if the softmax is not between two products.

    Raises
    ------
    NoAttention
        If it is, but is not a supported attention.
    """
    softmax = block.bindings[index]
    if op_name(softmax.value) != _SOFTMAX or not isinstance(softmax, relax.VarBinding):
        return None
    scores = find_scores(block, softmax.value.args[0])
    weighted = find_weighted_sum(block, index)
    if scores is None or weighted is None:
        return None
    shape = shape_of(softmax.var)
    if shape is None or int(softmax.value.attrs.axis) % len(shape) != len(shape) - 1 or not 2 <= len(shape) <= 4:
        raise NoAttention(f"softmax of {softmax.var.ty} along axis {softmax.value.attrs.axis}")
    return _match(block, index, scores, weighted, shape, widens)


def _match(
    block: Block, index: int, scores: Scores, weighted: WeightedSum, shape: list[Any], widens: bool
) -> Attention:
    query, transposed = scores.product.args
    second = block.bindings[weighted.index]
    value = second.value.args[1]
    shapes = [shape_of(expr) for expr in (query, transposed, value, second.var)]
    types = [str(expr.ty.dtype) for expr in (query, transposed, value, second.var, block.bindings[index].var)]
    if any(extents is None or len(extents) != len(shape) for extents in shapes):
        raise NoAttention(
            f"operands of {query.ty}, {transposed.ty} and {value.ty}: expected {len(shape)} dimensions each"
        )
    score_types = {"float32", types[0]} if widens else {"float32"}
    if types[0] not in TYPES or set(types[:3]) != {types[0]} or not set(types[3:]) <= score_types:
        raise NoAttention(f"found element types {types}, expected operands of one of {TYPES} and float32 scores")
    batch_sizes = _batch(block, shape, (query, transposed, value), second.var)
    if any(not same_shape(extents[:-2], shape[:-2]) for extents in shapes if extents is not None):
        raise NoAttention("operands whose batch dimensions broadcast")
    sizes = {**batch_sizes, "m": shape[-2], "n": shape[-1], "d": shapes[0][-1], "e": shapes[2][-1]}  # type: ignore[index]
    batch_dims = _batch_dims(shape, sizes)
    if batch_dims is None or not all(isinstance(sizes[name], tirx.IntImm) for name in ("h", "d", "e")):
        raise NoAttention(
            f"symbolic heads: found {query.ty} times {transposed.ty}, expected numbers of heads and widths"
        )
    queries = traced(block, HeadsTrace.of(query, [*batch_dims, ("m",), ("d",)]), sizes, ("d",))
    keys, values, shared = _shared_heads(block, transposed, value, batch_dims, sizes)
    result, views = followed(block, HeadsTrace.of(second.var, [*batch_dims, ("m",), ("e",)]), sizes)
    if str(result.value.ty.dtype) != types[0]:
        raise NoAttention(f"operands of {types[0]} and a result of {result.value.ty.dtype}, expected one type")
    expression = _scaled(scores.expression, queries.factor * keys.factor)
    if widens:
        expression = in_float32(expression, [str(operand.ty.dtype) for operand in scores.operands])
    masks = checked_masks(scores.operands, shape, sizes, expression, TYPES if widens else ("float32",))
    expression, masks, causal = without_triangle(expression, masks, size_of(sizes["m"]), size_of(sizes["n"]))
    sizes["g"] = tirx.IntImm("int64", int(sizes["h"]) // shared)
    heads = Heads(queries.map, keys.map, values.map, result.map, heads_sizes(sizes))
    check_sizes([queries, keys, values], sizes)
    return Attention(
        views[-1] if views else weighted.index,
        [queries.value, keys.value, values.value, *masks],
        Heads.parse(str(heads)),
        expression,
        causal,
        weighted.nan_to_zero,
        [*scores.inside, *weighted.inside, *views],
    )


def in_float32(expression: Expression, masks: Sequence[str]) -> Expression:
    """The expression computed in float32, without rounding to 16 bits between its ops.

    Parameters
    ----------
    masks : sequence of str
        Element types of ``x1``, ``x2``, ...
    """
    operands = [Term("operand", (), (index,)) for index in range(len(masks) + 1)]
    narrow = {operands[index + 1] for index, dtype in enumerate(masks) if dtype in HALF_TYPES}
    floats = {operands[0], *(operands[index + 1] for index, dtype in enumerate(masks) if dtype == "float32")}

    def apply(op: str, args: list[Term], params: tuple[Any, ...]) -> Term:
        if op == "cast" and params[0] in TYPES:
            return args[0] if args[0] in floats else as_float(Term("cast", tuple(args), ("float32",)))
        return as_float(Term(op, tuple(args), params)) if op != "number" else Term(op, tuple(args), params)

    def as_float(term: Term) -> Term:
        floats.add(term)
        return term

    widened = [as_float(Term("cast", (x,), ("float32",))) if x in narrow else x for x in operands]
    return Expression(expression.fold(widened, apply))


def _batch(block: Block, shape: list[Any], operands: tuple[relax.Expr, ...], result: relax.Var) -> dict[str, Any]:
    """Sizes of batch and heads. One dimension may be both, if a reshape shows their sizes."""
    one = tirx.IntImm("int64", 1)
    if len(shape) == 4:
        return {"b": shape[0], "h": shape[1]}
    if len(shape) == 2:
        return {"b": one, "h": one}
    for operand in operands:
        call = block.definition(operand)
        while op_name(call) in (PERMUTE, "relax.multiply"):
            call = block.definition(call.args[0])
        source = shape_of(call.args[0]) if op_name(call) == RESHAPE else None
        if source is not None and len(source) == 4:
            sizes = {"b": source[0], "h": source[1]}
            if regrouped((("b", "h"),), shape[:1], sizes):
                return sizes
    return {"b": one, "h": shape[0]} if isinstance(shape[0], tirx.IntImm) else {"b": shape[0], "h": one}


def _batch_dims(shape: list[Any], sizes: dict[str, Any]) -> list[tuple[str, ...]] | None:
    """Iteration dimensions of the batch dimensions of all operands; None if one of them is unknown."""
    if len(shape) == 4:
        return [("b",), ("h",)]
    if len(shape) == 2:
        return []
    if is_one(sizes["h"]):
        return [("b",)]
    return [("h",)] if is_one(sizes["b"]) else [("b", "h")]


def _shared_heads(
    block: Block, transposed: relax.Expr, value: relax.Expr, batch_dims: list[tuple[str, ...]], sizes: dict[str, Any]
) -> tuple[HeadsTrace, HeadsTrace, int]:
    """Views of key and value, and the number of query heads for each of their heads."""
    repeats = repeated_heads(block, transposed)
    heads = int(sizes["h"])
    for ratio in dict.fromkeys((repeats, 1)):
        if heads % ratio:
            continue
        sizes = {**sizes, "g": tirx.IntImm("int64", heads // ratio), "r": tirx.IntImm("int64", ratio)}
        kv_dims = ("g",) if ratio == 1 else ("g", "r")
        dims = [tuple(x for name in dim for x in (kv_dims if name == "h" else (name,))) for dim in batch_dims]
        keys = traced(block, HeadsTrace.of(transposed, [*dims, ("d",), ("n",)]), sizes, ("d", "n"))
        values = traced(block, HeadsTrace.of(value, [*dims, ("n",), ("e",)]), sizes, ("e",))
        if values.factor == 1.0 and not any("r" in dim for view in (keys, values) for dim in view.dims):
            return keys, values, ratio
    raise NoAttention(f"values of {value.ty} are scaled")


def _scaled(expression: Expression, factor: float) -> Expression:
    if factor == 1.0:
        return expression
    scaled = Term("multiply", (Term("operand", (), (0,)), Term("number", (), (factor,))))
    operands = [Expression.operand(index) for index in range(1, expression.num_operands)]
    return expression.substitute([Expression(scaled), *operands])


def checked_masks(
    operands: list[relax.Expr],
    shape: list[Any],
    sizes: dict[str, Any],
    expression: Expression,
    types: tuple[str, ...] = ("float32",),
) -> list[relax.Expr]:
    """The masks of scores of a shape, after a check of shapes and types; NoAttention where they do not fit."""
    for operand in operands:
        mask_shape = shape_of(operand)
        full_shape = None if mask_shape is None else broadcast(mask_shape, shape)
        if mask_shape is None or full_shape is None or not same_shape(full_shape, shape):
            raise NoAttention(f"a mask of {operand.ty} against scores {shape}")
        if len(shape) == len(mask_shape) == 3 and not is_one(mask_shape[0]):
            if len((_batch_dims(shape, sizes) or [()])[0]) != 1:
                raise NoAttention(f"a mask of {operand.ty}, whose first dimension is batch and heads")
        if str(operand.ty.dtype) not in (*types, "bool"):
            raise NoAttention(f"a mask of element type {operand.ty.dtype}, expected one of {types} or bool")
    if expression.dtype(["float32", *(str(operand.ty.dtype) for operand in operands)]) != "float32":
        raise NoAttention(f"scores {expression} are not float32")
    return operands


def heads_sizes(sizes: dict[str, Any]) -> tuple[int, ...]:
    """Sizes in the form of `Heads`."""
    return tuple(size_of(sizes[name]) for name in NAMES)


def size_of(extent: Any) -> int:
    """An extent as an int; `DYNAMIC` if it is symbolic."""
    return int(extent) if isinstance(extent, tirx.IntImm) else DYNAMIC


def check_sizes(views: list[HeadsTrace], sizes: dict[str, Any]) -> None:
    """Check that each symbolic size is the extent of a single dimension of an operand."""
    single_dims = {dim[0] for view in views for dim in view.dims if len(dim) == 1}
    for name in NAMES:
        if name not in STATIC and size_of(sizes[name]) == DYNAMIC and name not in single_dims:
            raise NoAttention(f"no operand gives the size of {name}")


@dataclass
class Scores:
    """Computation before softmax: the product, the bindings after it, and their expression."""

    product: relax.Call
    inside: list[int]
    expression: Expression
    operands: list[relax.Expr]


@dataclass
class WeightedSum:
    """Computation after softmax: the product with the values."""

    index: int
    inside: list[int]
    nan_to_zero: bool


def find_scores(block: Block, value: relax.Expr) -> Scores | None:
    """The product and elementwise ops that compute `value`, without other users; None if they do not."""
    if not isinstance(value, relax.Var) or block.sole_user(value) is None or value not in block.definitions:
        return None
    call = block.definitions[value]
    index = block.positions[value]
    if op_name(call) == _MATMUL:
        return Scores(call, [index], Expression.operand(0), [])
    parsed = _where_expression(call) if op_name(call) == "relax.where" else to_expression(call)
    if parsed is None:
        return None
    expression, operands = parsed
    for index_of_scores, operand in enumerate(operands):
        shape = shape_of(operand)
        if shape is None or not same_shape(shape, shape_of(value) or []):
            continue
        scores = find_scores(block, operand)
        if scores is not None:
            masks = list(scores.operands)
            terms = [
                scores.expression if i == index_of_scores else _mask_operand(expr, masks)
                for i, expr in enumerate(operands)
            ]
            return Scores(scores.product, [*scores.inside, index], expression.substitute(terms), masks)
    return None


def _mask_operand(expr: relax.Expr, masks: list[relax.Expr]) -> Expression:
    for index, mask in enumerate(masks):
        if mask.same_as(expr):
            return Expression.operand(index + 1)
    masks.append(expr)
    return Expression.operand(len(masks))


def _where_expression(call: relax.Call) -> tuple[Expression, list[relax.Expr]] | None:
    """A ``where`` as an expression, with finite and infinite numbers in it."""
    operands: list[relax.Expr] = []
    terms = []
    for arg in call.args:
        number = _number(arg)
        if number is None:
            terms.append(Term("operand", (), (len(operands),)))
            operands.append(arg)
        else:
            terms.append(Term("number", (), (number,)))
    if terms[0].op == "number" or (terms[1].op, terms[2].op) == ("number", "number"):
        return None
    return Expression(Term("where", tuple(terms))), operands


def _number(expr: relax.Expr) -> float | None:
    if isinstance(expr, tvm.ir.GenericConst) and "float" in str(expr.ty.dtype):
        array = expr.value.numpy()
        return float(array.reshape(-1)[0]) if array.size == 1 else None
    return None


def find_weighted_sum(block: Block, index: int) -> WeightedSum | None:
    """The product whose left operand is the softmax, perhaps with zeros in place of NaN."""
    var = block.bindings[index].var
    inside = [index]
    no_op = _never_true_where(block, var)
    if no_op is not None:
        inside.append(no_op)
        var = block.bindings[no_op].var
    guard = _zero_for_nan(block, var)
    if guard is not None:
        inside += guard
        var = block.bindings[guard[-1]].var
    user = block.sole_user(var)
    if user is not None and rounds(block.bindings[user].value):
        inside.append(user)
        var = block.bindings[user].var
        user = block.sole_user(var)
    if user is None:
        return None
    call = block.bindings[user].value
    if op_name(call) != _MATMUL or not call.args[0].same_as(var) or call.args[1].same_as(var):
        return None
    return WeightedSum(user, [*inside, user], guard is not None)


def _zero_for_nan(block: Block, var: relax.Var) -> list[int] | None:
    """The bindings of ``where(isnan(x), 0, x)`` if they are the only users of x."""
    users = block.users.get(var, [])
    if len(users) != 2 or not block.is_local(var):
        return None
    test, choice = (block.bindings[user] for user in users)
    if op_name(test.value) != "relax.isnan" or op_name(choice.value) != "relax.where":
        return None
    condition, then, otherwise = choice.value.args
    is_guard = condition.same_as(test.var) and scalar_of(then) == 0 and otherwise.same_as(var)
    return users if is_guard and block.sole_user(test.var) == users[1] else None


def _never_true_where(block: Block, var: relax.Var) -> int | None:
    """The binding of ``where(condition, y, x)`` with a constant, false condition, if it is the only user of x."""
    user = block.sole_user(var)
    if user is None or op_name(block.bindings[user].value) != "relax.where":
        return None
    condition, _, otherwise = block.bindings[user].value.args
    is_never = isinstance(condition, tvm.ir.GenericConst) and not condition.value.numpy().any()
    is_same = same_shape(shape_of(var) or [], shape_of(block.bindings[user].var) or [])
    return user if is_never and is_same and otherwise.same_as(var) else None


def find_attention_op(block: Block, index: int) -> Attention | None:
    """The attention op of a binding: query (b, m, h, d), key (b, n, h, d) and value (b, n, h, e).

    Raises
    ------
    NoAttention
        If it is not a supported attention.
    """
    binding = block.bindings[index]
    call = binding.value
    if op_name(call) not in ATTENTION_OPS or not isinstance(binding, relax.VarBinding):
        return None
    operands = list(call.args[:3])
    shapes = [shape_of(operand) or [] for operand in (*operands, binding.var)]
    types = {str(expr.ty.dtype) for expr in (*operands, binding.var)}
    causal = call.attrs.causal_mask
    is_known = len(types) == 1 and types <= {*TYPES} and all(len(shape) == 4 for shape in shapes)
    if not is_known or call.attrs.window_size is not None:
        operand_types = [str(operand.ty) for operand in operands]
        raise NoAttention(f"found {operand_types}, expected tensors of known shape and of one type among {TYPES}")
    query, key, value, _ = shapes
    if not same_shape(query[:1] + query[2:3], key[:1] + key[2:3]):
        raise NoAttention(f"found query {query} and key {key}, expected one batch and number of heads")
    sizes: dict[str, Any] = {"b": query[0], "h": query[2], "g": key[2], "m": query[1], "n": key[1]}
    sizes.update({"d": query[3], "e": value[3]})
    if not all(isinstance(sizes[name], tirx.IntImm) for name in "hde"):
        raise NoAttention(f"found {query}, expected numbers of heads and widths")
    causal_kind = _CAUSAL[None if causal is None else str(causal)]
    if causal_kind == "bottom_right" and not (size_of(sizes["m"]) <= size_of(sizes["n"]) and size_of(sizes["m"]) > 0):
        raise NoAttention(f"causal with {query[1]} queries and {key[1]} keys")
    views = [
        traced(block, HeadsTrace.of(operand, [("b",), (length,), (heads,), (width,)]), sizes, (width,))
        for operand, length, heads, width in zip(operands, "mnn", "hgg", "dde", strict=True)
    ]
    if views[2].factor != 1.0:
        views[2] = HeadsTrace.of(operands[2], [("b",), ("n",), ("g",), ("e",)])
    result, result_views = followed(block, HeadsTrace.of(binding.var, [("b",), ("m",), ("h",), ("e",)]), sizes)
    attr = call.attrs.scale
    scale = 1.0 / math.sqrt(int(sizes["d"])) if attr is None else float(attr.value if hasattr(attr, "value") else attr)
    factor = Term("number", (), (scale * views[0].factor * views[1].factor,))
    scores = Expression(Term("multiply", (Term("operand", (), (0,)), factor)))
    masks = list(call.args[3:])
    if masks:
        scores = Expression(Term("add", (scores.term, Term("operand", (), (1,)))))
        checked_masks(masks, [sizes[name] for name in "bhmn"], sizes, scores)
    check_sizes(views, sizes)
    heads = Heads(views[0].map, views[1].map, views[2].map, result.map, heads_sizes(sizes))
    end = result_views[-1] if result_views else index
    return Attention(
        end,
        [*(view.value for view in views), *masks],
        Heads.parse(str(heads)),
        scores,
        causal_kind,
        inside=[index, *result_views],
    )
