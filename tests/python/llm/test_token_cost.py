"""The cost of a token: components by name, and the table of `relax-hetero explain`."""

import pytest
from click.testing import CliRunner

import relax_hetero as rh
from llm.gguf_files import MODELS, Sizes, write_gguf
from relax_hetero.llm.token_cost import ModelInfo, StepTime, part_of, token_cost
from relax_hetero.tools.cli import cli

SIZES = Sizes("llama", layers=2, width=128, feed_forward=192, heads=4, kv_heads=2, size=32, vocabulary=300)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("cost") / "model.gguf", SIZES, "Q8_0")


def test_the_share_outside_of_kernels():
    assert StepTime(2.0, 1.5).outside == 0.25 and StepTime(1.0, 1.1).outside == 0.0


@pytest.mark.parametrize(
    ("variable", "part"),
    [
        ("token_embd.scaled", "embedding"),
        ("blk.11.attn_qkv", "attention"),
        ("blk.1.post_attention_norm", "attention"),
        ("blk.1.post_ffw_norm", "feed-forward"),
        ("blk.0.ffn_par_exps", "feed-forward"),
        ("output_norm", "logits"),
        ("model_layers_0_mlp_gate", "feed-forward"),
        ("lm_head", "logits"),
        ("gv", "other"),
    ],
)
def test_parts_by_name(variable, part):
    assert part_of(variable) == part


@pytest.mark.slow
def test_a_token_reads_its_experts_on_a_gpu(tmp_path):
    """Also those of the kernel that adds up a token's experts, whose variable is the residual sum."""
    sizes = MODELS["qwen3moe"]
    path = write_gguf(tmp_path / "model.gguf", sizes, "Q8_0")
    mod = rh.from_gguf(path, [{"kind": "cuda", "arch": "sm_90a"}], chunks=(16,), context=256)
    donated = [f"pages_{layer}" for layer in range(sizes.layers)]
    metadata = rh.compile(mod, donate={"decode_1": donated, "prefill_16": donated}).metadata
    share = sizes.experts_used / sizes.experts
    info = ModelInfo(expert_share=share, vocabulary=sizes.vocabulary)
    cost = token_cost(metadata.regions, metadata.kernels, ["cuda:0"], metadata.placement, info=info)
    weights = {part.part: part.weights for part in cost.parts}
    experts = sizes.layers * 3 * sizes.experts * sizes.expert_width * sizes.width * 34 / 32
    assert 0 <= weights["feed-forward"] - share * experts < 0.1 * share * experts
    assert weights["embedding"] == sizes.width * 34 // 32


def test_explain_shows_a_token(path):
    gpu = '{"kind": "cuda", "arch": "sm_90a"}'
    placed = ["--vdevice", "llvm", "--vdevice", gpu, "--place", "blk.1.*=cuda", "--place", "output*=cuda"]
    shown = CliRunner().invoke(cli, ["explain", str(path), "token", *placed])
    assert shown.exit_code == 0, shown.output
    for text in ("A token", "estimated", "feed-forward", "transfers", "cuda:0", "no kernel call outside"):
        assert text in shown.output
    refused = CliRunner().invoke(cli, ["explain", __file__, "--profile"])
    assert refused.exit_code == 2 and "goes with a language model" in refused.output
