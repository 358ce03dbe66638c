"""Measured decode steps begin with as many cached tokens in every call."""

import numpy as np

from relax_hetero.errors import CacheError
from relax_hetero.llm import calibrate


class _Texts:
    """A model, and its cache, whose states cannot be rewound."""

    def __init__(self):
        self.cache, self.lengths, self.prefilled = self, {0: 0, 1: 40}, []

    def truncate(self, slot, length):
        if 0 < length < self.lengths[slot] or length > self.lengths[slot]:
            raise CacheError("none can be removed")
        self.lengths[slot] = length

    def prefill(self, slot, tokens):
        self.lengths[slot] += len(tokens)
        self.prefilled.append((slot, list(tokens)))


def test_sequences_that_cannot_be_cut_are_computed_again(monkeypatch):
    model, lengths = _Texts(), []
    texts = np.arange(20).reshape(2, 10)

    def steps():
        lengths.append(dict(model.lengths))
        model.lengths = {slot: length + 16 for slot, length in model.lengths.items()}

    monkeypatch.setattr(calibrate, "_MIN_SECONDS", 0)
    monkeypatch.setattr(calibrate, "_MIN_CALLS", 2)
    calibrate._seconds(steps, lambda: calibrate._rewind(model, [0, 1], texts, 4))
    assert lengths == [{0: 4, 1: 4}] * 3  # one call is not timed
    assert model.prefilled == [(0, [0, 1, 2, 3]), (1, [10, 11, 12, 13])] * 3
