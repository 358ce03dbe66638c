"""TfIdfVectorizer of numbers against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from frontend.ops.checking import check, refused

WORDS = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]])
POOL = {
    "ngram_counts": [0, 4],
    "ngram_indexes": [0, 1, 2, 3, 4, 5, 6],
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
}


def test_pairs_with_skips():
    form = {"mode": "TFIDF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 3}
    check("TfIdfVectorizer", WORDS, opset=9, weights=[0.5, 1.0, 2.0, 3.0, 0.1, 0.2, 0.3], **POOL, **form)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2), (1, 2)])
def test_all_modes(mode, lengths):
    form = {"mode": mode, "min_gram_length": lengths[0], "max_gram_length": lengths[1], "max_skip_count": 5}
    weights = {"weights": [0.5, 1.0, 2.0, 3.0, 0.1, 0.2, 0.3]} if mode != "TF" else {}
    check("TfIdfVectorizer", WORDS.astype("int32"), opset=9, symbolic=(0,), **POOL, **form, **weights)
    check("TfIdfVectorizer", WORDS[1], opset=9, **{**POOL, "ngram_indexes": [6, 5, 4, 0, 1, 2, 9]}, **form)


def test_pools_that_do_not_fit_are_refused():
    form = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0}
    for pool, match in (
        ({**POOL, "ngram_counts": [0, 5]}, "do not divide 10 numbers"),
        ({**POOL, "ngram_indexes": [0, 1, 2, 3, 4, 5, 5]}, "repeats one"),
        ({**POOL, "ngram_indexes": [0, 1]}, "2 entries for 7 n-grams"),
    ):
        refused("TfIdfVectorizer", WORDS, opset=9, match=match, **pool, **form)
