"""GGUF files that are cut off or have wrong bytes: an error of the library, soon, or a module."""

import math
from dataclasses import replace

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.errors import FrontendError, HeteroError
from relax_hetero.frontend.gguf.file import FileTensor, read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.llm import Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", MODELS["gemma2"]).read_bytes()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return read_gguf(write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", MODELS["llama"]))


def after(file: bytes, key: str) -> int:
    """Offset of a key's value, after the key's name and its type."""
    return file.index(key.encode()) + len(key) + 4


def test_a_file_that_ends_early(file, tmp_path):
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 8, 23, 24, 100, 5000, len(file) // 2, len(file) - 1):
        path.write_bytes(file[:length])
        with pytest.raises(FrontendError, match="cut.gguf"):
            rh.from_gguf(path)


def test_more_layers_than_any_model_has(file, tmp_path):
    offset = after(file, "gemma2.block_count")
    path = tmp_path / "layers.gguf"
    path.write_bytes(file[:offset] + (1 << 31).to_bytes(4, "little") + file[offset + 4 :])
    with pytest.raises(FrontendError, match="gemma2.block_count is 2147483648, expected a whole number"):
        rh.from_gguf(path)


def test_an_unknown_kind_of_token_is_refused(file, tmp_path):
    offset = after(file, "tokenizer.ggml.token_type") + 12  # the list's type and length
    path = tmp_path / "kinds.gguf"
    path.write_bytes(file[:offset] + (99).to_bytes(4, "little") + file[offset + 4 :])
    with pytest.raises(TokenizerError, match="token_type: found 99, expected 1 to 6"):
        Tokenizer.from_gguf(path)


def test_wrong_bytes(file, tmp_path):
    path, generator = tmp_path / "wrong.gguf", np.random.default_rng(5)
    refused = 0
    for _ in range(60):
        data = bytearray(file)
        for offset in generator.integers(0, 3000, 3):
            data[offset] = generator.integers(256)
        path.write_bytes(data)
        for read in (lambda: rh.from_gguf(path, context=128), lambda: Tokenizer.from_gguf(path)):
            try:
                read()
            except HeteroError:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("general.architecture", ["llama"], "found architecture"),
        ("general.architecture", None, "found architecture None"),
        ("block_count", None, "lacks llama.block_count"),
        ("block_count", 3, "lacks tensor 'blk.2.attn_norm.weight'"),
        ("block_count", 1, "does not use: 'blk.1.attn_norm.weight'.* and 4 more"),
        ("block_count", 10_001, "expected 10,000 at most"),
        ("block_count", "2", "is '2', expected a whole number of at least 1"),
        ("embedding_length", True, "is True, expected"),
        ("embedding_length", 2.0, "is 2.0, expected"),
        ("embedding_length", 1 << 60, "is 1152921504606846976, expected a whole number"),
        ("attention.head_count", 0, "head_count is 0, expected"),
        ("attention.head_count", [4, 4, 4], "has 3 values, 1 of them distinct"),
        ("attention.head_count", [4, 2], "has 2 values, 2 of them distinct"),
        ("attention.head_count_kv", 0, "head_count_kv is 0"),
        ("attention.head_count_kv", 3, "not a multiple of 3"),
        ("attention.key_length", -64, "is -64, expected"),
        ("attention.value_length", 32, "values of a head have 32 elements"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "is nan, expected a number"),
        ("attention.layer_norm_rms_epsilon", "small", "is 'small', expected a number"),
        ("rope.freq_base", float("nan"), "is nan, expected a number above 0"),
        ("rope.freq_base", 0.0, "is 0.0, expected a number above 0"),
        ("rope.freq_base", [], "has 0 values"),
        ("rope.scaling.type", "dynamic", "found llama.rope.scaling.type 'dynamic'"),
        ("rope.scaling.type", 3, "found llama.rope.scaling.type '3'"),
        ("rope.scaling.factor", float("inf"), "is inf, expected a number"),
        ("rope.scaling.yarn_attn_factor", 0.5, "attn_factor is 0.5, expected 1: it is not supported"),
        ("attention.temperature_scale", 0.1, "temperature_scale is 0.1, expected 0: it is not supported"),
        ("final_logit_softcapping", -1.0, "is -1.0, expected a number of at least 0"),
        ("attention.scale", 1e39, "is 1e[+]39, expected a number"),
        ("rope.scaling.attn_factor", 1e-300, "is 1e-300, expected a number"),
        ("rope.dimension_count", 63, "rotates 63 elements of a head"),
        ("vocab_size", 321, "vocab_size is 321, expected the rows of token_embd, 320"),
        ("expert_count", 2, "lacks tensor 'blk.0.ffn_gate_inp.weight'|uses 0 of 2 experts"),
        ("context_length", 1 << 31, "context_length is 2147483648"),
        ("tokenizer.ggml.tokens", ["a"] * 319, "has 320 rows, expected one for each of 319 tokens"),
    ],
)
def test_numbers_that_make_no_sense(llama, key, value, message):
    key = key if "." in key and not key.startswith(("attention", "rope")) else f"llama.{key}"
    fields = {name: old for name, old in {**llama.fields, key: value}.items() if old is not None}
    with pytest.raises(FrontendError, match=message):
        rh.from_gguf(replace(llama, fields=fields))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return read_gguf(write_gguf(tmp_path_factory.mktemp("gpt-oss") / "model.gguf", MODELS["gpt-oss"]))


def test_windows_that_a_file_must_state(gpt_oss):
    fields = {name: value for name, value in gpt_oss.fields.items() if not name.endswith("attention.sliding_window")}
    with pytest.raises(FrontendError, match=r"lacks gpt-oss\.attention\.sliding_window"):
        rh.from_gguf(replace(gpt_oss, fields=fields))


@pytest.mark.parametrize(
    ("fields", "magnitude"),
    [
        ({}, 1 + 0.1 * math.log(32)),
        ({"yarn_ext_factor": 0.0}, 1.0),
        ({"yarn_attn_factor": 0.5, "attn_factor": 3.0}, 1.5 * (1 + 0.1 * math.log(32))),
    ],
)
def test_factors_of_yarn(gpt_oss, fields, magnitude):
    added = {f"gpt-oss.rope.scaling.{name}": value for name, value in fields.items()}
    model = hyperparameters_of(replace(gpt_oss, fields={**gpt_oss.fields, **added}))
    assert model.yarn.magnitude == pytest.approx(magnitude)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A mixture whose last layer predicts further tokens: the first layer has no experts."""
    file = read_gguf(write_gguf(tmp_path_factory.mktemp("glm") / "model.gguf", MODELS["glm4moe"]))
    extra = {f"blk.2.nextn.{name}.weight": file.tensors["blk.2.attn_norm.weight"] for name in ("enorm", "hnorm")}
    fields = {**file.fields, "glm4moe.nextn_predict_layers": 1}
    return replace(file, fields=fields, tensors={**file.tensors, **extra})


def test_layers_of_further_tokens_are_not_read(glm):
    mod = rh.from_gguf(glm)
    text = str(mod)
    assert "blk_1_ffn_moe_ids" in text and "blk_0_ffn_moe_ids" not in text and "blk_2_" not in text
    with pytest.raises(FrontendError, match=r"does not use: 'blk.1.nextn"):
        tensors = {**glm.tensors, "blk.1.nextn.enorm.weight": glm.tensors["blk.2.attn_norm.weight"]}
        rh.from_gguf(replace(glm, tensors=tensors))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nextn_predict_layers", 3, "all 3 layers predict further tokens"),
        ("leading_dense_block_count", 9, "9 dense layers come first, expected 2 layers at most"),
        ("expert_gating_func", 4, r"gating_func is 4, expected one of 1 \(softmax\), 2 \(sigmoid\), 3"),
        ("expert_weights_norm", 1, "expert_weights_norm is 1, expected true or false"),
        ("expert_used_count", 9, "uses 9 of 8 experts"),
        ("expert_group_count", 3, "chooses 3 of 8 experts from 3 of 3 groups"),
        ("expert_group_used_count", 2, "chooses 3 of 8 experts from 2 of 1 groups"),
    ],
)
def test_routings_that_make_no_sense(glm, key, value, message):
    with pytest.raises(FrontendError, match=message):
        rh.from_gguf(replace(glm, fields={**glm.fields, f"glm4moe.{key}": value}))


@pytest.mark.parametrize(
    "name",
    [
        "blk.2.attn_norm.weight",
        "blk.0.attn_rot_embd.weight",
        "rope_factors_long.weight",
        "output_norm.bias",
        "blk.0.attn_q.weight.lora_a",
        "blk.0.attn_q_norm.weight",
        "token_embd.scale",
        "\x1b",
    ],
)
def test_tensors_that_no_layer_reads(llama, name):
    extra = FileTensor(name, (256,), "F32", np.zeros(256, "float32"))
    with pytest.raises(FrontendError, match=f"does not use: '{name if name.isprintable() else ''}"):
        rh.from_gguf(replace(llama, tensors={**llama.tensors, name: extra}))


def test_tensors_that_are_missing(llama):
    for name in llama.tensors:
        if name != "output.weight":  # then it is that of the embeddings
            with pytest.raises(FrontendError, match=f"lacks tensor '{name}'"):
                rh.from_gguf(replace(llama, tensors={each: one for each, one in llama.tensors.items() if each != name}))


@pytest.mark.parametrize("model, name", [("qwen2", "attn_k.bias"), ("qwen3", "attn_q_norm.weight")])
def test_tensors_that_only_some_layers_have(model, name, tmp_path):
    file = read_gguf(write_gguf(tmp_path / "model.gguf", MODELS[model]))
    tensors = {each: one for each, one in file.tensors.items() if each != f"blk.1.{name}"}
    with pytest.raises(FrontendError, match=f"lacks tensor 'blk.1.{name}'"):
        rh.from_gguf(replace(file, tensors=tensors))


def test_biases_of_llama_are_in_all_layers_or_none(llama):
    biases = {f"blk.{n}.attn_output.bias": np.ones(256, "float32") for n in range(2)}
    extra = {name: FileTensor(name, (256,), "F32", data) for name, data in biases.items()}
    rh.from_gguf(replace(llama, tensors={**llama.tensors, **extra}))
    del extra["blk.1.attn_output.bias"]
    with pytest.raises(FrontendError, match="lacks tensor 'blk.1.attn_output.bias'"):
        rh.from_gguf(replace(llama, tensors={**llama.tensors, **extra}))
