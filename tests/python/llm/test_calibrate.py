"""Measured decode steps begin with as many cached tokens in every call; the host's time is without waits."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from relax_hetero.errors import CacheError
from relax_hetero.frontend import CostModel, DeviceCost, LinkCost, PagedCache
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.llm import calibrate
from relax_hetero.target.make_vdevice import parse_vdevices

CACHE = PagedCache((1,), (32,), 1, 64)


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


def test_the_hosts_time_is_without_waits(monkeypatch):
    """Beginning a step, and taking its tokens; not the time until devices have computed them."""
    now = SimpleNamespace(seconds=0.0)

    def takes(seconds, result=None):
        def call(*_):
            now.seconds += seconds
            return result

        return call

    step = SimpleNamespace(tokens=takes(2.0))
    machine = SimpleNamespace(devices=[SimpleNamespace(sync=takes(100.0))] * 2)
    model = SimpleNamespace(begin_decode=takes(3.0, step), machine=machine)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now.seconds)
    assert calibrate._host_seconds(model, [0], takes(50.0)) == 5.0


def test_the_hosts_time_of_groups_and_stages(tmp_path, monkeypatch):
    """Two devices are loaded both ways; those that do not reach each other's memory only as stages."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16"))
    vdevices = parse_vdevices([{"kind": "llvm", "num-cores": 1}] * 2)
    costs = CostModel([DeviceCost(1e11, 1e10, 1e-6)] * 2, {(0, 1): LinkCost(1e10, 1e-6)})
    parts, placements = [], []

    def host_seconds(model, slots, rewind):
        rewind()
        assert model.begin_decode(slots, [7]).tokens()[0] >= 0
        parts.append(model.description.cache_parts)
        return 5.0

    monkeypatch.setattr(calibrate, "_host_seconds", host_seconds)
    monkeypatch.setattr(calibrate, "has_peer_access", lambda gpu, peer: True)
    further = calibrate._further_host_seconds(file, CACHE, vdevices, costs, 3.0)
    assert further == {"device": 2.0, "stage": 2.0} and parts == [(2, 2), ()]
    monkeypatch.setattr(calibrate, "has_peer_access", lambda gpu, peer: False)
    monkeypatch.setattr(calibrate, "_host_seconds", lambda *_: 2.0)
    monkeypatch.setattr(calibrate, "compile_layers", lambda *arguments: placements.append(arguments[2]) or MagicMock())
    assert calibrate._further_host_seconds(file, CACHE, vdevices, costs, 3.0) == {"stage": 0.0}
    assert [placement["blk.1.*"] for placement in placements] == ["vdevice:1"]


@pytest.mark.parametrize(("name", "expected"), [("deepseek2-lite", 4), ("llama", 2), ("qwen3moe", 2)])
def test_layers_of_each_kind_are_measured(name, expected, tmp_path, monkeypatch):
    """Experts come after dense layers, and the last layer has one row of a prompt."""
    sizes = replace(MODELS[name], layers=6, **({"dense_layers": 2} if name == "deepseek2-lite" else {}))
    file = read_gguf(write_gguf(tmp_path / "model.gguf", sizes, "F16", sparse=True))
    monkeypatch.setattr(calibrate, "_MAX_BYTES", 1)
    count = calibrate._measured_layers(file, hyperparameters_of(file))
    part = hyperparameters_of(file.first_layers(count))
    assert count == expected and (part.experts == 0 or part.dense_layers < count - 1)
