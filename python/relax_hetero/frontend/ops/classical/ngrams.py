"""Counts of n-grams."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from tvm import relax, te, tirx

from ..node import Node, Position, const, dtype_of
from ..table import converts

_MODES = ("TF", "IDF", "TFIDF")


def _pool(node: Node) -> list[np.ndarray]:
    """The n-grams of each length from 1 on, as rows.

    Raises FrontendError if they are strings, or do not match their counts.
    """
    if node.attribute("pool_strings"):
        raise node.refusal("its n-grams are strings, which no tensor holds; give words as numbers")
    tokens, starts = np.array(node.attribute("pool_int64s", ()), "int64"), list(node.attribute("ngram_counts", ()))
    ngrams = []
    for length, (start, end) in enumerate(pairwise([*starts, tokens.size]), 1):
        if not 0 <= start <= end or (end - start) % length:
            raise node.refusal(f"ngram_counts {starts} do not divide {tokens.size} numbers into n-grams")
        ngrams.append(tokens[start:end].reshape(-1, length))
    return ngrams


@converts("TfIdfVectorizer")
def tfidf_vectorizer(node: Node) -> relax.Expr:
    """Number of occurrences of each n-gram in a row, with up to `max_skip_count` tokens between its elements."""
    min_length, max_length, skips = (
        int(node.attribute(name)) for name in ("min_gram_length", "max_gram_length", "max_skip_count")
    )
    mode, weights = node.attribute("mode"), np.array(node.attribute("weights", ()), "float32")
    pool, indexes = _pool(node), np.array(node.attribute("ngram_indexes", ()), "int64")
    if mode not in _MODES or not 1 <= min_length <= max_length or skips < 0:
        raise node.refusal(f"found mode {mode!r}, lengths {min_length} to {max_length} and {skips} skips")
    size, count = int(indexes.max(initial=-1)) + 1, sum(len(ngrams) for ngrams in pool)
    if indexes.size != count or len(set(indexes.tolist())) < indexes.size or indexes.min(initial=0) < 0:
        raise node.refusal(f"ngram_indexes has {indexes.size} entries for {count} n-grams, or repeats one")
    if weights.size not in (0, indexes.size):
        raise node.refusal(f"weights has {weights.size} entries, expected {indexes.size}")
    data = node.tensor(0)
    if dtype_of(data) not in ("int32", "int64") or node.rank(data) not in (1, 2):
        raise node.refusal(
            f"found rank {node.rank(data)} and type {dtype_of(data)}, expected 1 or 2, of int32 or int64"
        )
    rows = data if node.rank(data) == 2 else node.emit(relax.op.expand_dims(data, [0]))
    node.check_constant_size(size, max_length)
    parts: list[relax.Expr] = []
    total, column_of = 0, np.full(size, indexes.size, "int64")
    for length, ngrams in enumerate(pool, 1):
        start = sum(len(shorter) for shorter in pool[: length - 1])
        if min_length <= length <= max_length and len(ngrams):
            column_of[indexes[start : start + len(ngrams)]] = sum(
                int(part.ty.shape.values[1]) for part in parts
            ) + np.arange(len(ngrams))
            parts.append(_counts(node, rows, ngrams, skips if length > 1 else 0))
    total = sum(int(part.ty.shape.values[1]) for part in parts)
    parts.append(node.filled([node.shape(rows)[0], 1], 0, "float32"))  # column of n-grams that are not counted
    counts = node.emit(relax.op.concat(parts, axis=1)) if len(parts) > 1 else parts[0]
    result = node.emit(relax.op.take(counts, const(np.minimum(column_of, total), "int64"), 1, "fast"))
    if mode == "IDF":
        result = node.emit(relax.op.astype(result > const(0, "float32"), "float32"))
    if mode != "TF" and weights.size:
        output_weights = np.zeros(size, "float32")  # by output index, as in ONNX's reference
        output_weights[: weights.size] = weights[:size]
        result = node.emit(result * const(output_weights))
    return result if node.rank(data) == 2 else node.emit(relax.op.squeeze(result, [0]))


def _counts(node: Node, rows: relax.Expr, ngrams: np.ndarray, skips: int) -> relax.Expr:
    """Occurrences of n-grams, (rows, n-grams), with elements at equal distances of 1 to `skips` + 1."""
    count, length = node.shape(rows)[0], ngrams.shape[1]

    def element(i: Position, x: te.Tensor, tokens: te.Tensor) -> tirx.Expr:
        first, skip = te.reduce_axis((0, x.shape[1]), "first"), te.reduce_axis((0, skips + 1), "skip")
        last = first + (length - 1) * (skip + 1)
        row = [x(i[0], first + offset * (skip + 1)).astype("int64") for offset in range(length)]
        matches = [value.equal(tokens(i[1], offset)) for offset, value in enumerate(row)]
        match = tirx.Cast("float32", tirx.Cast("int32", tirx.all(*matches)))
        return te.sum(tirx.if_then_else(last < x.shape[1], match, tirx.const(0, "float32")), axis=[first, skip])

    return node.kernel("count_ngrams", element, rows, const(ngrams), shape=[count, len(ngrams)])
