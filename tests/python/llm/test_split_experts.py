"""Experts of a layer dealt over several devices, against the float64 reference and the model on one device."""

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import run
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.transform.ir.remarks import remarks_of

TOKENS = np.random.default_rng(1).integers(0, 320, 70)
CPU, OTHER = "llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}
TWO = {"blk.*.ffn_*_exps[0,2-4]": "llvm:1", "*": "llvm:0"}
# One device has none of the experts of a layer, or neighbours, which are views of the file; another one the rest.
THREE = {
    "blk.1.ffn_*_exps[0-3]": "llvm:1",
    "blk.*.ffn_*_exps[1-2]": "llvm:1",
    "blk.*.ffn_*_exps[0,5]": "llvm:2",
    "blk.1.ffn_*_exps": "llvm:2",
    "*": "llvm:0",
}


@pytest.mark.parametrize(
    ("name", "types", "devices", "placement"),
    [
        pytest.param("qwen3moe", {"*exps*": "Q4_K", "*": "Q8_0"}, [CPU, OTHER, CPU], THREE, marks=pytest.mark.slow),
        # Biases of experts, and rows without a choice among the experts of a device.
        pytest.param("gpt-oss", {"*exps*": "MXFP4", "*": "Q8_0"}, [CPU, OTHER], TWO, marks=pytest.mark.slow),
        # Layers without experts, groups, an expert of all tokens.
        pytest.param("deepseek2", {"*exps*": "Q4_K", "*": "Q8_0"}, [CPU, OTHER], TWO, marks=pytest.mark.slow),
        pytest.param("glm4moe", {"*exps*": "F16", "*": "Q8_0"}, [CPU, OTHER], TWO, marks=pytest.mark.slow),
        ("qwen2moe", {"*": "F32"}, [CPU, OTHER], TWO),
    ],
)
def test_logits_and_tokens(name, types, devices, placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    expected = ReferenceModel(path).logits(TOKENS)
    split = run(path, TOKENS, 9, devices, placement)
    np.testing.assert_allclose(split, expected, atol=5e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(split.argmax(axis=1), expected.argmax(axis=1))


def compiled(tmp_path, placement, devices):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], {"*exps*": "Q4_K", "*": "F32"})
    mod = rh.from_gguf(path, devices, placement, batches=(2,), chunks=(2,), context=64)
    return read_gguf(path), rh.compile(mod)


@pytest.mark.parametrize(("placement", "owned"), [(TWO, {1: (4, 4)}), (THREE, {1: (2, 4), 2: (2, 4)})])
def test_each_device_has_its_experts(placement, owned, tmp_path):
    """`owned`: the number of experts of each layer that devices have, besides the first device."""
    file, executable = compiled(tmp_path, placement, [CPU, OTHER, CPU][: 1 + len(owned)])
    [schedule] = [each for each in executable.metadata.schedules if each.function == "decode_2"]
    layers = hyperparameters_of(file).layers
    matrices = [f"ffn_{part}_exps" for part in ("gate", "up", "down")]
    sizes = [sum(file.tensors[f"blk.{layer}.{name}.weight"].data.nbytes for name in matrices) for layer in (0, 1)]
    for device, experts in owned.items():
        sent = [step for step in schedule.steps if step.is_transfer and step.device == device]
        received = [step for step in schedule.steps if step.is_transfer and step.source == device]
        regions = [region for region in executable.metadata.regions if region.device == device]
        kernels = [command.kernel for region in regions for command in region.commands if region.function == "decode_2"]
        assert len(sent) == 3 * layers  # rows, numbers of experts, shares
        assert len(received) == layers
        assert sum(name.startswith("block_matmul") for name in kernels) == layers * len(matrices)
        own_bytes = sum(size * count / 8 for size, count in zip(sizes, experts, strict=True))
        assert own_bytes <= executable.memory_plan.weights(device) < 1.05 * own_bytes
    assert schedule.overlaps()


@pytest.mark.slow
def test_a_gpu_multiplies_its_experts_while_the_cpu_does(tmp_path):
    """A decode step is a command buffer of each device, with an exchange of rows for a layer; experts are counted."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], {"*exps*": "Q4_K", "*": "Q8_0"})
    placement = {"blk.*.ffn_*_exps[0,2-4]": "cuda", "blk.*.ffn_*_exps": "llvm", "*": "cuda"}
    options = {"batches": (1,), "chunks": (16,), "context": 64, "count_experts": True}
    mod = rh.from_gguf(path, [CPU, {"kind": "cuda", "arch": "sm_90a"}], placement, **options)
    donated = [f"{name}_{layer}" for name in ("pages", "expert_counts") for layer in (0, 1)]
    executable = rh.compile(mod, donate={"decode_1": donated, "prefill_16": donated})
    regions = [region for region in executable.metadata.regions if region.function == "decode_1"]
    on_gpu, on_cpu = ([c.variable for c in region.commands] for region in sorted(regions, key=lambda r: -r.device))
    for layer in ("blk.0", "blk.1"):
        order = ["ffn_moe_topk", "ffn_moe_ids_llvm_0_sent", "ffn_sum_exps.cuda_0", "ffn_sum_exps.llvm_0_cuda_0"]
        positions = [on_gpu.index(f"{layer}.{name}") for name in order]
        assert positions == sorted(positions)
        assert f"{layer}.ffn_down_exps.llvm_0" in on_cpu


def test_rules_are_the_reasons_of_a_placement(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], "Q8_0")
    report = remarks_of(rh.from_gguf(path, [CPU, OTHER], TWO, context=64)).placement
    reasons = {entry.variable: (entry.device, entry.reason) for entry in report.entries if entry.kind == "op"}
    assert reasons["blk.1.ffn_up_exps.llvm_1"] == ("llvm:1", "rule 'blk.*.ffn_*_exps[0,2-4]'")
    assert reasons["blk.1.ffn_up_exps.llvm_0"] == ("llvm:0", "rule '*'")
    assert reasons["blk.1.ffn_moe_out"] == ("llvm:0", "rule '*'")
