"""The bits of a text's logits do not depend on what else a model computes: batches, chunks, prefixes, preemption."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm.target import Target

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from marks import slow_but_for
from relax_hetero.llm import Engine, SamplingParams
from relax_hetero.llm.model_loader import is_batch_invariant

# One head of keys, which several cores share; windows that end within blocks of pages.
FEW = Sizes("gemma3", layers=1, width=96, heads=3, kv_heads=1, size=32, feed_forward=160, window=200, pattern=2)
ALL = replace(FEW, layers=2, width=256, feed_forward=512)
FEW_TYPES = {"*attn*": "F32", "*ffn*": "BF16", "*": "Q4_1"}
ALL_TYPES = {
    "*attn_q.*": "F32", "*attn_k.*": "F16", "*attn_v.*": "Q5_1", "*attn_output*": "Q4_1", "*ffn_gate*": "Q6_K",
    "*ffn_up*": "Q5_0", "*ffn_down*": "Q4_K", "*": "Q8_0",
}  # fmt: skip
AVX2 = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
MODELS = {
    "few": (FEW, FEW_TYPES, "llvm", (1, 3), (32,)),
    "all": (ALL, ALL_TYPES, "llvm", (1, 2, 3, 8), (8, 32)),
    "avx2": (ALL, ALL_TYPES, AVX2, (1, 2, 3, 8), (8, 32)),
    "mixture": (
        replace(ALL, architecture="qwen3moe", window=0, pattern=0, experts=8, experts_used=3, expert_width=256),
        {"*gate_exps*": "Q4_K", "*up_exps*": "Q8_0", "*": "F16"}, "llvm", (1, 2, 8), (8, 32),
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(8).integers(3, 320, 300).astype("int32")


@pytest.fixture(scope="module", params=slow_but_for(MODELS, ["few"]))
def loaded(request, tmp_path_factory):
    sizes, types, device, batches, chunks = MODELS[request.param]
    path = write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", sizes, types)
    return rh.llm.load(path, device, batches=batches, chunks=chunks, slots=8, context=320)


def filled(model, tokens, cuts=(32,)):
    """A new sequence of some tokens, prefilled in chunks of the sizes `cuts`, the last of them for all that is left;
    its slot, and the last logits."""
    slot, begin, logits = model.cache.add(), 0, None
    while begin < len(tokens):
        size, *rest = cuts
        logits = model.prefill(slot, tokens[begin : begin + size]).copy()
        begin, cuts = begin + size, rest or cuts
    return slot, logits


def test_batches(loaded):
    model, _ = loaded
    for cached in (3, 64, 150, 290):
        results = []
        for batch in (1, 2, 3, 5, 8):
            slots = [filled(model, TOKENS[:length])[0] for length in (cached, 7, 70, 1, 130, 40, 64, 20)[:batch]]
            order = np.random.default_rng(batch).permutation(batch)
            logits = model.decode([slots[i] for i in order], [int(TOKENS[cached + i]) for i in order])
            results.append(logits[list(order).index(0)].copy())
            for slot in slots:
                model.cache.free(slot)
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


def test_chunks(loaded):
    """Prompts cut in any way, and decoded token by token."""
    model, _ = loaded
    for count in (5, 100, 290):
        results = []
        for cuts in [(32,), (8,), (5,), (1, 30, 2, 17, 32)]:
            slot, logits = filled(model, TOKENS[:count], cuts)
            results += [logits, model.decode([slot], [9])[0].copy()]
            model.cache.free(slot)
        slot, _ = filled(model, TOKENS[:1])
        for token in TOKENS[1:count]:
            logits = model.decode([slot], [int(token)])[0].copy()
        results += [logits, model.decode([slot], [9])[0].copy()]
        model.cache.free(slot)
        for number, other in enumerate(results[2:]):
            np.testing.assert_array_equal(other, results[number % 2])


def test_a_hundred_requests(loaded):
    """Requests that wait for few pages: each answer is that of the same request alone."""
    model, tokenizer = loaded
    rng = np.random.default_rng(3)
    starts = [TOKENS[:length].tolist() for length in (20, 90, 130)]
    calls = []
    for number in range(100):
        start = starts[number % 3] if number % 4 else []
        prompt = [*start, *rng.integers(3, 320, rng.integers(1, 60 if start else 200)).tolist()]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        calls.append((prompt, SamplingParams(**sampling, max_tokens=int(rng.integers(1, 12)), ignore_eos=True)))

    def answer(request):
        return [token for delta in request for token in delta.tokens]

    with Engine(model, tokenizer, prefixes=0) as engine:
        single = [answer(engine.submit(*call)) for call in calls]
    reserved = [(group, group._free[5:]) for group in model.cache._groups.values()]
    try:
        for group, _ in reserved:  # others have most pages
            del group._free[5:]
        # Drafts, which depend on measured times, would decide how many requests have to wait for pages.
        with Engine(model, tokenizer, prefixes=4, prompt_lookup=False) as engine:
            with engine._changed:  # its thread takes all of them at once, however fast it is
                requests = {number: engine.submit(*calls[number]) for number in rng.permutation(100)}
            together = [answer(requests[number]) for number in range(100)]
            counts = engine.statistics()
    finally:
        for group, pages in reserved:
            group._free += pages
    assert counts.reused_tokens > 500 and counts.preempted > 10, counts
    assert [number for number in range(100) if together[number] != single[number]] == []


def test_devices_that_add_up_alike():
    """Tile registers multiply many rows, and GPUs choose kernels by rows."""
    xeon = {"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu"}
    assert is_batch_invariant(Target({**xeon, "mcpu": "x86-64-v4"})) and is_batch_invariant(Target("c"))
    assert not is_batch_invariant(Target(xeon)) and not is_batch_invariant(Target("nvidia/nvidia-h100"))
