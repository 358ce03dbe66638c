"""The cost of a token: bytes by part and device add up to what the file holds, and times are of the same parts."""

import json

import pytest
from click.testing import CliRunner

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.llm.token_cost import StepTime, part_of
from relax_hetero.tools.cli import cli

SIZES = Sizes("llama", layers=2, width=128, feed_forward=192, heads=4, kv_heads=2, size=32, vocabulary=300)
TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]
BY_LAYERS = {"blk.0.*": "llvm", "token_embd*": "llvm", "*": "llvm:1"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("cost") / "model.gguf", SIZES, "Q8_0")


@pytest.fixture(scope="module")
def model(path):
    return rh.llm.load(path, TWO, BY_LAYERS, batches=(1,), chunks=(32,), context=128)[0]


def test_bytes_of_parts(path, model):
    cost = model.token_cost(cached=99)
    sizes = {name: tensor.data.nbytes for name, tensor in read_gguf(path).tensors.items()}
    of = {(part.part, part.device): part for part in cost.parts}
    for layer, device in enumerate(("llvm:0", "llvm:1")):
        feed_forward = sum(size for name, size in sizes.items() if name.startswith(f"blk.{layer}.ffn"))
        # In memory a scale of eight weight bits takes its file's bytes, or a few more.
        assert feed_forward <= of["feed-forward", device].weights <= 1.2 * feed_forward
        assert of["attention", device].cache == 100 * 2 * SIZES.kv_heads * SIZES.size * 2
    assert of["embedding", "llvm:0"].weights < 2 * sizes["token_embd.weight"] / SIZES.vocabulary
    assert of["logits", "llvm:1"].weights >= sizes["output.weight"]
    assert of["transfers", "llvm:1"].moved >= 4 * SIZES.width and of["transfers", "llvm:1"].moved < 1000
    assert cost.of_device("llvm:0").weights == sum(p.weights for p in cost.parts if p.device == "llvm:0")
    assert cost.buffers == {"llvm:0": ("decode_1_commands",), "llvm:1": ("decode_1_commands_1",)} and not cost.outside
    assert "1 command buffer on llvm:0 (decode_1_commands) and 1 command buffer on llvm:1" in str(cost)


def test_measured_times(model):
    before = model.cache.tables["table_full"].copy()
    cost = model.token_cost(cached=40, profile=True, rounds=2)
    assert all(part.seconds > 0 for part in cost.parts)
    assert cost.step.seconds > 0 and 0 <= cost.step.outside <= 1
    assert "Measured: a step takes" in str(cost)
    assert json.loads(json.dumps(cost.to_json()))["step"]["outside"] == cost.step.outside
    assert (model.cache.tables["table_full"] == before).all()


def test_a_trace_names_the_command_buffer_of_each_device(model, tmp_path):
    slot = model.cache.add()
    with model.machine.trace() as trace:
        model.decode([slot], [1])
    model.cache.free(slot)
    trace.save(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"decode_1_commands"') == text.count('"decode_1_commands_1"') == 1


def test_the_share_outside_of_kernels():
    assert StepTime(2.0, 1.5).outside == 0.25 and StepTime(1.0, 1.1).outside == 0.0


@pytest.mark.parametrize(
    ("variable", "part"),
    [
        ("token_embd.scaled", "embedding"),
        ("blk.11.attn_qkv", "attention"),
        ("blk.1.post_attention_norm", "attention"),
        ("blk.1.post_ffw_norm", "feed-forward"),
        ("blk.0.ffn_moe_par", "feed-forward"),
        ("output_norm", "logits"),
        ("model_layers_0_mlp_gate", "feed-forward"),
        ("lm_head", "logits"),
        ("gv", "other"),
    ],
)
def test_parts_by_name(variable, part):
    assert part_of(variable) == part


def test_explain_shows_a_token(path, model):
    gpu = '{"kind": "cuda", "arch": "sm_90a"}'
    placed = ["--vdevice", "llvm", "--vdevice", gpu, "--place", "blk.1.*=cuda", "--place", "output*=cuda"]
    shown = CliRunner().invoke(cli, ["explain", str(path), "token", *placed])
    assert shown.exit_code == 0, shown.output
    for text in ("A token", "estimated", "feed-forward", "transfers", "cuda:0", "no kernel call outside"):
        assert text in shown.output
    refused = CliRunner().invoke(cli, ["explain", __file__, "--profile"])
    assert refused.exit_code == 2 and "goes with a language model" in refused.output
