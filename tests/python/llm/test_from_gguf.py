"""Models of GGUF files against the float64 reference: every architecture, prompts in chunks, then token by token."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import run
from marks import slow_but_for
from relax_hetero.vm.device.huge_pages import _Mappings

TOKENS = np.random.default_rng(1).integers(0, 320, 83)
EVERY_TYPE = {
    "token_embd*": "Q8_0",
    "*attn_q*": "Q4_0",
    "*attn_k*": "Q4_1",
    "*attn_v*": "Q5_1",
    "*attn_output*": "Q5_K",
    "*ffn_gate*": "Q5_0",
    "*ffn_up*": "Q4_K",
    "*ffn_down*": "Q6_K",
    "*": "F16",
}
FEW_BITS = {
    "token_embd*": "Q3_K",
    "*attn_q*": "IQ4_XS",
    "*attn_k*": "IQ4_NL",
    "*attn_v*": "IQ3_S",
    "*attn_output*": "IQ3_XXS",
    "*ffn_gate*": "IQ2_S",
    "*ffn_up*": "NVFP4",
    "*": "IQ2_XXS",
}
FEWER_BITS = {
    "token_embd*": "Q2_K",
    "*attn_q*": "IQ2_XS",
    "*attn_k*": "IQ1_M",
    "*attn_v*": "TQ2_0",
    "*attn_output*": "IQ1_S",
    "*": "TQ1_0",
}


def check(path, actual, tolerance):
    expected = ReferenceModel(path).logits(TOKENS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


# The tied llama and the mixture of experts are run with weights in blocks below; norms of queries and keys are gemma
# 3's, too. The pattern that a file says takes three layers, the one that it leaves out seven.
@pytest.mark.parametrize("name", slow_but_for(MODELS, ["llama", "qwen2", "gemma3-pattern"]))
def test_logits(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name])
    check(path, run(path, TOKENS, 13), 2e-4)


FEW_BITS_OF_EXPERTS = {"*gate_exps*": "IQ2_XXS", "*up_exps*": "Q2_K", "*down_exps*": "Q3_K", "*": "Q8_0"}
EXPERTS = {"*gate_exps*": "Q5_0", "*up_exps*": "Q4_K", "*down_exps*": "Q6_K", "*": "Q8_0"}


@pytest.mark.parametrize(
    ("name", "types", "activation_bits", "tolerance"),
    [
        ("llama-tied", EVERY_TYPE, 16, 5e-4),
        pytest.param("llama-tied", EVERY_TYPE, 8, 4e-2, marks=pytest.mark.slow),
        ("llama-tied", FEW_BITS, 16, 5e-4),
        ("llama-tied", FEWER_BITS, 16, 5e-4),
        pytest.param("qwen3moe", EXPERTS, 16, 5e-4, marks=pytest.mark.slow),
        pytest.param("qwen3moe", FEW_BITS_OF_EXPERTS, 16, 5e-4, marks=pytest.mark.slow),
        pytest.param("deepseek2", {"*exps*": "Q4_K", "*": "Q8_0"}, 16, 5e-4, marks=pytest.mark.slow),
        # Its keys' matrices are rounded to float16.
        pytest.param(
            "deepseek2-lite", {"*exps*": "Q4_K", "*kv_b*": "Q5_K", "*": "Q8_0"}, 16, 2e-3, marks=pytest.mark.slow
        ),
        ("gpt-oss", {"*exps*": "MXFP4", "*": "Q8_0"}, 16, 5e-4),
    ],
)
def test_logits_of_blocks(name, types, activation_bits, tolerance, tmp_path):
    """CPUs with dot products of bytes multiply integers of that many bits."""
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    actual = run(path, TOKENS, 13, activation_bits=activation_bits)
    check(path, actual, tolerance)


def test_vectors_of_other_types(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[write_gguf.__module__], "PLAIN", ("*rope_freqs*",))
    types = {"*attn_norm*": "BF16", "*_norm*": "Q8_0", "*": "F32"}
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], types)
    expected = ReferenceModel(path).logits(TOKENS)
    np.testing.assert_allclose(run(path, TOKENS, 13), expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of_experts"), [("llama-tied", ()), ("qwen3moe", (8,))])
def test_scales_of_matrices(name, of_experts, tmp_path, monkeypatch):
    """NVFP4 has a scale of a tensor, or of each expert, beside those of blocks, and one of inputs."""
    random_gguf = sys.modules[write_gguf.__module__]
    monkeypatch.setattr(random_gguf, "PLAIN", (*random_gguf.PLAIN, "*.scale", "*.input_scale"))
    shapes = random_gguf.shapes
    part = "_exps" if of_experts else ""
    scaled = [f"blk.0.attn_q.{end}" for end in ("scale", "input_scale")]
    scaled += [f"blk.{layer}.ffn_{side}{part}.scale" for layer in (0, 1) for side in ("gate", "down")]
    added = {end: of_experts if "exps" in end and of_experts else (1,) for end in scaled}
    monkeypatch.setattr(random_gguf, "shapes", lambda sizes: shapes(sizes) | added)
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*exps*": "NVFP4", "*attn*": "NVFP4", "*": "Q8_0"})
    check(path, run(path, TOKENS, 13, activation_bits=16), 5e-4)


@pytest.mark.parametrize("activations", slow_but_for(["float16", "bfloat16"], []))
def test_logits_of_narrow_activations(activations, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], {"*attn*": "F16", "*": "Q8_0"})
    check(path, run(path, TOKENS, 13, activations=activations), {"float16": 2e-3, "bfloat16": 2e-2}[activations])


def test_quantized_weights_are_views_of_the_file_until_they_are_packed(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], "Q8_0")
    mod = rh.from_gguf(path, ["llvm"], batches=(1,), chunks=(4,), context=64)
    constants = []
    relax.analysis.post_order_visit(
        mod["decode_1"], lambda expr: constants.append(expr) if isinstance(expr, tvm.ir.GenericConst) else None
    )
    weights = [const.value for const in constants if str(const.value.dtype) == "uint8"]
    in_file = [_Mappings().is_file(tensor.data_ptr()) for tensor in weights]
    assert len(weights) > 7 and all(in_file)
    executable = rh.compile(mod, cache=False)
    assert not any(_Mappings().is_file(tensor.data_ptr()) for tensor in executable.constants)


OF_A_GPU = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize(
    ("name", "types", "options", "narrow"),
    [
        ("llama", "Q8_0", {}, "float16"),
        ("gemma2", "Q8_0", {}, "bfloat16"),
        ("llama", "BF16", {}, "bfloat16"),
        ("llama", "Q8_0", {"activations": "bfloat16"}, "bfloat16"),
        ("llama", "Q8_0", {"activations": "float32"}, "float32"),
        ("llama", "Q8_0", {"gpu": {"kind": "cuda", "arch": "sm_70"}}, "float32"),
    ],
)
def test_types_of_activations(name, types, options, narrow, tmp_path):
    """GPUs multiply the type that the model was trained in by default, and CPUs float32, as are sums between layers."""
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    options = dict(options)
    devices = ["llvm", options.pop("gpu", OF_A_GPU)]
    mod = rh.from_gguf(path, devices, {"blk.0.*": "llvm", "*": "cuda"}, context=64, **options)
    dtypes = {
        binding.var.name: str(binding.value.args[0].ty.dtype)
        for block in mod["decode_1"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name.endswith(("matmul", "cached_attention"))
    }
    on_cpu = options.get("activations", "float32")
    assert dtypes["blk.0.attn"] == on_cpu and dtypes["blk.1.attn"] == narrow
    sums = [b.var for block in mod["decode_1"].body.blocks for b in block.bindings if b.var.name.endswith("_sum")]
    assert len(sums) == 2 * MODELS[name].layers and {str(var.ty.dtype) for var in sums} == {"float32"}
    if types != "Q8_0":
        assert dtypes["blk.0.ffn_up"] == "float32" and dtypes["blk.1.ffn_up"] == narrow


def test_products_of_one_operand_are_joined_on_gpus(tmp_path):
    """Joined if their types are equal and no rule of the placement separates them."""

    def names(types, rules):
        path = write_gguf(tmp_path / "model.gguf", MODELS["qwen2"], types)
        mod = rh.from_gguf(path, ["llvm", OF_A_GPU], rules, context=64)
        bindings = {binding.var.name for block in mod["decode_1"].body.blocks for binding in block.bindings}
        return {name for name in bindings if name in ("blk.0.attn_q", "blk.0.attn_qkv.transposed")}

    assert names("Q8_0", {"*": "cuda"}) == {"blk.0.attn_qkv.transposed"}
    assert names("Q8_0", {"*": "llvm"}) == {"blk.0.attn_q"}
    assert names({"*attn_v*": "Q4_0", "*": "Q8_0"}, {"*": "cuda"}) == {"blk.0.attn_q"}
    assert names("Q8_0", {"blk.0.attn_k": "llvm", "*": "cuda"}) == {"blk.0.attn_q"}


def test_the_angles_of_rotations_are_elementwise(tmp_path):
    """So they are one kernel."""
    mod = rh.from_gguf(write_gguf(tmp_path / "model.gguf", MODELS["llama"]), [OF_A_GPU], context=64)
    bindings = [binding for block in mod["decode_1"].body.blocks for binding in block.bindings]
    ops = {b.value.op.name.removeprefix("relax.") for b in bindings if b.var.name.startswith("blk.0.attn_rope")}
    assert ops == {"astype", "expand_dims", "multiply", "cos", "sin", "where"}


def test_products_of_heads_on_gpus(tmp_path):
    """Block-quantized matrices of heads stay so, as those of experts; unquantized ones are a batch of 16-bit floats."""

    def operands(name):
        path = write_gguf(tmp_path / "model.gguf", MODELS[name], "Q8_0")
        mod = rh.from_gguf(path, [OF_A_GPU], context=64, batches=(4,), activations="float16")
        values = {b.var.name: b.value for block in mod["decode_4"].body.blocks for b in block.bindings}
        types = (values["blk.0.attn_k_b"].args[0].ty, values["blk.0.attn_k_b"].args[1].ty)
        return [([int(extent) for extent in ty.shape.values], str(ty.dtype)) for ty in types]

    assert operands("deepseek2") == [([4, 4, 1, 256], "float32"), ([4, 4, 256, 256], "float32")]
    assert operands("deepseek2-lite") == [([4, 4, 256], "float16"), ([4, 256, 256], "float16")]


def test_unknown_activations(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"])
    with pytest.raises(rh.HeteroError, match="activations is 'half', expected one of float32, float16, bfloat16"):
        rh.from_gguf(path, activations="half")


TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        pytest.param("llama-tied", {"blk.0.*": "llvm:1", "output*": "llvm:1"}, id="layers"),
        pytest.param("qwen3moe", {"*_exps*": "llvm", "*": "llvm:1"}, marks=pytest.mark.slow, id="experts"),
        pytest.param("llama-tied", {"blk.*.ffn*": "llvm:1"}, marks=pytest.mark.slow, id="feed-forward"),
        pytest.param("llama-tied", {"blk.*.attn*": "llvm:1"}, marks=pytest.mark.slow, id="attention"),
    ],
)
def test_two_devices(name, placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], "F32")
    check(path, run(path, TOKENS, 13, TWO, placement), 2e-4)


def test_layers_on_two_devices_copy_each_integer_once(tmp_path):
    """Angles are computed on both devices, and nothing of a step is left that could overlap."""
    path = write_gguf(tmp_path / "model.gguf", replace(MODELS["llama-tied"], layers=4), {"*": "F32"})
    placement = {"blk.0.*": "llvm:0", "blk.1.*": "llvm:0", "*": "llvm:1"}
    executable = rh.compile(rh.from_gguf(path, TWO, placement, batches=(1,), chunks=(4,)))
    [schedule] = [each for each in executable.metadata.schedules if each.function == "decode_1"]
    transfers = [step.reads[0] for step in schedule.steps if step.is_transfer]
    moved = [value for value in transfers if value < schedule.inputs]
    names = executable.signature("decode_1").input_names
    assert sorted(names[value] for value in moved) == ["positions", "sequences", "table_full"]
    assert len(transfers) == len(moved) + 2  # embeddings, and the sum of two layers
    assert not schedule.overlaps()
