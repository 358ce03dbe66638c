"""Models of every row of the table of architectures against logits of `transformers`, and what files may lack."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from llm import gguf_files
from llm.architecture_models import (
    CONTEXT,
    ENCODERS,
    MODELS,
    ROWS,
    TOKENS,
    Model,
    recorded,
    tensors_of,
    weights_of,
    write,
)
from llm.run_gguf import run
from marks import slow_but_for
from relax_hetero.frontend.gguf.architectures import ARCHITECTURES
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.weights import Weights

QUICK = ["stablelm2-12b", "hunyuan-moe", "gemma3n"]
BLOCKS = ["phi3-long", "glm4", "chatglm", "falcon-40b", "qwen3next", "qwen35", "gemma3n", "gemma4", "gemma4-moe"]


def tensors(name):
    return tensors_of(MODELS[name], weights_of(recorded(name)[0]))


@pytest.mark.parametrize("name", slow_but_for(MODELS, QUICK))
def test_logits(name, tmp_path):
    path, expected = write(tmp_path / "model.gguf", MODELS[name], tensors(name)), recorded(name)[1]
    assert expected.std() > 0.2
    tolerance = MODELS[name].tolerance * np.abs(expected).max()
    np.testing.assert_allclose(run(path, TOKENS, 6, all_logits=False)[list(ROWS)], expected, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_logits_of_blocks(name, tmp_path):
    """Matrices of several parts are split in whole blocks."""
    numbers = tensors(name)
    path = write(tmp_path / "model.gguf", MODELS[name], numbers, "Q8_0")
    for tensor in gguf.GGUFReader(path).tensors:
        numbers[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    expected = run(write(tmp_path / "plain.gguf", MODELS[name], numbers), TOKENS, 6)
    tolerance = 50 * MODELS[name].tolerance * np.abs(expected).max()  # activations have 16 bits
    np.testing.assert_allclose(run(path, TOKENS, 6), expected, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "gemma3n", "minicpm3"])
def test_logits_of_16_bit_activations(name, tmp_path):
    path, expected = write(tmp_path / "model.gguf", MODELS[name], tensors(name)), recorded(name)[1]
    actual = run(path, TOKENS, 6, activations="bfloat16")[list(ROWS)]
    assert np.abs(actual - expected).mean() < 0.02 * np.abs(expected).max()


def test_files_with_one_matrix_of_a_delta_rule(tmp_path):
    """As older files of Qwen 3 Next have it."""
    shapes, _ = recorded("qwen3next")
    matrices = {key: value for key, value in weights_of(shapes).items() if "in_proj_qkvz" in key}
    numbers = tensors("qwen3next")
    for name, matrix in matrices.items():
        prefix = f"blk.{name.split('.')[2]}"
        expected = [numbers.pop(f"{prefix}.{part}.weight") for part in ("attn_qkv", "attn_gate")]
        numbers[f"{prefix}.ssm_in.weight"] = matrix
    path = write(tmp_path / "model.gguf", MODELS["qwen3next"], numbers)
    mod = rh.from_gguf(path, context=64, chunks=(8,))
    constants = constants_of(mod["decode_1"])
    assert all(any(np.array_equal(array, matrix) for array in constants) for matrix in expected)


def test_every_architecture_has_a_model():
    models = {sizes.architecture for sizes in gguf_files.MODELS.values()}
    assert models | {model.architecture for model in [*MODELS.values(), *ENCODERS.values()]} == {*ARCHITECTURES}


def test_parts_of_a_matrix_are_views_of_the_file(tmp_path):
    file = read_gguf(write(tmp_path / "model.gguf", MODELS["phi3"], tensors("phi3")))
    weights = Weights(file, hyperparameters_of(file))
    names = [f"blk.1.ffn_{part}.weight" for part in ("gate", "up")]
    weights.split_rows(names[1], names, (128, 64))
    parts = [weights.tensor(name, (128, 64)).data for name in names]
    whole = file.tensors[names[1]].data
    assert all(np.shares_memory(part, whole) for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def constants_of(function):
    """Arrays of the constants of a function."""
    arrays = []

    def visit(expr):
        value = getattr(expr, "value", None)
        if getattr(value, "shape", None) is not None:
            arrays.append(value.numpy())

    relax.analysis.post_order_visit(function, visit)
    return arrays


def frequencies(mod, model):
    """The rotary frequencies of a module: a constant of a row, for cosines and for sines."""
    shape = (1, model.rotary_sizes[0])
    [row] = [a[0] for a in constants_of(mod["decode_1"]) if (a.shape, a.dtype) == (shape, np.float32)]
    cosines, sines = np.split(row, 2)
    np.testing.assert_array_equal(cosines, sines)
    return cosines


def test_the_context_chooses_divisors_of_frequencies(tmp_path):
    """Long texts need other frequencies than short ones, for all of their positions."""
    file = read_gguf(write(tmp_path / "model.gguf", MODELS["phi3-long"], tensors("phi3-long")))
    model = hyperparameters_of(file)
    short, long = (frequencies(rh.from_gguf(file, context=context), model) for context in (32, 33))
    divisors = [tensors("phi3-long")[f"rope_factors_{end}.weight"] for end in ("short", "long")]
    np.testing.assert_allclose(short * divisors[0], long * divisors[1], rtol=1e-6)
    assert not np.allclose(short, long)
    assert [model.compiled_context(context) for context in (1, 32, 33, 1000)] == [32, 32, CONTEXT, 1000]


def refusal(tmp_path, model: Model, numbers, context=None):
    with pytest.raises(rh.HeteroError) as error:
        rh.from_gguf(write(tmp_path / "model.gguf", model, numbers), context=context)
    return str(error.value)


def without(model, key):
    return replace(model, keys={name: value for name, value in model.keys.items() if name != key})


def test_what_a_file_must_state(tmp_path):
    for name in ("minicpm", "command-r"):
        text = refusal(tmp_path, without(MODELS[name], "logit_scale"), tensors(name))
        assert f"lacks {MODELS[name].architecture}.logit_scale" in text
    zero = replace(MODELS["command-r"], keys={"logit_scale": 0.0})
    assert "logit_scale is 0, expected a number above 0" in refusal(tmp_path, zero, tensors("command-r"))
    numbers = {name: value[:2] if name == "xielu.beta" else value for name, value in tensors("apertus").items()}
    assert "expected a number for each of 3 layers" in refusal(tmp_path, MODELS["apertus"], numbers)
    odd = replace(MODELS["qwen"], keys={"feed_forward_length": 255})
    assert "feed_forward_length is 255, expected a multiple of 2" in refusal(tmp_path, odd, tensors("qwen"))


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("baichuan", {"block_count": 40}, "baichuan of 40 layers has ALiBi positions"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2, expected 1"),
        ("falcon-7b", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias is 8, expected 0"),
        ("phi3", {"rope.scaling.type": "ntk"}, "expected one of"),
        ("qwen35", {"ssm.inner_size": 65}, "2 heads of keys, 4 of values, of 65 elements in all, expected each to be"),
        ("qwen35", {"ssm.conv_kernel": 0}, "ssm.conv_kernel is 0, expected"),
        ("qwen35", {"full_attention_interval": 2}, "lacks tensor 'blk.1.attn_q.weight'"),
        ("gemma4", {"attention.shared_kv_layers": 4}, "4 layers read the keys of others, expected a layer of each"),
        ("gemma4", {"attention.value_length_swa": 8}, "values of a head have 8 elements, expected as many as keys, 16"),
        ("gemma4", {"feed_forward_length": [128, 128]}, "feed_forward_length has 2 values"),
        ("gemma3n", {"activation_sparsity_scale": [1.0]}, "expected 5 numbers"),
        ("llama4", {"expert_used_count": 2}, "uses 2 experts for a token, expected one"),
    ],
)
def test_what_is_refused(name, keys, expected, tmp_path):
    model = replace(MODELS[name], keys={**MODELS[name].keys, **keys})
    assert expected in refusal(tmp_path, model, tensors(name))


def test_attention_within_chunks_ends(tmp_path):
    text = refusal(tmp_path, MODELS["llama4"], tensors("llama4"), context=8193)
    assert "context is 8,193, expected at most 8,192: layers attend within chunks" in text


def test_layers_that_share_a_cache_are_on_one_device(tmp_path):
    path = write(tmp_path / "model.gguf", MODELS["gemma4"], tensors("gemma4"))
    with pytest.raises(rh.HeteroError, match=r"blk.4.attn reads the keys and values of blk.1.attn, expected both on"):
        rh.from_gguf(path, ["llvm", "llvm"], {"blk.4.*": "llvm:1", "*": "llvm"})


def test_learned_positions_end(tmp_path):
    assert "expected at most 256" in refusal(tmp_path, MODELS["gpt2"], tensors("gpt2"), context=257)


def test_a_layer_without_its_optional_norm(tmp_path):
    """All layers have an optional tensor, or none."""
    numbers = tensors("stablelm")
    del numbers["blk.1.ffn_norm.weight"]
    assert "lacks tensor 'blk.1.ffn_norm.weight'" in refusal(tmp_path, MODELS["stablelm"], numbers)
