"""Folders of Hugging Face against GGUF files of the same weights."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import tokenizers
from click.testing import CliRunner
from ml_dtypes import bfloat16
from tokenizers import decoders, models

import relax_hetero as rh
from frontend.onnx_decoder.decoder_graphs import GenAI, Shape
from llm import architecture_models
from llm.gguf_files import MODELS
from llm.hub_files import (
    HUB_MODELS,
    architecture_folder,
    assert_same_model,
    write_folder,
    write_safetensors,
    write_sharded,
)
from llm.run_gguf import run
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.hub.classes import CLASSES
from relax_hetero.frontend.language_model_files import read_language_model
from relax_hetero.llm import Engine, SamplingParams
from relax_hetero.tools.cli import cli

TOKENS = np.random.default_rng(1).integers(0, 300, 60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_tensors_and_numbers(name, tmp_path):
    path, folder = write_folder(name, tmp_path)
    assert_same_model(folder, path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HUB_MODELS)
def test_tensors_and_numbers_of_architectures(name, tmp_path):
    path, folder = architecture_folder(name, tmp_path)
    assert_same_model(folder, path)


@pytest.fixture
def compile_cache(tmp_path, monkeypatch):
    """A folder and a file that become the same module are compiled once."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow  # tensors are compared above, and `test_load_and_save` compares texts
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "deepseek2"])
def test_logits(name, tmp_path, compile_cache):
    path, folder = write_folder(name, tmp_path)
    np.testing.assert_array_equal(run(folder, TOKENS, 3), run(path, TOKENS, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_16_bit_matrices_keep_their_bits(name, dtype, tmp_path):
    path, folder = write_folder(name, tmp_path, lambda arrays: {key: w.astype(dtype) for key, w in arrays.items()})
    found, expected = (read_language_model(each).tensors for each in (folder, path))
    kind = "F16" if dtype is np.float16 else "BF16"
    for key, tensor in expected.items():
        is_matrix = len(tensor.shape) > 1 and not key.endswith((".bias", "ffn_gate_inp.weight"))
        assert (found[key].type, found[key].shape) == (kind if is_matrix else "F32", tensor.shape), key
        data = found[key].data
        data = data.view(dtype) if is_matrix else data
        rounded = tensor.data if key == "rope_freqs.weight" else tensor.data.astype(dtype)
        np.testing.assert_array_equal(data.astype("float32"), rounded.astype("float32"), err_msg=key)


def test_matrices_are_views_of_the_files(tmp_path):
    _, folder = write_folder("qwen3", tmp_path)
    file = read_language_model(folder)
    data = np.frombuffer(file.mapped[0], np.uint8)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        assert np.shares_memory(file.tensors[name].data, data)
    file.release_pages()


def test_several_files(tmp_path):
    shards = {}
    path, folder = write_folder("llama", tmp_path, lambda arrays: shards.update(arrays) or arrays)
    (folder / "model.safetensors").unlink()
    write_sharded(folder, shards, 3)
    assert len(read_language_model(folder).mapped) == 3
    assert_same_model(folder, path)


def test_names_of_multimodal_models(tmp_path):
    def rename(arrays):
        renamed = {f"language_model.{name}": array for name, array in arrays.items()}
        return renamed | {"vision_tower.encoder.weight": np.zeros((2, 2), "float32")}

    path, folder = write_folder("gemma3", tmp_path, rename)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    assert_same_model(folder, path)


def test_older_parameters_of_positions(tmp_path):
    path, folder = write_folder("llama-tied", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_model(folder, path)


def save_tokenizer(folder):
    """A tokenizer of bytes, whose ids are those of `Tokenizer` for the file: 3 control tokens, then bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(names[:3])
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def greedy(model, tokenizer):
    with Engine(model, tokenizer) as engine:
        return engine.submit([5, 20, 30, 40], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).result(60)


def test_load_and_save(tmp_path, compile_cache):
    path, folder = write_folder("llama", tmp_path)
    save_tokenizer(folder)
    options = {"batches": (1,), "chunks": (32,), "slots": 1, "context": 64}
    model, tokenizer = rh.llm.load(folder, **options)
    assert model.description.name == "hub" and tokenizer.stop_ids == {2}
    assert rh.llm.ChatTemplate.from_tokenizer(tokenizer).render([{"role": "user", "content": "Hi"}]) == "<s>Hi"
    text = greedy(model, tokenizer)
    assert text == greedy(rh.llm.load(path, **options)[0], tokenizer)
    rh.llm.save(model, folder, tmp_path / "saved")
    model, tokenizer = rh.llm.load(tmp_path / "saved")
    assert greedy(model, tokenizer) == text
    with pytest.raises(rh.HeteroError, match="is compiled already"):
        rh.llm.load(tmp_path / "saved", context=32)
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    with pytest.raises(rh.HeteroError, match="tokenizer.json: found another file than"):
        rh.llm.load(tmp_path / "saved")


def test_onnx_folders(tmp_path):
    model = GenAI(shape=Shape(layers=1, size=64, positions=128)).model()
    onnx.save(model, tmp_path / "decoder.onnx")
    (tmp_path / "genai_config.json").write_text('{"model": {"decoder": {"filename": "decoder.onnx"}}}')
    save_tokenizer(tmp_path)
    compiled, tokenizer = rh.llm.load(tmp_path, batches=(1,), chunks=(32,), slots=1, context=64)
    assert compiled.context == 64 and isinstance(greedy(compiled, tokenizer), str)
    with pytest.raises(rh.HeteroError, match="activation_bits does not apply to an ONNX decoder"):
        rh.llm.load(tmp_path, activation_bits=16)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(rh.HeteroError, match="does not hold a language model"):
        rh.llm.load(tmp_path)
    with pytest.raises(rh.HeteroError, match="is not a readable GGUF file"):
        rh.from_gguf(tmp_path)


def test_plan_of_a_folder(tmp_path):
    path, folder = write_folder("qwen3moe", tmp_path)
    results = [
        CliRunner().invoke(cli, ["explain", str(each), "--vdevice", "llvm", "--json"]) for each in (folder, path)
    ]
    plans = [json.loads(result.stdout) for result in results]
    assert plans[0]["parts"] == plans[1]["parts"] and plans[0]["model"] == "hub"


def test_older_configuration_of_gemma(tmp_path):
    """Periods of windows, and a base of frequencies for them, under the names that Gemma 3 came with."""
    path, folder = write_folder("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert config.pop("layer_types")
    config |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": 1e4, "rope_scaling": None}
    for key in ("sliding_window_pattern", "_sliding_window_pattern", "tie_word_embeddings", "rms_norm_eps"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_model(folder, path)


def test_text_models_of_other_classes(tmp_path):
    path, folder = write_folder("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["SomeVLForConditionalGeneration"], "text_config": {**config, "model_type": "qwen3"}}
    (folder / "config.json").write_text(json.dumps(outer))
    assert_same_model(folder, path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen35",
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "in the last layer of each",
        ),
        ("qwen3next", {"linear_num_value_heads": 3}, "has 160 rows, expected 2 . 16 . 2 . 48"),
        ("qwen35", {"linear_conv_kernel_dim": "4"}, "ssm.conv_kernel is '4'"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5, 1.0]}, "expected numbers from 0 to below 1"),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale is False, expected True"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"head_dim": 32}}},
            "expected the same sizes for each full_attention layer",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "expected a model that generates texts"),
        ("llama4", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers is .1, 0, 1, 0., expected 0 in the last"),
        ("llama4", {"moe_layers": [1, 3]}, "moe_layers is .1, 3., expected all layers"),
    ],
)
def test_configurations_that_are_refused(name, change, message, tmp_path):
    _, folder = architecture_folder(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(rh.HeteroError, match=message):
        rh.from_gguf(folder, context=64)


def test_windows_of_all_layers(tmp_path):
    """Mistral has them, whose GGUF files do not say so."""
    _, folder = write_folder("llama", tmp_path, sliding_window=24)
    assert set(hyperparameters_of(read_language_model(folder)).windows) == {0}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    assert set(hyperparameters_of(read_language_model(folder)).windows) == {24}


def test_the_guide_names_every_class():
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "language_models.md").read_text()
    rows = "".join(line for line in guide.splitlines() if line.startswith(("| classes ", "| other classes ")))
    names = re.split(r"[ ,;|]+", rows)
    missing = [name for name in CLASSES if name.removesuffix("ForCausalLM") not in names]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nomic-bert", "gemma-embedding"])
def test_embeddings(name, tmp_path):
    _, folder = architecture_folder(name, tmp_path)
    save_tokenizer(folder)
    encoder = rh.llm.Encoder(folder, lengths=(70, 32), activation_bits=16)
    expected = architecture_models.recorded(name)[1]
    actual = np.stack([encoder.embed_tokens(architecture_models.TOKENS[:length]) for length in (20, 70)])
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_modules_of_embeddings_that_are_not_known(tmp_path):
    _, folder = architecture_folder("gemma-embedding", tmp_path)
    pooling, dense = folder / "1_Pooling" / "config.json", folder / "2_Dense" / "config.json"
    for path, values, message in (
        (dense, {"activation_function": "torch.nn.modules.activation.Tanh"}, "found linear.weight and the activation"),
        (pooling, {"pooling_mode_max_tokens": True}, "found pooling_mode_max_tokens, expected one of"),
        (pooling, {}, "found no pooling, expected one of"),
    ):
        path.write_text(json.dumps(values))
        with pytest.raises(rh.HeteroError, match=message):
            read_language_model(folder)


def test_older_files_of_gpt2(tmp_path):
    """Names without a prefix, masks, and a width that is not stated."""
    path, folder = architecture_folder("gpt2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    weights = architecture_models.weights_of(architecture_models.recorded("gpt2")[0])
    weights = {key.removeprefix("transformer."): array for key, array in weights.items() if key != "lm_head.weight"}
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), "float32") for layer in range(3)}
    write_safetensors(folder / "model.safetensors", weights | masks)
    assert_same_model(folder, path)
    for key in ("n_inner", "intermediate_size"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(rh.HeteroError, match="ffn_up.weight' has shape .128, 64., expected .256, 64."):
        rh.from_gguf(folder, context=64)
