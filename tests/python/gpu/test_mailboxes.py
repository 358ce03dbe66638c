"""Decode steps of a mixture over a GPU and the CPU, which wait for each other inside of one command buffer each."""

from dataclasses import replace

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from models.running import needs_gpu
from relax_hetero.artifact.commands import GRAPH
from relax_hetero.transform.record import form_mailboxes

pytestmark = [pytest.mark.gpu, needs_gpu]

EXPERTS_ON_THE_CPU = {"blk.*.ffn_*_exps": "llvm", "*": "cuda"}
OPTIONS = {"batches": (1, 4), "chunks": (32,), "context": 256, "activations": "float32", "stream_experts": None}


def logits_of(model, steps=60):
    """Logits of steps of one text, then of four texts."""
    tokens = np.random.default_rng(0).integers(3, 300, (4, steps)).astype("int32")
    slots = [model.cache.add() for _ in tokens]
    result = [model.prefill(slot, row[:20])[None].copy() for slot, row in zip(slots, tokens, strict=True)]
    for step in range(20, steps):
        count = 4 if step % 3 == 0 else 1
        result.append(model.decode(slots[:count], tokens[:count, step]).copy())
    for slot in slots:
        model.cache.free(slot)
    return np.concatenate(result)


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "gpt-oss"])
def test_experts_on_the_cpu(name, tmp_path, monkeypatch):
    """Both devices work in one command buffer, and the logits have the bits of those with transfers."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")  # its key lacks what is patched below
    path = write_gguf(tmp_path / "model.gguf", replace(MODELS[name], layers=4), "Q8_0")
    model, _ = rh.llm.load(path, ["llvm", "cuda"], EXPERTS_ON_THE_CPU, **OPTIONS)
    metadata = model.executable.metadata
    for function in ("decode_1", "decode_4", "prefill_32"):
        regions = [region for region in metadata.regions if region.function == function]
        assert [region.runs == GRAPH for region in regions].count(True) == 1
        assert all(map(metadata.has_mailboxes, regions)) and len(regions) == 2
    monkeypatch.setattr(form_mailboxes, "MIN_EXCHANGES", 1 << 30)
    plain, _ = rh.llm.load(path, ["llvm", "cuda"], EXPERTS_ON_THE_CPU, **OPTIONS)
    assert not any(map(plain.executable.metadata.has_mailboxes, plain.executable.metadata.regions))
    np.testing.assert_array_equal(logits_of(model), logits_of(plain))
    cost = model.token_cost(profile=True)
    waiting = [part for part in cost.parts if part.part == "waiting" and part.device.startswith("llvm")]
    assert waiting and waiting[0].seconds > 0 and "work at once" in str(cost)


def test_a_failure_of_the_cpu_leaves_the_machine_usable(tmp_path):
    """The GPU, which waits for the CPU, ends, and later steps give the same logits."""
    path = write_gguf(tmp_path / "model.gguf", replace(MODELS["qwen3moe"], layers=4), "Q8_0")
    model, _ = rh.llm.load(path, ["llvm", "cuda"], EXPERTS_ON_THE_CPU, **OPTIONS)
    slot = model.cache.add()
    tokens = np.arange(3, 23, dtype="int32")
    expected = model.prefill(slot, tokens).copy()
    waiting = {region.name for region in model.executable.metadata.regions if region.device == 0}

    def fail(function, symbol, before, result, *args):
        if symbol in waiting and before:
            raise RuntimeError("a failure of the CPU")
        return 0

    model.machine._module["set_instrument"](fail)
    try:
        for _ in range(3):
            model.cache.truncate(slot, 0)
            with pytest.raises(rh.HeteroError, match="a failure of the CPU"):
                model.prefill(slot, tokens)
    finally:
        model.machine._module["set_instrument"](None)
    for _ in range(3):
        model.cache.truncate(slot, 0)
        np.testing.assert_array_equal(model.prefill(slot, tokens), expected)
