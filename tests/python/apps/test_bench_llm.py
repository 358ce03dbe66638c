"""The benchmark of language models: figures computed from logits, and conclusions from two contestants."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[3] / "apps" / "bench"
pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "llm_bench"))
    monkeypatch.setattr(sys, "path", sys.path[:])


class Toy:
    """Logits that depend on the sum of all tokens; `twist` changes those of one sum."""

    def __init__(self, twist: float = 0.0) -> None:
        self._sum, self._twist = 0, twist
        self._table = np.random.default_rng(0).standard_normal((50, 7)).astype("float32")

    def reset(self):
        self._sum = 0

    def tokenize(self, text):
        return [len(word) % 7 for word in text.split()]

    def text_of(self, tokens):
        return " ".join(map(str, tokens))

    def append(self, tokens):
        self._sum += sum(tokens)
        logits = self._table[self._sum % 50].copy()
        logits[(logits.argmax() + 1) % 7] += self._twist
        return logits


class InProcess:
    """A contestant without a process."""

    def __init__(self, library, model):
        from contestant import Work, memory

        self.library, self._work = library, Work(model, memory())

    def __call__(self, command, **options):
        return getattr(self._work, command)(**options), 0.5


def logits_of(tokens):
    model = Toy()
    return [model.append([token]) for token in tokens]


def test_a_greedy_text_takes_the_largest_logit_each_time():
    both = InProcess("ours", Toy())
    assert both("prefill", tokens=[1, 2])[0] == int(Toy().append([1, 2]).argmax())
    text = both("decode", count=20)[0]
    rows = logits_of([1, 2, *text])[1:]
    assert text == [int(row.argmax()) for row in rows[:-1]]
    assert both("gaps", tokens=[1, 2, *text], start=2)[0] == [0.0] * 20


def test_surprise_is_the_mean_of_minus_log_p():
    tokens = [3, 1, 6, 2]
    rows = [row.astype(float) for row in logits_of(tokens)[:-1]]
    expected = [math.log(np.exp(row).sum()) - row[token] for row, token in zip(rows, tokens[1:], strict=True)]
    assert InProcess("ours", Toy())("surprise", tokens=tokens)[0] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(("twist", "close"), [(0.0, True), (0.3, True), (5.0, False)])
def test_texts_may_differ_within_rounding_only(twist, close):
    from compare import compare_texts

    assert compare_texts([InProcess("ours", Toy(twist)), InProcess("llama.cpp", Toy())], [1, 2]) == close


def test_perplexity_is_held_to_exact_arithmetic_where_that_is_known():
    from compare import compare_perplexity

    tokens = [3, 1, 6, 2, 5]
    ours, peer = InProcess("ours", Toy()), InProcess("llama.cpp", Toy(0.5))
    exact = math.exp(ours("surprise", tokens=tokens)[0])
    assert not compare_perplexity([ours, peer], tokens, None)
    assert compare_perplexity([ours, peer], tokens, exact)
    assert not compare_perplexity([ours, peer], tokens, exact * 1.006)


def test_rates_are_medians_over_rounds_and_the_first_does_not_count():
    from compare import DECODED, PREFILLED, show_speed, speed

    rates = speed([InProcess("ours", Toy()), InProcess("llama.cpp", Toy())], [1] * PREFILLED, 3)
    assert rates == dict.fromkeys(("ours", "llama.cpp"), {"prefill": PREFILLED / 0.5, "decode": DECODED / 0.5})
    assert show_speed(rates, 1, {"decode": 1.0}) and not show_speed(rates, 1, {"decode": 1.1})


def test_a_contestant_that_crashes_ends_the_benchmark(tmp_path):
    from compare import Process

    with pytest.raises(SystemExit, match="ours ended with 1; run contestant.py"):
        Process("ours", str(tmp_path), 1, 64)


def commands_of_llama_cpp(folder):
    """Stand-ins that answer with their arguments and with fixed speeds."""
    bench = folder / "llama-bench"
    tests = [{"n_prompt": 512, "samples_ts": [speed]} for speed in (70.0, 90.0)]
    for path, lines in (
        (bench, [*tests, {"n_prompt": 0, "samples_ts": [5.0, 7.0, 60.0]}]),
        (folder / "llama-batched-bench", [{"pl": 8, "speed_tg": 30.0}]),
    ):
        answer = "\n".join(map(json.dumps, lines))
        path.write_text(f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES: $@ >> {folder}/calls\ncat <<END\n{answer}\nEND\n")
        path.chmod(0o755)
    return bench


def test_commands_of_llama_cpp_see_the_gpu_that_a_placement_names(tmp_path, monkeypatch):
    from llm_bench.mixed import PLACEMENTS, llama_cpp

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    works = [("decode", 1), ("decode", 8), ("prefill", 512)]
    bench = commands_of_llama_cpp(tmp_path)
    for name, beginning in (("experts", "0: -m m.gguf -t 3 -ngl 99 -ncmoe 999 "), ("cpu", ": -m m.gguf -t 3 -ngl 0 ")):
        speeds = llama_cpp(bench, Path("m.gguf"), PLACEMENTS[name], 3, works)
        assert speeds == {("decode", 1): 7.0, ("decode", 8): 30.0, ("prefill", 512): 90.0}
        assert all(line.startswith(beginning) for line in (tmp_path / "calls").read_text().splitlines())
        (tmp_path / "calls").unlink()


def test_a_step_of_several_texts_reads_each_chosen_expert_once(tmp_path):
    from llm_bench.mixed import TINY, expert_bytes
    from llm_bench.random_gguf import write_gguf

    path = write_gguf(tmp_path / "model.gguf", TINY, "F32")
    all_experts = TINY.layers * TINY.experts * 3 * TINY.width * TINY.expert_width * 4
    assert expert_bytes(path, TINY, 1) == all_experts * TINY.experts_used / TINY.experts
    assert expert_bytes(path, TINY, 1000) == pytest.approx(all_experts)


def test_calls_are_compared_at_the_machines_speed(capsys):
    """Those before and after which the simulation differs do not count; one alone at any speed does."""
    from llm_bench.scaling_validation import Sample, _check

    def expected(rate):
        return 12 / rate

    samples = [Sample(2.0, 12, 12), Sample(4.2, 6, 6), Sample(2.2, 12, 6), Sample(3.8, 6, 6.2)]
    assert _check("two", samples, expected, 2).found == pytest.approx(0)
    shown = capsys.readouterr().out
    assert "two: quartiles 0.95 and 1.04 of 3 calls; 1 do not count" in shown
    assert "measured 1000.000 ms, simulated 1000.000 ms, 1.00" in shown
    assert not _check("two", samples[2:3], expected, 2).passed and "nan" in capsys.readouterr().out
    assert _check("one", samples[2:3], lambda rate: 1.0, 2).found == pytest.approx(1 - 1 / 1.1)
