"""Counts of the tokens that chose each expert: all tokens of sequences, on every device, in memory and in a file."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.place_experts import read_expert_counts
from relax_hetero.llm import expert_counts

# A layer without experts comes first.
SIZES = replace(MODELS["glm4moe"], layers=2, experts=6, experts_used=2)
TOKENS = np.random.default_rng(5).integers(0, 320, 21).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("counts") / "model.gguf", SIZES, "F32")


@pytest.fixture(scope="module")
def model(path):
    devices = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]
    placement = {"blk.*.ffn_*_exps[0,3-4]": "llvm:0", "blk.*.ffn_*": "llvm:1"}  # attention is not where experts are
    options = {"batches": (2,), "chunks": (16,), "context": 64, "count_experts": True}
    return rh.llm.load(path, devices, placement, **options)[0]


def test_rows_of_sequences_are_counted(model):
    """Prompts and decoded tokens alike, but no padding."""
    before = model.expert_counts.read()
    assert list(before) == [1]
    slots = [model.cache.add(), model.cache.add()]
    model.prefill(slots[0], TOKENS[:16])
    model.prefill(slots[0], TOKENS[16:])  # five tokens of 16 rows
    prompt = np.subtract(model.expert_counts.read()[1], before[1])
    assert prompt.sum() == len(TOKENS) * SIZES.experts_used and prompt.max() <= len(TOKENS)
    for token in TOKENS:
        model.decode(slots[1:], [token])  # one of two rows
    both = np.subtract(model.expert_counts.read()[1], before[1])
    assert both.sum() == 2 * prompt.sum()
    assert np.abs(both - 2 * prompt).sum() <= 4  # kernels of prompts may round otherwise
    for slot in slots:
        model.cache.free(slot)


def test_files_are_written_once_in_a_while(model, path, tmp_path, monkeypatch):
    counts, now = model.expert_counts, [0.0]
    monkeypatch.setattr(expert_counts.time, "monotonic", lambda: now[0])
    file = tmp_path / "counts.json"
    monkeypatch.setattr(counts, "path", file)
    counts.write()
    written = file.read_text()
    slot = model.cache.add()
    model.prefill(slot, TOKENS[:3])
    assert file.read_text() == written
    now[0] += expert_counts.WRITE_SECONDS
    model.decode([slot], [7])
    model.cache.free(slot)
    assert json.loads(file.read_text()) == {"expert_counts": {"1": counts.read()[1]}} != json.loads(written)
    assert [entry.name for entry in tmp_path.iterdir()] == ["counts.json"]
    assert read_expert_counts(file, hyperparameters_of(read_gguf(path))) == {1: tuple(counts.read()[1])}
    monkeypatch.setattr(counts, "path", tmp_path / "missing" / "counts.json")
    with pytest.raises(rh.HeteroError, match=r"counts.json cannot be written: No such file"):
        counts.write()


def test_requests_outlive_a_file_that_cannot_be_written(model, tmp_path, monkeypatch, caplog):
    """A warning, and another attempt later."""
    counts, now = model.expert_counts, [0.0]
    monkeypatch.setattr(expert_counts.time, "monotonic", lambda: now[0])
    folder = tmp_path / "later"
    monkeypatch.setattr(counts, "path", folder / "counts.json")
    monkeypatch.setattr(counts, "_next_write", 0.0)
    slot = model.cache.add()
    for is_there, warnings in ((False, 1), (False, 1), (True, 1), (True, 1)):
        if is_there:
            folder.mkdir(exist_ok=True)
        model.prefill(slot, TOKENS[:2])
        assert sum("counts.json cannot be written: No such file" in text for text in caplog.messages) == warnings
        now[0] += expert_counts.WRITE_SECONDS * is_there
    model.cache.free(slot)
    assert json.loads((folder / "counts.json").read_text()) == {"expert_counts": {"1": counts.read()[1]}}


def counters(*layers):
    spec = rh.artifact.signature.TensorSpec
    return expert_counts.ExpertCounts([spec(f"expert_counts_{layer}", (2,), "int32", -1) for layer in layers], [])


def test_counts_add_to_those_of_a_file(tmp_path):
    file = tmp_path / "counts.json"
    for total in (3, 6, 9):
        counts = counters(3, 4)
        counts.continue_file(file)
        before = file.read_text()
        counts.tensors[1].copyfrom(np.array([0, 3], "int32"))
        assert counts.read() == {3: [0, 0], 4: [0, total]}
        counts.write()
        assert before == json.dumps({"expert_counts": {"3": [0, 0], "4": [0, total - 3]}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"expert_counts": {"3": [1, 2], "5": [1, 2]}}',
            r"of 2 layers \(3 to 5\) of 2 experts, expected",
        ),
        (
            '{"expert_counts": {"3": [1, 2, 3], "4": [1, 2, 3]}}',
            r"of 3 experts, .* for 2 layers \(3 to 4\) of 2",
        ),
        ('{"expert_counts": {"3": [1, 2.5], "4": [1, 2]}}', "expected whole numbers"),
        ('{"expert_counts": {}}', "found counts of no layers"),
        ("[1]", "is not a file of expert counts"),
        ("", "is not a file of expert counts: .*; name another file, or remove this one"),
    ],
)
def test_other_files_are_kept(text, message, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(rh.HeteroError, match=message):
        counters(3, 4).continue_file(file)
    assert file.read_text() == text


@pytest.mark.slow
def test_a_saved_model_counts_if_it_was_compiled_so(path, model, tmp_path):
    rh.llm.save(model, path, tmp_path / "counting")
    saved, _ = rh.llm.load(tmp_path / "counting", count_experts=True)
    slot = saved.cache.add()
    saved.prefill(slot, TOKENS[:4])
    assert sum(saved.expert_counts.read()[1]) == 4 * SIZES.experts_used
    plain, _ = rh.llm.load(path, batches=(1,), chunks=(16,), context=64)
    rh.llm.save(plain, path, tmp_path / "plain")
    with pytest.raises(rh.BuildError, match="its functions do not count experts; load the GGUF file of a mixture"):
        rh.llm.load(tmp_path / "plain", count_experts=True)


def test_counters_may_start_again_from_zero():
    spec = rh.artifact.signature.TensorSpec("expert_counts_3", (2,), "int32", -1)
    counts = expert_counts.ExpertCounts([spec], [])
    for values in ([2**31 - 1, 5], [-(2**31), 5], [-1, 6], [3, 6]):
        counts.tensors[0].copyfrom(np.array(values, "int32"))
        total = counts.read()
    assert total == {3: [2**32 + 3, 6]}


def test_models_without_counters(path, tmp_path):
    assert expert_counts.ExpertCounts([], [tvm.cpu()]).read() == {}
    dense = write_gguf(tmp_path / "dense.gguf", MODELS["llama"])
    with pytest.raises(rh.FrontendError, match="the model has no experts, expected a mixture of experts"):
        rh.from_gguf(dense, count_experts=True)
