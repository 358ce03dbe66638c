"""Measured decode steps begin with as many cached tokens in every call."""

from dataclasses import replace

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from relax_hetero.errors import CacheError
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
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


@pytest.mark.parametrize(("name", "expected"), [("deepseek2-lite", 4), ("llama", 2), ("qwen3moe", 2)])
def test_layers_of_each_kind_are_measured(name, expected, tmp_path, monkeypatch):
    """Experts come after dense layers, and the last layer has one row of a prompt."""
    sizes = replace(MODELS[name], layers=6, **({"dense_layers": 2} if name == "deepseek2-lite" else {}))
    file = read_gguf(write_gguf(tmp_path / "model.gguf", sizes, "F16", sparse=True))
    monkeypatch.setattr(calibrate, "_MAX_BYTES", 1)
    count = calibrate._measured_layers(file, hyperparameters_of(file))
    part = hyperparameters_of(file.first_layers(count))
    assert count == expected and (part.experts == 0 or part.dense_layers < count - 1)
