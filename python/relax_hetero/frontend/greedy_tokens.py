"""Greedy tokens of logits, computed on the device of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

from ..encoding.token_masks import MASK_BITS, MASKED_TOKENS, mask_words
from ..tir.math.extremes import index_wins

_MAX_BLOCK = 256
"""Maximum number of logits of a block."""


def greedy_tokens(
    builder: relax.BlockBuilder, logits: relax.Expr, emit: Callable[[relax.Expr, str], relax.Expr]
) -> relax.Expr:
    """Compute the index of the first largest logit of each row; -1 if the largest is infinite, or one is NaN.

    Only the maxima of blocks read all logits: a reduction of vectors, which many threads share.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Builder to which a kernel is added.
    logits : relax.Expr
        Logits of float32, (rows, vocabulary); rows may be symbolic.
    emit : callable
        Binds a value to a variable, given the end of its name.

    Returns
    -------
    relax.Expr
        Tokens of int32, (rows,); not bound yet.
    """
    rows, vocabulary = logits.ty.shape.values[0], int(logits.ty.shape.values[1])
    size = math.gcd(vocabulary, _MAX_BLOCK)
    blocks = emit(relax.op.reshape(logits, [rows, vocabulary // size, size]), "blocks")
    block_max = emit(relax.op.max(blocks, [-1], keepdims=True), "block_max")
    return builder.call_te(_tokens, blocks, block_max, primfunc_name_hint="greedy_tokens")


def masked_tokens(builder: relax.BlockBuilder, vocabulary: int) -> relax.Function:
    """Make the function ``masked_tokens``: greedy tokens among those that masks allow.

    Its parameters are ``logits``, (rows, vocabulary) of float32, and ``masks``, (rows, words) of int32 (`token_masks`),
    for any number of rows. It returns (rows,) of int32. Variables have the names of the logits in functions of models,
    which placement rules match.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Builder to which kernels are added.
    vocabulary : int
        Number of logits of a row.
    """
    rows, words = tirx.Var("rows", "int64"), mask_words(vocabulary)
    logits = relax.Var("logits", relax.TensorType([rows, vocabulary], "float32"))
    masks = relax.Var("masks", relax.TensorType([rows, words], "int32"))
    bindings: list[relax.Binding] = []

    def emit(value: relax.Expr, name: str, is_output: bool = False) -> relax.Expr:
        value = builder.normalize(value)
        var = (relax.Var if is_output else relax.DataflowVar)(name, value.ty)
        bindings.append(relax.VarBinding(var, value))
        return var

    allowed = emit(builder.call_te(_allowed, logits, masks, primfunc_name_hint="allowed_logits"), "output")
    tokens = greedy_tokens(builder, allowed, lambda value, name: emit(value, f"output.{name}"))
    result = emit(tokens, "output.greedy_tokens", is_output=True)
    names = {"input_names": ["logits", "masks"], "output_names": ["tokens"]}
    attributes = tvm.ir.make_node("ir.DictAttrs", global_symbol=MASKED_TOKENS, num_input=2, **names)
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
    return relax.Function([logits, masks], body, result.ty, attrs=attributes)


def _allowed(logits: te.Tensor, masks: te.Tensor) -> te.Tensor:
    """Logits of allowed tokens, and -inf for others."""

    def element(row: tirx.Var, token: tirx.Var) -> tirx.PrimExpr:
        bit = (masks[row, token // MASK_BITS] >> tirx.Cast("int32", token % MASK_BITS)) & 1
        return tirx.Select(bit != 0, logits[row, token], tirx.const(float("-inf"), "float32"))

    return te.compute(logits.shape, element, "allowed")


def _tokens(blocks: te.Tensor, block_max: te.Tensor) -> te.Tensor:
    """Find the first block with the largest logit, then the first such logit in it."""
    rows, count, size = blocks.shape
    block, row_max = _first_largest(rows, count, lambda i, j: block_max[i, j, 0])
    column, _ = _first_largest(rows, size, lambda i, j: blocks[i, block[i], j])

    def token(i: tirx.Var) -> tirx.PrimExpr:
        is_finite = tirx.abs(row_max[i]) < tirx.infinity("float32")
        return tirx.Select(is_finite, tirx.Cast("int32", block[i] * size + column[i]), -1)

    return te.compute((rows,), token, "token")


def _first_largest(
    rows: tirx.PrimExpr, extent: tirx.PrimExpr, element: Callable[[tirx.Var, tirx.Var], tirx.PrimExpr]
) -> tuple[te.Tensor, te.Tensor]:
    """Index and value of the first largest element of each row, or of its first NaN."""

    def better(one: list[tirx.PrimExpr], other: list[tirx.PrimExpr]) -> tuple[tirx.PrimExpr, ...]:
        wins = index_wins(one, other, largest=True, last=False)
        return tuple(tirx.Select(wins, *pair) for pair in zip(one, other, strict=True))

    def start(index: str, value: str) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        return tirx.max_value(index), tirx.const(float("-inf"), value)

    along = te.reduce_axis((0, extent), "along")
    first = te.comm_reducer(better, start, "first_largest")
    return te.compute((rows,), lambda i: first((along.var, element(i, along.var)), axis=along), "first_largest")
