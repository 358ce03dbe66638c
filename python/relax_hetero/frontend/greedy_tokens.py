"""Greedy tokens of logits, computed on the device of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax, te, tirx

from ..encoding.token_masks import MASK_BITS, MASKED_TOKENS, mask_words
from ..target.mesh import mesh_positions
from ..target.vdevice import is_cpu
from ..tir.math.extremes import index_wins

_GPU_PARTS = 64  # maximum parts of a row on GPUs: blocks that share the logits of one row


def greedy_tokens(
    builder: relax.BlockBuilder,  # builder to which a kernel is added
    logits: relax.Expr,  # logits of float32, (rows, vocabulary); rows may be symbolic
    emit: Callable[[relax.Expr, str], relax.Expr],  # binds a value to a variable, given the end of its name
    vdevice: relax.VDevice | None = None,  # device or mesh of the logits
) -> relax.Expr:
    """Compute the index of the first largest logit of each row; -1 if the largest is infinite, or one is NaN.

    Each part of the vocabulary has a candidate, its first largest logit. Over a mesh whose devices have parts of the
    logits, they compute their own candidates, and exchange only these. Returns tokens of int32, (rows,); not bound yet.
    """
    rows, vocabulary = logits.ty.shape.values[0], int(logits.ty.shape.values[1])
    parts = _parts(vocabulary, vdevice)
    by_part = emit(relax.op.reshape(logits, [rows, parts, vocabulary // parts]), "parts")
    top = emit(relax.op.topk(by_part, 1, -1, "both", largest=True, dtype="int32"), "top_of_part")
    largest, index = (
        emit(relax.TupleGetItem(top, i), f"{name}_of_part") for i, name in enumerate(("largest", "index"))
    )
    candidates = [largest, index]
    if len(mesh_positions(vdevice)) > 1:  # one tensor, so that devices exchange one
        as_float = emit(relax.op.astype(index, "float32"), "float_index")  # exact: fewer tokens than 2^24
        candidates = [emit(relax.op.concat([largest, as_float], -1), "candidates")]
    return builder.call_te(_tokens, candidates, vocabulary // parts, primfunc_name_hint="greedy_tokens")


def _parts(vocabulary: int, vdevice: relax.VDevice | None) -> int:
    """Number of parts of the vocabulary: a multiple of the mesh's devices, if these divide it."""
    count = len(mesh_positions(vdevice)) or 1
    if vocabulary % count:
        count = 1
    if vdevice is None or is_cpu(vdevice):
        return count
    # A power of two for each device, as sizes of vocabularies are multiples of such.
    max_parts = 1 << max(_GPU_PARTS // count, 1).bit_length() - 1
    return count * math.gcd(vocabulary // count, max_parts)


def masked_tokens(builder: relax.BlockBuilder, vocabulary: int, vdevice: relax.VDevice | None = None) -> relax.Function:
    """Make the function ``masked_tokens``: greedy tokens among those that masks allow.

    Its parameters are ``logits``, (rows, vocabulary) of float32, and ``masks``, (rows, words) of int32 (`token_masks`),
    for any number of rows. It returns (rows,) of int32. Variables have the names of the logits in functions of models,
    which placement rules match. `builder`: builder to which kernels are added; `vocabulary`: number of logits of a row;
    `vdevice`: device or mesh of the logits.
    """
    rows, words = tirx.Var("rows", "int64"), mask_words(vocabulary)
    logits = relax.Var("logits", relax.TensorType([rows, vocabulary], "float32"))
    masks = relax.Var("masks", relax.TensorType([rows, words], "int32"))
    bindings: list[relax.Binding] = []

    def emit(value: relax.Expr, name: str) -> relax.Expr:
        value = builder.normalize(value)
        var = relax.DataflowVar(f"output.{name}", value.ty)
        bindings.append(relax.VarBinding(var, value))
        return var

    tokens = builder.normalize(greedy_tokens(builder, _allowed(logits, masks, emit), emit, vdevice))
    result = relax.Var("output.greedy_tokens", tokens.ty)
    bindings.append(relax.VarBinding(result, tokens))
    names = {"input_names": ["logits", "masks"], "output_names": ["tokens"]}
    attributes = tvm.ir.make_node("ir.DictAttrs", global_symbol=MASKED_TOKENS, num_input=2, **names)
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
    return relax.Function([logits, masks], body, result.ty, attrs=attributes)


def _allowed(logits: relax.Var, masks: relax.Var, emit: Callable[[relax.Expr, str], relax.Expr]) -> relax.Expr:
    """Logits of allowed tokens, and -inf for others and for the rest of the last word: (rows, 32 * words).

    Elementwise ops on words, so that each device of a mesh masks its part of the logits with the words of that part.
    """
    (rows, vocabulary), words = logits.ty.shape.values, int(masks.ty.shape.values[1])
    if rest := words * MASK_BITS - int(vocabulary):
        logits = emit(relax.op.nn.pad(logits, [0, 0, 0, rest], "constant", -math.inf), "whole_words")
    by_word = emit(relax.op.reshape(logits, [rows, words, MASK_BITS]), "by_word")
    mask = emit(relax.op.reshape(masks, [rows, words, 1]), "mask")
    shifted = emit(relax.op.right_shift(mask, relax.const(np.arange(MASK_BITS, dtype=np.int32))), "shifted")
    bits = emit(relax.op.bitwise_and(shifted, relax.const(1, "int32")), "bits")
    is_allowed = emit(relax.op.astype(bits, "bool"), "is_allowed")
    allowed = emit(relax.op.where(is_allowed, by_word, relax.const(-math.inf, "float32")), "allowed")
    return emit(relax.op.reshape(allowed, [rows, words * MASK_BITS]), "masked")


def _tokens(candidates: list[te.Tensor], size: int) -> te.Tensor:
    """Tokens of the largest candidates, the first ones of equal ones.

    Candidates are logits and indices in their parts, (rows, parts, 1) each, or both in one tensor of (rows, parts, 2).
    """
    (rows, parts, _), values, indices = candidates[0].shape, candidates[0], candidates[-1]

    def better(one: list[tirx.PrimExpr], other: list[tirx.PrimExpr]) -> tuple[tirx.PrimExpr, ...]:
        wins = index_wins(one, other, largest=True, last=False)
        return tuple(tirx.Select(wins, *pair) for pair in zip(one, other, strict=True))

    def start(index: str, value: str) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        return tirx.max_value(index), tirx.const(float("-inf"), value)

    part = te.reduce_axis((0, parts), "part")
    first = te.comm_reducer(better, start, "first_largest")

    def candidate(row: tirx.Var) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        index = indices[row, part, indices.shape[-1] - 1]
        token = tirx.Cast("int32", part * size) + tirx.Cast("int32", index)
        return first((token, values[row, part, 0]), axis=part)

    token, largest = te.compute((rows,), candidate, "largest")

    def checked(row: tirx.Var) -> tirx.PrimExpr:
        return tirx.Select(tirx.abs(largest[row]) < tirx.infinity("float32"), token[row], -1)

    return te.compute((rows,), checked, "token")
