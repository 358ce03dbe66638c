"""Models with a state of each sequence in place of keys and values: batches, forks, prefixes, preemption and saving."""

import threading

import numpy as np
import pytest

import relax_hetero as rh
from llm.architecture_models import MODELS, ROWS, TOKENS, recorded
from llm.test_batch_invariance import filled
from llm.test_encoder import file_of
from relax_hetero.encoding.pages import LayerCache
from relax_hetero.errors import BuildError, CacheError, HeteroError
from relax_hetero.llm import Engine, SamplingParams
from relax_hetero.llm.cache import CacheLayer, KVCache
from relax_hetero.llm.compiled_model import CompiledModel
from relax_hetero.llm.model_loader import save

PROMPT = TOKENS.tolist()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    path = file_of(folder, "qwen35", MODELS)
    model, tokenizer = rh.llm.load(
        path, batches=(4,), chunks=(32,), slots=4, context=256, page_type="float32", activation_bits=16
    )
    save(model, path, folder / "saved")
    return model, tokenizer, folder / "saved"


def logits_alone(model, tokens):
    slot, logits = filled(model, tokens)
    model.cache.free(slot)
    return logits


def test_sequences_of_unlike_lengths(loaded):
    """Each has the bits that it has alone, whether its tokens are prefilled, decoded, or rows of one step."""
    model, _, _ = loaded
    lengths = (1, 33, 70)
    slots = [filled(model, PROMPT[:length])[0] for length in lengths]
    rows = model.decode([*slots, slots[1]], [5, 6, 7, 8]).copy()
    expected = [[*PROMPT[:1], 5], [*PROMPT[:33], 6], [*PROMPT, 7], [*PROMPT[:33], 6, 8]]
    for row, tokens in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row, logits_alone(model, tokens))
    for slot in slots:
        model.cache.free(slot)
    reference = recorded("qwen35")[1]
    for position, logits in zip(ROWS, reference, strict=True):
        tolerance = 2e-5 * np.abs(reference).max()
        np.testing.assert_allclose(logits_alone(model, PROMPT[: position + 1]), logits, atol=tolerance)


def test_forks_have_copies(loaded):
    model, _, _ = loaded
    first, _ = filled(model, PROMPT[:40])
    second = model.cache.fork(first)
    rows = [model.decode([slot], [token]).copy() for slot, token in ((first, 9), (second, 8), (first, 7))]
    for row, tokens in zip(rows, ([9], [8], [9, 7]), strict=True):
        np.testing.assert_array_equal(row[0], logits_alone(model, [*PROMPT[:40], *tokens]))
    for slot in (first, second):
        model.cache.free(slot)


def test_no_token_is_removed_from_a_state(loaded):
    model, _, _ = loaded
    slot, _ = filled(model, PROMPT[:40])
    model.cache.extend(slot, 3)
    model.cache.truncate(slot, 40)  # nothing has computed them
    with pytest.raises(CacheError, match="of 40 tokens cannot be truncated to 39: its states have 40, and none can be"):
        model.cache.truncate(slot, 39)
    np.testing.assert_array_equal(model.decode([slot], [9])[0], logits_alone(model, [*PROMPT[:40], 9]))
    model.cache.truncate(slot, 0)
    np.testing.assert_array_equal(model.prefill(slot, PROMPT[:5]), logits_alone(model, PROMPT[:5]))
    model.cache.free(slot)


def answers(engine, prompts, count, all_are_waiting=None):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    if all_are_waiting is not None:
        all_are_waiting.set()
    return [[token for delta in request for token in delta.tokens] for request in requests]


def test_a_text_is_continued_from_its_end_only(loaded):
    """The prefix cache reuses whole texts, as of earlier turns, and no drafts are looked up."""
    model, tokenizer, _ = loaded
    assert model.decode_rows == 0
    with Engine(model, tokenizer) as engine:
        [first] = answers(engine, [PROMPT[:40]], 8)
        turn = [*PROMPT[:40], *first[:-1], 11, 12, 13]  # the last token was not computed
        [again] = answers(engine, [turn], 8)
        assert engine.statistics().reused_tokens == 47
        [shorter] = answers(engine, [PROMPT[:30]], 8)
        assert engine.statistics().reused_tokens == 47
    for prompt, answer in ((turn, again), (PROMPT[:30], shorter)):
        tokens = list(prompt)
        for token in answer:
            assert token == logits_alone(model, tokens).argmax()
            tokens.append(token)


def test_preempted_texts_are_computed_again(loaded, monkeypatch):
    model, tokenizer, _ = loaded
    prompts = [PROMPT[:length] for length in (60, 61, 62, 50)]
    with Engine(model, tokenizer, prefixes=0) as engine:
        alone = [answers(engine, [prompt], 20)[0] for prompt in prompts]
    [group] = model.cache._groups.values()
    reserved = group._free[5:]
    del group._free[5:]  # for two texts of more than a page, and a half
    all_are_waiting, prefill = threading.Event(), model.prefill
    monkeypatch.setattr(model, "prefill", lambda *args: all_are_waiting.wait() and prefill(*args))
    try:
        with Engine(model, tokenizer) as engine:
            assert answers(engine, prompts, 20, all_are_waiting) == alone
            assert engine.statistics().preempted > 0
    finally:
        group._free += reserved


def test_a_failed_step_ends_its_requests(loaded, monkeypatch):
    """Whether the states have its tokens is not known, so that they are not used again."""
    model, tokenizer, _ = loaded
    call, failures = model._call, []

    def fails_once(name, *args):
        results = call(name, *args)
        if name.startswith("decode") and not failures:
            failures.append(name)
            raise RuntimeError("lost")
        return results

    with Engine(model, tokenizer) as engine:
        [expected] = answers(engine, [PROMPT[:9]], 4)
        monkeypatch.setattr(model, "_call", fails_once)
        with pytest.raises(rh.HeteroError, match="lost"):
            answers(engine, [PROMPT[:9]], 4)
        assert answers(engine, [PROMPT[:9]], 4) == [expected]


def test_saved_models_have_states(loaded):
    model, _, folder = loaded
    other, _ = rh.llm.load(folder)
    assert other.description.layers == model.description.layers
    assert [layer.state > 0 for layer in other.description.layers] == [True, True, False]
    np.testing.assert_array_equal(logits_alone(other, PROMPT[:40]), logits_alone(model, PROMPT[:40]))


def test_bytes_of_states():
    layers = [CacheLayer(0, 0, state=100), CacheLayer(2, 4)]
    cache = KVCache(layers, slots=3, length=128, dtype="float16")
    pages = 6 * LayerCache(2, 4).unit_bytes("float16")
    assert cache.bytes == {"cpu:0": 3 * 400 + pages}
    assert list(cache.tables) == ["table_full"]


def test_models_with_states_verify_no_drafts(loaded, tmp_path):
    model, tokenizer, _ = loaded
    path = file_of(tmp_path, "qwen35", MODELS)
    with pytest.raises(BuildError, match="draft: .* has layers that keep a state, from which wrong drafts cannot be"):
        rh.llm.load(path, draft=(model, tokenizer), progress=lambda *_: pytest.fail("compiles"))
    with pytest.raises(HeteroError, match="models whose layers have states verify none"):
        Engine(model, tokenizer, draft=CompiledModel(model.executable, model.description))
