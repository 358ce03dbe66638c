"""Language models of ordinary widths on a GPU, split by layers and by parts, as users load them, against the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from models.running import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(400)]

FOUR_BITS = {"output.weight": "Q6_K", "*attn_v.weight": "Q6_K", "*": "Q4_K"}
LLAMA = Sizes(layers=2, vocabulary=2000, context=4096)
# Two layers of each, and fewer words.
MODELS = {
    "llama-1.1b": replace(LLAMA, width=2048, feed_forward=5632, heads=32, kv_heads=4, size=64),
    "llama-7b": replace(LLAMA, width=4096, feed_forward=11008, heads=32, kv_heads=32, size=128),
    "llama-8b": replace(LLAMA, width=4096, feed_forward=14336, heads=32, kv_heads=8, size=128),
    "qwen2-0.5b": replace(
        LLAMA, architecture="qwen2", width=896, feed_forward=4864, heads=14, kv_heads=2, size=64, tied=True
    ),
    "qwen3-4b": replace(LLAMA, architecture="qwen3", width=2560, feed_forward=9728, heads=32, kv_heads=8, size=128),
    "gemma2-2b": replace(
        LLAMA, architecture="gemma2", width=2304, feed_forward=9216, heads=8, kv_heads=4, size=256, window=4096,
        attention_softcap=50.0, final_softcap=30.0,
    ),
}  # fmt: skip
BOTH = ["llvm", "cuda"]
PLACEMENTS = {
    "gpu": (["cuda"], None),
    "first layer on the CPU": (BOTH, {"blk.0.*": "llvm", "*": "cuda"}),
    "first layer on the GPU": (BOTH, {"blk.0.*": "cuda", "*": "llvm"}),
    "feed-forward on the CPU": (BOTH, {"blk.*.ffn_*": "llvm", "*": "cuda"}),
}
CASES = [
    *(("llama-1.1b", FOUR_BITS, placement) for placement in PLACEMENTS),
    *(("llama-7b", kind, "gpu") for kind in ("Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")),
    *(("llama-7b", FOUR_BITS, placement) for placement in PLACEMENTS),
    ("llama-8b", "Q4_0", "gpu"),
    ("qwen2-0.5b", "Q8_0", "gpu"),
    ("qwen3-4b", "Q5_K", "gpu"),
    ("gemma2-2b", FOUR_BITS, "first layer on the CPU"),
]
TOLERANCE = 0.03
"""Share of the largest logit; a CPU rounds activations to 8 bits, which moves logits by up to 0.02 of it."""


def loaded(path, devices, placement=None, **options):
    options = {"batches": (1,), "chunks": (64,), "context": 512, **options}
    return rh.llm.load(path, devices, placement, **options)[0]


def prefilled(model, prompt):
    """A new sequence's slot, and the logits after its prompt."""
    slot, logits = model.cache.add(), None
    for first in range(0, len(prompt), model.chunk):
        logits = model.prefill(slot, prompt[first : first + model.chunk])
    return slot, np.array(logits)


def text(model, prompt, count, given=None):
    """Logits after a prompt and after each of `count` tokens: greedy ones, or the given ones."""
    slot, logits = prefilled(model, prompt)
    steps = [logits]
    for index in range(count):
        token = int(steps[-1].argmax()) if given is None else given[index]
        steps.append(np.array(model.decode([slot], [token])[0]))
    return np.array(steps)


def check(actual, expected):
    """Compare logits, and tokens except where two are nearly equally probable."""
    worst = TOLERANCE * np.abs(expected).max()
    assert expected.std() > 0.1 and np.abs(actual - expected).max() < worst
    rows = np.arange(len(expected))
    assert (expected.max(1) - expected[rows, actual.argmax(1)] < worst).all()
    assert (actual.argmax(1) == expected.argmax(1)).mean() > 0.6


def tokens(count, seed=0, vocabulary=2000):
    return np.random.default_rng(seed).integers(3, vocabulary, count).astype("int32")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "types", "placement"), CASES)
def test_against_the_cpu(name, types, placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    expected = text(loaded(path, ["llvm"]), tokens(48), 12)
    check(text(loaded(path, *PLACEMENTS[placement]), tokens(48), 12, expected.argmax(1)), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_activations(activations, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-1.1b"], FOUR_BITS)
    expected = text(loaded(path, ["llvm"]), tokens(48), 12)
    check(text(loaded(path, ["cuda"], activations=activations), tokens(48), 12, expected.argmax(1)), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("types", [FOUR_BITS, "F16"], ids=["4 bits", "f16"])
def test_batches(types, tmp_path):
    """32 sequences of unlike lengths, decoded together and in smaller batches, against each alone."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-1.1b"], types)
    model = loaded(path, ["cuda"], batches=(1, 2, 4, 8, 16, 32))
    prompts = [tokens(5 + 7 * number, number) for number in range(32)]
    single = [text(model, prompt, 3) for prompt in prompts[:8]]
    for slot in range(8):
        model.cache.free(slot)
    for batch in (32, 17, 8, 3, 2):
        slots, logits = zip(*(prefilled(model, prompt) for prompt in prompts[:batch]), strict=True)
        steps = [np.array(logits)]
        for _ in range(3):
            steps.append(np.array(model.decode(slots, [int(row.argmax()) for row in steps[-1]])))
        for number in range(min(batch, 8)):
            check(np.array([step[number] for step in steps]), single[number])
        for slot in slots:
            model.cache.free(slot)


@pytest.mark.parametrize("length", [64, 1000, 4000])
def test_contexts(length, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-1.1b"], FOUR_BITS)
    options = {"chunks": (512,), "context": 4096}
    expected = text(loaded(path, ["llvm"], **options), tokens(length), 4)
    check(text(loaded(path, ["cuda"], **options), tokens(length), 4, expected.argmax(1)), expected)
