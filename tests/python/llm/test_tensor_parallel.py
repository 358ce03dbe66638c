"""Language models over meshes of devices, against the float64 reference and the model on one device."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

import relax_hetero as rh
from free_exchanges import free_exchanges_in
from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import check_steps_ahead, run
from modules import calls_of
from relax_hetero.artifact.collectives import ALL_REDUCE_OP, ASKED_FOR
from relax_hetero.encoding.token_masks import pack_mask
from relax_hetero.frontend.gguf.choose_rules import ChosenRules
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.tensor_parallel import dealt_rules
from relax_hetero.frontend.parallel_devices import parallel_devices
from relax_hetero.llm.compiled_model import CompiledModel
from relax_hetero.llm.description import ModelDescription
from relax_hetero.op.cached_attention import CACHED_ATTENTION
from relax_hetero.target.vdevice import parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.shard.exchange_by_nccl import collectives_of

TOKENS = np.random.default_rng(1).integers(0, 320, 70)
CORE = {"kind": "llvm", "num-cores": 1}
MIXED = {"*exps*": "Q4_K", "*": "Q8_0"}
PIPELINE = {"blk.1.*": "llvm[2:4]", "output*": "llvm[2:4]", "*": "llvm[0:2]"}
ASIDE = {"blk.*.ffn_*_exps": "llvm:2", "*": "llvm[0:2]"}


@pytest.mark.parametrize(
    ("name", "types", "devices", "placement"),
    [  # slow: two models are compiled each; `models` below is the quick one
        pytest.param("llama", "F16", 2, {"*": "llvm[0:2]"}, marks=pytest.mark.slow),
        pytest.param("llama", "Q8_0", 2, {"*": "llvm[0:2]"}, marks=pytest.mark.slow),
        # Biases, and heads whose depth of 256 is not two superblocks: rows are gathered instead.
        pytest.param("qwen2", "Q4_K", 2, {"*": "llvm[0:2]"}, marks=pytest.mark.slow),
        # Experts are dealt; then by lists; then on a device of their own. Sinks, windows.
        pytest.param("qwen3moe", MIXED, 2, {"*": "llvm[0:2]"}, marks=pytest.mark.slow),
        pytest.param("gpt-oss", {"*exps*": "MXFP4", "*": "Q8_0"}, 2, {"*": "llvm[0:2]"}, marks=pytest.mark.slow),
        pytest.param("qwen3moe", MIXED, 3, ASIDE, marks=pytest.mark.slow),
        # Layers on two meshes.
        pytest.param("llama", "F16", 4, PIPELINE, marks=pytest.mark.slow),
    ],
)
def test_logits_and_tokens(name, types, devices, placement, tmp_path, free_exchanges):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    expected = ReferenceModel(path).logits(TOKENS)
    actual = run(path, TOKENS, 9, [CORE] * devices, placement)
    np.testing.assert_allclose(actual, expected, atol=5e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(actual.argmax(axis=1), run(path, TOKENS, 9).argmax(axis=1))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model on one device, and over two."""
    path = write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", MODELS["llama"], "F16")
    options = {"batches": (2,), "chunks": (16,), "context": 64, "background": False}
    with pytest.MonkeyPatch.context() as patch:
        free_exchanges_in(patch)
        return path, *(rh.llm.load(path, CORE, tensor_parallel=count, **options)[0] for count in (1, 2))


def test_a_loaded_model_has_the_tokens_of_one_device(models):
    _, one, two = models
    texts = []
    for model in (one, two):
        slots = [model.cache.add(), model.cache.add()]
        logits = [model.prefill(slot, TOKENS[3 * slot : 3 * slot + 11]) for slot in slots]
        rows = [[int(np.argmax(row))] for row in logits]
        for _ in range(4):
            for row, tokens in zip(model.decode(slots, [row[-1] for row in rows]), rows, strict=True):
                tokens.append(int(row.argmax()))
        for slot in slots:
            model.cache.free(slot)
        texts.append(rows)
    assert texts[0] == texts[1]


def test_steps_ahead_of_a_mesh(models):
    """Tokens of logits in parts, each on its device, are those of the joined logits."""
    _, _, model = models
    slots = [model.cache.add(), model.cache.add()]
    for slot in slots:
        model.prefill(slot, TOKENS[3 * slot : 3 * slot + 11])
    check_steps_ahead(model, slots, 6)
    step = model.begin_decode(slots, [5, 6])
    assert [tuple(part.shape) for part in step.calls[0].logits] == [(2, 160)] * 2
    logits = np.concatenate([part.numpy() for part in step.calls[0].logits], axis=1)
    assert step.tokens() == logits.argmax(axis=1).tolist()
    for slot in slots:
        model.cache.free(slot)


@pytest.mark.slow  # two models are compiled
@pytest.mark.parametrize(("placement", "masks"), [({"*": "llvm[0:2]"}, True), ({"matmul": "llvm[0:2]"}, False)])
def test_masks_need_the_logits_as_steps_return_them(models, placement, masks):
    """Rules may match the product of the logits only: then the host masks them."""
    path, _, two = models
    options = {"batches": (2,), "chunks": (16,), "context": 64, "masks_tokens": True}
    module = rh.from_gguf(path, [CORE] * 2, {**placement, "*": placement.get("*", "llvm:0")}, **options)
    donated = {name: [f"pages_{i}" for i in range(4)] for name in ("decode_2", "prefill_16")}
    model = CompiledModel(rh.compile(module, donate=donated), two.description)
    assert model.masks_tokens == masks
    if masks:
        slot, allowed = model.cache.add(), np.arange(320) % 7 == 3
        model.prefill(slot, TOKENS[:5])
        step = model.begin_decode([slot], [7])
        logits = np.concatenate([part.numpy() for part in step.calls[0].logits], axis=1)[0]
        token = np.flatnonzero(allowed)[logits[allowed].argmax()]
        assert step.masked_tokens(pack_mask(allowed)[None]) == [token]


def test_each_device_has_half_of_the_cache_and_of_the_work(models):
    _, one, two = models
    whole = one.cache.bytes["cpu:0"]
    assert two.cache.bytes == {"cpu:0": whole // 2, "cpu:1": whole // 2}
    assert [layer.kv_heads * 2 for layer in two.cache.layers[::2]] == [layer.kv_heads for layer in one.cache.layers]
    plan = two.executable.memory_plan
    assert plan.weights(1) < 0.75 * one.executable.memory_plan.weights(0)  # embeddings are on both
    assert {region.device for region in two.executable.metadata.regions} == {0, 1}
    assert one.description.windows == two.description.windows
    text = json.dumps(asdict(two.description))
    assert ModelDescription(**json.loads(text)).cache_parts == [2, 2]


def test_heads_of_each_device(models):
    path, *_ = models
    mod = rh.from_gguf(path, CORE, tensor_parallel=2, context=64)
    calls = [call for call in calls_of(CACHED_ATTENTION, mod) if str(call.attrs.rows) == "decode"]
    assert [(int(call.attrs.heads), int(call.attrs.kv_heads)) for call in calls] == [(2, 1)] * 4
    assert [str(param.name) for param in mod["decode_1"].params][-4:] == [f"pages_{index}" for index in range(4)]
    # Each device computes the queries, keys and values of its heads only, whatever estimates say of small products.
    columns = {
        str(binding.var.name): int(binding.var.ty.shape.values[-1])
        for binding in walk_bindings(mod["decode_1"].body)
        if op_name(binding.value) == "relax.matmul" and binding.var.name.startswith("blk.0.attn_")
    }
    assert columns == {
        f"blk.0.attn_{name}{device}": count
        for name, count in (("q", 128), ("k", 64), ("v", 64), ("output", 256))
        for device in ("", "@1")
    }


def test_gpus_take_copies_of_integers(models, free_exchanges):
    path, *_ = models
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    mod = rh.from_gguf(path, [gpu, gpu], {"*": "cuda[0:2]"}, context=64)
    names = [str(param.name) for param in mod["decode_1"].params]
    assert names[:4] == ["tokens", "tokens@1", "positions", "positions@1"]
    assert list(mod["decode_1"].attrs["output_names"])[:4] == ["logits", "logits@1", "greedy_tokens", "greedy_tokens@1"]
    # Two all-reduces for each layer and GPU, in each of the two functions, and one for candidates of greedy tokens.
    kernels = [call for call in calls_of("relax.call_tir", mod) if call.args[0].name_hint.startswith("all_reduce")]
    assert len(kernels) == 2 * (2 * 2 * 2 + 1)
    assert not calls_of("relax.to_vdevice", mod)


def test_stages_on_gpus_take_copies_of_integers(models, monkeypatch):
    """So that only what a stage computes crosses to the next one; the CPUs that stand for GPUs find the same tokens."""
    path, one, _ = models
    stages = {"blk.1.*": "cuda:1", "output*": "cuda:1", "*": "cuda:0"}
    options = {"batches": (2,), "chunks": (16,), "context": 64}
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    mod = rh.from_gguf(path, [gpu, gpu], stages, **options)
    names = [str(param.name) for param in mod["decode_2"].params]
    assert names[:4] == ["tokens", "tokens@1", "positions", "positions@1"]
    assert len(calls_of("relax.to_vdevice", mod)) == 2  # one of each function
    monkeypatch.setattr(import_module("relax_hetero.frontend.from_gguf"), "backend_of", MagicMock())
    monkeypatch.setattr(import_module("relax_hetero.frontend.gguf.tensor_parallel"), "is_cpu", lambda vdevice: False)
    on_cpus = {pattern: device.replace("cuda", "llvm") for pattern, device in stages.items()}
    model = CompiledModel(rh.compile(rh.from_gguf(path, [CORE, CORE], on_cpus, **options)), one.description)
    texts = []
    for each in (one, model):
        slots = [each.cache.add(), each.cache.add()]
        tokens = [int(each.prefill(slot, TOKENS[slot : slot + 9]).argmax()) for slot in slots]
        step = each.begin_decode(slots, tokens)
        ahead = each.begin_decode(slots, step)
        texts.append([tokens, step.tokens(), ahead.tokens()])
        for slot in slots:
            each.cache.free(slot)
    assert texts[0] == texts[1] and "tokens@1" in model.executable.signature("decode_2").input_names


def test_a_mesh_of_the_logits_only(models):
    """Layers on one device take their parameters whole; three devices do not divide the vocabulary."""
    for count, logits in ((2, ["logits", "logits@1"]), (3, ["logits"])):
        mod = rh.from_gguf(models[0], [CORE] * count, {"output*": f"llvm[0:{count}]", "*": "llvm:0"}, context=64)
        names = [str(param.name) for param in mod["decode_1"].params]
        assert names == ["tokens", "positions", "sequences", "table_full", "pages_0", "pages_1"]
        assert list(mod["decode_1"].attrs["output_names"]) == [*logits, "greedy_tokens", "pages_0", "pages_1"]


def test_experts_are_dealt(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], MIXED)
    model, devices = hyperparameters_of(read_gguf(path)), parse_vdevices(["llvm"] * 3)
    rules = dealt_rules({"blk.1.*": "llvm[0:3]", "*": "llvm"}, model, devices)
    assert [pattern for pattern, _ in rules] == [
        "blk.1.ffn_*_exps[0-1]",
        "blk.1.ffn_*_exps[2-4]",
        "blk.1.ffn_*_exps[5-7]",
        "blk.1.*",
        "*",
    ]
    mod = rh.from_gguf(path, CORE, tensor_parallel=2, context=64)
    names = {str(binding.var.name) for binding in walk_bindings(mod["decode_1"].body)}
    # Each device numbers its own experts when it chooses.
    assert {f"blk.{layer}.ffn_moe_topk.llvm_{device}" for layer in range(2) for device in range(2)} <= names
    assert not any("ffn_own_exps" in name for name in names)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("llama", {"tensor_parallel": 0}, "expected a number of devices"),
        ("llama", {"tensor_parallel": 2, "placement": {"*": "llvm"}}, "expected one of them"),
        ("llama", {"tensor_parallel": 3, "vdevices": ["llvm", "llvm"]}, "vdevices has 2"),
        ("llama", {"vdevices": ["llvm"] * 3, "placement": {"*": "llvm[0:3]"}}, "2 heads of keys and values, expected"),
        ("deepseek2", {"tensor_parallel": 2}, "keys that are values"),
        ("qwen3moe", {"tensor_parallel": 2, "count_experts": True}, "count_experts and a mesh"),
    ],
)
def test_errors(name, arguments, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], "F16")
    with pytest.raises(rh.FrontendError, match=message):
        rh.from_gguf(path, context=64, **arguments)


@pytest.mark.parametrize("verifies", [False, True])
def test_a_loader_chooses_once(verifies, models, monkeypatch):
    """The rules decide for the caches and for the functions."""
    calls, compiled = [], []

    def choose(problem, may_share):
        calls.append((problem, may_share))
        return ChosenRules({"*": "vdevice[0:2]"}, {"*": "chosen"}, {"seconds": 1.0}, None)

    def stop(mod, donate, **_options):
        compiled.append((mod, donate))
        raise rh.BuildError("stopped")

    monkeypatch.setattr(import_module("relax_hetero.frontend.gguf.choose_rules"), "choose_rules", choose)
    monkeypatch.setattr(import_module("relax_hetero.driver.compile"), "compile", stop)
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    with pytest.raises(rh.BuildError, match="stopped"):
        rh.llm.load(models[0], [gpu, gpu], "auto", context=64, memory_limit="8GiB", verify_drafts=verifies)
    ((problem, may_share),) = calls
    assert (problem.limits, may_share, len(problem.vdevices)) == ({0: 8 << 30, 1: 8 << 30}, True, 2)
    assert (problem.cache.verify_rows > 0) == verifies
    ((mod, donate),) = compiled
    assert donate["decode_1"] == [f"pages_{index}" for index in range(2 * problem.model.layers)]
    assert remarks_of(mod).placement_estimate == {"seconds": 1.0}
    assert "chosen" in {entry.reason for entry in remarks_of(mod).placement.entries}


def test_gpus_without_links_sum_by_nccl(models, monkeypatch, caplog):
    """From a placement on two GPUs of which neither accesses the other, to the model that `load` returns."""
    names = ("transform.shard.exchange_by_nccl", "driver.compile", "llm.compiled_model")
    exchanges, compiler, subject = (import_module(f"relax_hetero.{name}") for name in names)
    compiled = []
    free_exchanges_in(monkeypatch)
    monkeypatch.setattr(exchanges, "can_access_peer", lambda *_: False)
    exchanges.unreachable.cache_clear()

    def stop(mod, *_):
        compiled.extend(collectives_of(mod))
        raise rh.BuildError("stopped")

    monkeypatch.setattr(compiler, "_compile", stop)
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    try:
        with pytest.raises(rh.BuildError, match="stopped"):
            rh.llm.load(models[0], [gpu, gpu], {"*": "vdevice[0:2]"}, context=64)
    finally:
        exchanges.unreachable.cache_clear()
    sums = [each for each in compiled if each.op == ALL_REDUCE_OP]
    why = "GPU 0 cannot access the memory of GPU 1"
    assert sums and {(each.algorithm, each.why) for each in sums} == {("NCCL", why)}
    executable = SimpleNamespace(metadata=SimpleNamespace(collectives=compiled))
    asked_for = [replace(each, why=f'{ASKED_FOR}"nccl"') for each in compiled]
    monkeypatch.setattr(subject, "load_nccl", lambda: None)
    subject._check_sums(SimpleNamespace(metadata=SimpleNamespace(collectives=asked_for)))
    assert not caplog.records
    subject._check_sums(executable)
    assert [why in message for message in caplog.messages] == [True]
    monkeypatch.setattr(subject, "load_nccl", lambda: "NCCL's library is not found: pip install x")
    description = SimpleNamespace()
    with pytest.raises(rh.HeteroError, match=rf"sum by NCCL \({why}\), which is missing: .*pip install x"):
        CompiledModel(executable, description)  # before it makes a machine


def test_devices_of_a_number():
    devices, placement = parallel_devices("llvm", None, tensor_parallel=3)
    assert len(devices) == 3
    assert placement == {"*": "vdevice[0:3]"}
    devices, placement = parallel_devices("llvm", None, data_parallel=2, tensor_parallel=3)
    assert len(devices) == 6
    assert placement == {"*": "vdevice[0:6](2, 3)"}
    devices, _ = parallel_devices(["cuda:0", "cuda:1", "llvm"], None, tensor_parallel=2)
    assert len(devices) == 3
