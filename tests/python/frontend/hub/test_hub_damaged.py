"""Folders with damaged files: an error of the library that names the file, or a model."""

import json
import os
import random
import shutil

import numpy as np
import pytest

import relax_hetero as rh
from llm.hub_files import write_folder, write_safetensors
from relax_hetero.errors import FrontendError, HeteroError
from relax_hetero.frontend.hub.stored_tensors import INDEX
from relax_hetero.frontend.language_model_files import read_language_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ODD_VALUES = (None, True, -1, 0, 7, 1 << 40, 10**400, 1e308, float("nan"), "x", "\ud800", [], [[]], {}, {"a": []})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder("gemma3", tmp_path_factory.mktemp("hub"))[1]


@pytest.fixture
def folder(model, tmp_path):
    return shutil.copytree(model, tmp_path / "hub")


def parts_of(folder):
    """Header and data of the weights."""
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(folder, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_weights_that_end_early(folder):
    data = (folder / WEIGHTS).read_bytes()
    for length in (0, 7, 8, 20, 3000, len(data) // 2, len(data) - 1):
        (folder / WEIGHTS).write_bytes(data[:length])
        with pytest.raises(FrontendError, match=WEIGHTS):
            read_language_model(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "F7"}, "is of type 'F7', expected one of BOOL"),
        ({"dtype": ["F32"]}, "is of type .'F32'., expected one of BOOL"),
        ({"dtype": "I32"}, "is of type I32, expected F16, BF16 or F32"),
        ({"shape": [-1, 256]}, "has shape .-1, 256., expected up to 8 whole numbers"),
        ({"shape": [1 << 40, 1 << 40]}, "expected up to 8 whole numbers"),
        ({"shape": [10**30]}, "expected up to 8 whole numbers"),
        ({"shape": 5}, "has shape 5"),
        ({"shape": [64.0]}, "has shape .64.0."),
        ({"shape": [1, 1]}, "expected a begin and an end of 4 bytes"),
        ({"data_offsets": [0, 1 << 60]}, "expected a begin and an end of"),
        ({"data_offsets": [0]}, "has data_offsets .0."),
        ({"data_offsets": None}, "has data_offsets None"),
        (None, "is of type None"),
    ],
)
def test_wrong_entries(change, message, folder):
    header, data = parts_of(folder)
    header["model.norm.weight"] = header["model.norm.weight"] | change if change else []
    write_header(folder, header, data)
    with pytest.raises(FrontendError, match=f"{WEIGHTS}.*{message}"):
        read_language_model(folder)


def test_overlaps_holes_and_duplicates(folder):
    header, data = parts_of(folder)
    first, second = (f"model.layers.{layer}.self_attn.q_norm.weight" for layer in (0, 1))
    moved = header | {first: header[second]}
    for changed, rest, message in (
        (moved, data, "begins at byte"),
        (header, data + b"x", "its tensors end at byte"),
        ({}, b"", "lacks tensor"),
        (b'{"a": 1, "a": 2}', b"", "the name 'a' occurs twice"),
        (b"[1]", b"", "expected names and values"),
        (b"[" * 100_000, b"", "is not readable JSON"),
        (b"\xff\xfe", b"", "is not readable JSON"),
        (b"1" * 10_000, b"", "is not readable JSON"),
    ):
        write_header(folder, changed, rest)
        with pytest.raises(FrontendError, match=message):
            rh.from_gguf(folder)


def test_files_of_an_index(folder, tmp_path):
    (tmp_path / "outside.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    for file in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "a/b.safetensors",
        "..",
        "x.bin",
        3,
        "",
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        with pytest.raises(FrontendError, match="expected a .*safetensors file of the folder"):
            read_language_model(folder)
    for index, message in (
        ({"weight_map": {"other": WEIGHTS}}, "lacks tensor 'other', which"),
        ({"weight_map": {"other": "none.safetensors"}}, "none.safetensors: is not a readable safetensors file"),
        ({"weight_map": []}, "weight_map is .., expected the file of each tensor"),
        ({}, "weight_map is None"),
    ):
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(FrontendError, match=message):
            read_language_model(folder)


def test_a_tensor_in_two_files(folder):
    write_safetensors(folder / "other.safetensors", {"model.norm.weight": np.zeros(3, "float32")})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "other.safetensors", "b": WEIGHTS}}))
    with pytest.raises(FrontendError, match="'model.norm.weight' is in .*, too, expected it once"):
        read_language_model(folder)


def test_files_that_are_not_regular(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(FrontendError, match="found no .*safetensors file, expected model.safetensors"):
        read_language_model(folder)
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(FrontendError, match="found a FIFO, expected a regular file"):
        read_language_model(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["GPT2000"]}, "architectures is .'GPT2000'., expected one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_activation": "relu"}, "hidden_act is 'relu', expected one that is gelu_tanh"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types: found 7, expected 7 of sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types: found 1, expected 7"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral', expected one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None, expected a number above 0"),
        ({"rope_parameters": [1]}, "parameters of rotary embeddings are .1."),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0, expected None: others are not supported"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000, expected 10,000 at most"),
        ({"num_hidden_layers": 8, "layer_types": None}, "lacks tensor 'blk.7.attn_norm.weight'"),
        ({"head_dim": 32}, "has shape .*, expected"),
        ({"vocab_size": 5}, "vocab_size is 5, expected the rows of token_embd"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_wrong_configurations(change, message, folder):
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | change))
    with pytest.raises(FrontendError, match=message):
        rh.from_gguf(folder, context=64)


def test_tensors_of_another_class(folder):
    header, data = parts_of(folder)
    header["model.layers.0.self_attn.gate.weight"] = header.pop("model.layers.0.self_attn.q_norm.weight")
    write_header(folder, header, data)
    with pytest.raises(
        FrontendError, match="that Gemma3ForCausalLM does not have: 'model.layers.0.self_attn.gate.weight'"
    ):
        read_language_model(folder)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_odd_values(file, folder):
    """Each value of the configuration, or of the header, becomes something else: an error of ours, or a model."""
    draw, refused = random.Random(4), 0
    header, data = parts_of(folder)
    values = json.loads((folder / CONFIG).read_text())
    for _ in range(150):
        if file == CONFIG:
            (folder / CONFIG).write_text(json.dumps(values | {draw.choice(list(values)): draw.choice(ODD_VALUES)}))
        else:
            name = draw.choice(list(header))
            entry = header[name] | {draw.choice(["dtype", "shape", "data_offsets"]): draw.choice(ODD_VALUES)}
            write_header(folder, header | {name: draw.choice([entry, entry, draw.choice(ODD_VALUES)])}, data)
        try:
            rh.from_gguf(folder, context=64)
        except HeteroError:
            refused += 1
    assert refused > 50


@pytest.mark.slow
def test_wrong_bytes(folder):
    generator, refused = np.random.default_rng(5), 0
    files = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    for _ in range(150):
        name = [CONFIG, WEIGHTS][generator.integers(2)]
        data = bytearray(files[name])
        for offset in generator.integers(0, min(len(data), 6000), 3):
            data[offset] = generator.integers(256)
        (folder / name).write_bytes(data)
        try:
            rh.from_gguf(folder, context=64)
        except HeteroError:
            refused += 1
        (folder / name).write_bytes(files[name])
    assert refused > 50
