"""``relax-hetero explain`` of a GGUF file: its plan before anything is compiled."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

import relax_hetero as rh
from llm.gguf_files import FOUR_BITS, MODELS, QWEN3_30B, write_gguf
from relax_hetero.display.console import show
from relax_hetero.frontend import CostModel, DeviceCost, LinkCost, PagedCache
from relax_hetero.frontend.auto.cost_model import IMPLICIT_HOST
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.model_plan import ModelPlan, plan_model
from relax_hetero.frontend.gguf.place_layers import LayerProblem
from relax_hetero.report.page import data_of
from relax_hetero.report.text.plan_tables import lines, plan_tables
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of

from .conftest import parsed

GPU = {"kind": "cuda", "arch": "sm_90a"}
ON_BOTH = ["--vdevice", "llvm", "--vdevice", json.dumps(GPU)]
# A CPU of 100 GB/s and a GPU of 2 TB/s.
COSTS = CostModel(
    [
        DeviceCost(1e12, 100e9, 1e-6, {"quantized": 4e12, "float16": 1e12}),
        DeviceCost(40e12, 2e12, 2e-6, {"quantized": 400e12, "float16": 400e12}),
    ],
    {(0, 1): LinkCost(20e9, 10e-6), (1, 0): LinkCost(20e9, 10e-6)},
    0,
)
GIB = 1 << 30


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 3 30B-A3B in 4 bits, without its numbers."""
    return write_gguf(tmp_path_factory.mktemp("large") / "model.gguf", QWEN3_30B, FOUR_BITS, sparse=True)


@pytest.fixture(scope="module")
def planned(large: Path) -> Callable[..., ModelPlan]:
    """Plan the model on a CPU and a GPU."""
    file = read_gguf(large)
    model, vdevices = hyperparameters_of(file), parse_vdevices(["llvm", GPU])

    def plan(placement="auto", limit: int | None = None, chunks: tuple[int, ...] = (32, 256)) -> ModelPlan:
        cache = PagedCache((1, 8), chunks, None, 4096)
        return plan_model(
            LayerProblem(file, model, cache, vdevices, COSTS, {} if limit is None else {1: limit}), placement
        )

    return plan


def test_a_file_is_planned_from_its_metadata(invoke: Callable[..., Result], large: Path):
    """A 17 GB file without weights."""
    assert large.stat().st_size > 17e9
    result = invoke("explain", large, *ON_BOTH, "--memory-limit", "cuda=12GiB")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for pattern in (
        r"attention │ \d+-47 │ cuda:0",
        r"experts │ [\d, -]+ │ llvm:0 .* the memory of cuda:0 is too small",
    ):
        assert re.search(pattern, text)
    assert "prefill of 4,096 tokens, in chunks of 2,048" in text and "Nothing was compiled" in text
    assert "One GiB more on cuda:0: " in text and "copy experts of a layer from llvm:0 to cuda:0" in text


def test_a_plan_has_each_part_and_all_bytes(planned, large: Path):
    plan = planned(limit=12 * GIB)
    assert [part.name for part in plan.parts] == ["embd", *["attn", "router", "experts"] * 48, "output"]
    cpu, gpu = plan.devices
    assert 0 <= gpu.left < GIB
    assert gpu.left == 12 * GIB - gpu.weights - gpu.cache - gpu.working
    # Keys and values of 4 heads of 128 numbers, 2 bytes each, for 8 sequences in 48 layers.
    assert cpu.cache + gpu.cache == 8 * 4096 * 48 * 2 * 4 * 128 * 2
    for use in plan.devices:
        own = [part for part in plan.parts if part.device == use.name]
        assert use.weights == pytest.approx(sum(part.weights for part in own), abs=200)
        assert use.seconds == sum(part.seconds for part in own)
    # A token also waits for activations on their way.
    assert plan.speeds[0].seconds > cpu.seconds + gpu.seconds
    assert cpu.left is None and cpu.limit is None


ON_GPUS = CostModel([COSTS.devices[1]] * 2, {(0, 1): LinkCost(400e9, 5e-6), (1, 0): LinkCost(400e9, 5e-6)})


def planned_on_gpus(path: Path, placement, limit: int | None = None, count: int = 2) -> ModelPlan:
    file = read_gguf(path)
    vdevices = parse_vdevices([GPU] * count)
    limits = {} if limit is None else dict.fromkeys(range(count), limit)
    cache = PagedCache((1, 8), (256,), None, 4096)
    links = dict.fromkeys(itertools.permutations((*range(count), IMPLICIT_HOST), 2), ON_GPUS.links[0, 1])
    costs = CostModel([ON_GPUS.devices[0]] * count, links, IMPLICIT_HOST)
    return plan_model(LayerProblem(file, hyperparameters_of(file), cache, vdevices, costs, limits), placement)


def test_a_mesh_has_a_plan(large: Path):
    """Bytes are those of one device, which has half of all but the embeddings."""
    plan, alone = planned_on_gpus(large, {"*": "cuda[0:2]"}), planned_on_gpus(large, {"*": "cuda:0"})
    assert {part.device for part in plan.parts} == {"cuda[0:2]"}
    whole, half = alone.devices[0], plan.devices[1]
    assert half.cache == whole.cache / 2
    embeddings = alone.parts[0].weights
    assert half.weights == pytest.approx(embeddings + (whole.weights - embeddings) / 2, rel=1e-6)
    assert all(use.weights == half.weights for use in plan.devices)
    assert 1.1 < plan.speeds[0].tokens_per_second / alone.speeds[0].tokens_per_second < 2
    shown = io.StringIO()
    show(plan_tables(plan), file=shown)
    assert "Bytes of parts on a mesh are those of one of its devices." in " ".join(shown.getvalue().split())
    with pytest.raises(rh.FrontendError, match="plans of meshes are for all layers and all of the 2 devices"):
        planned_on_gpus(large, {"blk.1.*": "cuda[0:2]", "*": "cuda:0"})
    with pytest.raises(rh.FrontendError, match="4 heads of keys .* expected a multiple of 3.* take fewer devices"):
        planned_on_gpus(large, {"*": "cuda[0:3]"}, count=3)
    with pytest.raises(rh.FrontendError, match="expected a mesh of one axis"):
        planned_on_gpus(large, {"*": "cuda[0:4](2, 2)"}, count=4)


def test_layers_are_shared_where_gpus_reach_each_other(large: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: False)
    alone = planned_on_gpus(large, "auto")
    assert {part.device for part in alone.parts} == {"cuda:0"}
    needed = "layers shared by 2 devices would take .* a token, but cuda:0 does not access the memory of cuda:1"
    assert all(re.search(needed, part.reason) for part in alone.parts)
    assert any(re.match(f"Not considered: {needed} on this machine; .*'vdevice.0:2.'", line) for line in lines(alone))
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: True)
    shared = planned_on_gpus(large, "auto")
    assert not shared.excluded and "would take" not in shared.parts[1].reason
    assert {part.device for part in shared.parts} == {"cuda[0:2]"}
    assert re.fullmatch(
        "auto, fastest are layers shared by 2 devices: .* a token; layers on single devices take .*",
        shared.parts[1].reason,
    )
    assert shared.speeds[0].seconds < 0.9 * alone.speeds[0].seconds
    with pytest.raises(rh.PlacementError):
        planned_on_gpus(large, "auto", GIB)


def test_limits_decide_how_many_stages_share_layers(large: Path, monkeypatch: pytest.MonkeyPatch):
    """Four GPUs share all layers of Qwen 3, which has as many heads of keys; a limit takes stages."""
    monkeypatch.setattr(
        "relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: abs(gpu - peer) < 4
    )
    four = planned_on_gpus(large, "auto", count=4)
    assert {part.device for part in four.parts} == {"cuda[0:4]"}
    assert "; layers shared by 2 devices take " in four.parts[1].reason
    eight = planned_on_gpus(large, "auto", count=8)
    assert [use.weights > 0 for use in eight.devices] == [True] * 4 + [False] * 4  # further stages save no time
    needed = four.devices[0].weights + four.devices[0].cache + four.devices[0].working
    limited = planned_on_gpus(large, "auto", needed * 3 // 4, count=8)
    layers = [part.device for part in limited.parts if part.name == "attn"]
    assert layers == sorted(layers) and 20 < layers.count("cuda[0:4]") < 28 and layers[-1] == "cuda[4:8]"
    assert all(0 <= use.left for use in limited.devices)
    assert "layers shared by 4 devices, in 2 stages" in limited.parts[1].reason
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: gpu < 4)
    alone = planned_on_gpus(large, "auto", needed * 3 // 4, count=8)
    assert re.search("in 2 stages would take .*cuda:4 does not access the memory of cuda:5", alone.excluded)
    monkeypatch.setattr(
        "relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: abs(gpu - peer) < 2
    )
    pairs = planned_on_gpus(large, "auto", count=4)
    assert {part.device for part in pairs.parts} == {"cuda[0:2]"}
    assert "layers shared by 4 devices would take" in pairs.excluded and "cuda:0 does not" in pairs.excluded
    assert "memory of cuda:2 " in pairs.excluded


def test_a_model_that_fits_only_if_gpus_without_links_share_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One layer, of which half fits on each of two GPUs."""
    path = write_gguf(tmp_path / "model.gguf", replace(MODELS["llama"], layers=1, feed_forward=4096), "F16")
    shared = planned_on_gpus(path, {"*": "cuda[0:2]"}).devices[0]
    limit = shared.weights + shared.cache + shared.working
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: True)
    assert {part.device for part in planned_on_gpus(path, "auto", limit).parts} == {"cuda[0:2]"}
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: False)
    with pytest.raises(rh.PlacementError, match=r"layers shared by 2 devices fit, but cuda:0 does not access .*cuda:1"):
        planned_on_gpus(path, "auto", limit)


def test_reasons_of_single_devices_name_the_next_best(large: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: True)
    with monkeypatch.context() as patch:
        patch.setattr("relax_hetero.frontend.gguf.choose_rules._MAX_SHARED_TIME", 0.1)
        reason = planned_on_gpus(large, "auto").parts[1].reason
    assert reason.endswith("; groups are chosen if they take less than 0.1 of its time")
    slow = LinkCost(1e8, 1e-3)
    monkeypatch.setitem(globals(), "ON_GPUS", CostModel(ON_GPUS.devices, {(0, 1): slow, (1, 0): slow}))
    alone = planned_on_gpus(large, "auto")
    assert {part.device for part in alone.parts} == {"cuda:0"}
    assert re.search("; layers shared by 2 devices take .* a token, this plan [^;]*$", alone.parts[1].reason)


@pytest.mark.slow
def test_more_memory_brings_what_a_plan_for_it_has(planned):
    plan, more = planned(limit=12 * GIB), planned(limit=13 * GIB)
    assert plan.more[0].device == "cuda:0"
    assert plan.more[0].tokens_per_second == pytest.approx(more.speeds[0].tokens_per_second)
    assert plan.more[0].parts["experts"] > 0
    rates = [rate for _, rate in plan.curves["cuda:0"]]
    assert rates == sorted(rates)
    below = max(point for point in plan.curves["cuda:0"] if point[0] <= 12 * GIB)
    assert below[1] <= plan.speeds[0].tokens_per_second * 1.01
    whole = planned(limit=48 * GIB)
    assert plan.curves["cuda:0"][-1][1] == pytest.approx(whole.speeds[0].tokens_per_second)
    assert "One GiB more on cuda:0 brings nothing." in list(lines(whole))


def test_experts_are_copied_for_long_chunks_only(planned):
    streaming = planned({"blk.*_exps": "llvm", "*": "cuda"}).streaming
    here, copied = streaming.seconds[4096]
    assert copied < here
    # All experts of a layer, as the GPU stores them, over the link, from pinned memory.
    layer = next(part for part in planned({"*": "cuda"}).parts if part.name == "experts")
    assert copied == pytest.approx(layer.weights / 40e9, rel=0.01)
    # A chunk of that length takes the CPU as long: 8 experts of 3 * 2048 * 768 weights a token, at 4 TFLOP/s.
    assert streaming.rows == pytest.approx(copied * 4e12 / (2 * 8 * 3 * 2048 * 768), rel=0.1)
    # The longest chunk takes the time of the copies of 47 layers, shorter ones that of the CPU; the last has one row.
    prompts = [planned({"blk.*_exps": "llvm", "*": "cuda"}, chunks=(32, rows)).speeds[2] for rows in (256, 4096)]
    assert [prompt.chunk for prompt in prompts] == [256, 4096] and 256 < streaming.rows
    assert prompts[0].seconds > 47 * here and prompts[1].seconds == pytest.approx(47 * copied, rel=0.01)
    assert planned("auto").streaming is None  # all on the GPU
    assert planned({"*": "llvm"}).streaming is None


def test_rules_place_parts(planned):
    plan = planned({"blk.*.ffn_*_exps": "llvm", "token_embd": "llvm", "*": "cuda"})
    devices = {(part.name, part.device) for part in plan.parts}
    assert devices == {
        *(("embd", "llvm:0"), ("experts", "llvm:0")),
        *(("attn", "cuda:0"), ("router", "cuda:0"), ("output", "cuda:0")),
    }
    assert {part.reason for part in plan.parts if part.name == "experts"} == {"rule 'blk.*.ffn_*_exps'"}
    assert not plan.more and not plan.curves
    assert {part.device for part in planned({}).parts} == {"llvm:0"}  # the default device
    small = planned({"*": "cuda"}, limit=GIB)
    assert small.devices[1].left < 0
    assert any("The plan does not fit cuda:0: it exceeds the limit by" in line for line in lines(small))


def test_lists_of_experts_are_planned(planned):
    plan = planned({"blk.*.ffn_*_exps[0-3]": "cuda", "*": "llvm"})
    experts = [part for part in plan.parts if part.name == "experts"]
    assert len(experts) == 2 * 48
    assert [(part.device, part.experts, part.reason) for part in experts[:2]] == [
        ("llvm:0", tuple(range(4, 128)), "rule '*'"),
        ("cuda:0", (0, 1, 2, 3), "rule 'blk.*.ffn_*_exps[0-3]'"),
    ]
    whole = planned({"*": "cuda"})
    layer = next(part for part in whole.parts if part.name == "experts")
    assert plan.devices[1].weights == pytest.approx(48 * layer.weights * 4 / 128, abs=48)
    text = io.StringIO()
    show(plan_tables(plan), text)
    assert "4 of 128 experts" in text.getvalue() and "124 of 128 experts" in text.getvalue()
    # Eight pairs of a token choose all experts alike.
    on_cpu = next(part for part in planned({"*": "llvm"}).parts if part.name == "experts")
    launches = 2 * COSTS.devices[0].launch
    assert experts[0].seconds - launches == pytest.approx((on_cpu.seconds - launches) * 124 / 128)


DEVICES = ["llvm", GPU]


@pytest.mark.parametrize(
    "placement",
    [
        {"blk.0": "cuda"},
        {"blk.*.ffn_up_exps": "cuda", "blk.1.attn_output": "cuda"},
        {"blk.*.ffn_*_exps[0,2-4]": "cuda", "blk.1.ffn_*": "llvm", "*": "cuda"},
        {"blk.0.attn": "cuda", "matmul": "llvm"},
        {"blk.1.attn_residual": "cuda", "output": "cuda"},  # no matrix has the first name
    ],
)
def test_rules_place_as_in_a_module(placement, tmp_path):
    """Matrices of each part are planned where their products are."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], "Q8_0"))
    cache, vdevices = PagedCache((1,), (16,), None, 64), parse_vdevices(DEVICES)
    plan = plan_model(LayerProblem(file, hyperparameters_of(file), cache, vdevices, COSTS, {}), placement)
    mod = rh.from_gguf(file, DEVICES, placement, batches=(1,), chunks=(16,), context=64, stream_experts=None)
    entries = [entry for entry in remarks_of(mod).placement.entries if entry.kind == "op"]
    products = [entry for entry in entries if "matmul" in entry.op]
    for part in plan.parts:
        prefix = "output" if part.layer is None else f"blk.{part.layer}."
        ends = {"attn": "attn", "router": "ffn_gate_inp", "experts": "ffn_.*_exps", "output": ""}
        if part.name in ends:
            own = {entry.device for entry in products if re.match(prefix + ends[part.name], entry.variable)}
            assert part.device in own or part.cache
            assert {other.device for other in plan.parts if (other.name, other.layer) == (part.name, part.layer)} >= own
            [reason] = {other.reason for other in plan.parts if other == part}
            assert reason in {entry.reason.replace("no rule matches: ", "") for entry in entries}
    caches = {part.layer: part.device for part in plan.parts if part.cache}
    assert caches == {layer: next(e.device for e in entries if e.variable == f"blk.{layer}.attn") for layer in (0, 1)}


def test_a_plan_by_cost_is_what_is_loaded(invoke, tmp_path):
    """With counts, too, which the command reads from a file: the same experts on the same devices."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], "Q8_0")
    file, vdevices = read_gguf(path), parse_vdevices(DEVICES)
    model, cache = hyperparameters_of(file), PagedCache((1,), (16,), None, 64)
    counts = {0: [9, 1, 1, 8, 7, 0, 0, 1], 1: [1, 0, 1, 0, 1, 9, 8, 7]}
    (tmp_path / "counts.json").write_text(json.dumps({"expert_counts": counts}))
    result = invoke("explain", path, *ON_BOTH, "--place-auto", "--expert-counts", tmp_path / "counts.json", "--json")
    assert parsed(result)["is_auto"]
    fast = replace(COSTS, links={ends: LinkCost(1e15, 1e-9) for ends in COSTS.links})
    costs = replace(fast, devices=[replace(device, launch=0) for device in COSTS.devices])
    everything = plan_model(LayerProblem(file, model, cache, vdevices, costs, {}), {"*": "cuda"})
    experts = sum(part.weights for part in everything.parts if part.name == "experts")
    use = everything.devices[1]
    limit = use.weights + use.cache + use.working - experts // 2
    plan = plan_model(LayerProblem(file, model, cache, vdevices, costs, {1: limit}, counts), "auto")
    on_gpu = {part.layer: set(part.experts) for part in plan.parts if part.experts and part.device == "cuda:0"}
    assert on_gpu[0] >= {0, 3, 4} and on_gpu[1] >= {5, 6, 7}
    options = {"batches": (1,), "chunks": (16,), "context": 64, "cost_model": costs, "stream_experts": None}
    limits = {"cuda": limit}
    mod = rh.from_gguf(file, DEVICES, "auto", expert_counts=counts, memory_limit=limits, **options)
    remarks = remarks_of(mod)
    assert plan.speeds[0].seconds == pytest.approx(remarks.placement_estimate["seconds"])
    entries = {entry.variable: entry for entry in remarks.placement.entries if entry.kind == "op"}
    for part in plan.parts:
        if part.name == "experts":
            end = f".{part.device.replace(':', '_')}" if part.experts else ""
            entry = entries[f"blk.{part.layer}.ffn_down_exps{end}"]
            assert (entry.device, entry.reason) == (part.device, part.reason)
    assert any(part.experts for part in plan.parts)
    more = plan.more[0]
    assert more.tokens_per_second > plan.speeds[0].tokens_per_second and more.parts["experts"] == pytest.approx(1, 0.2)
    rates = [rate for _, rate in plan.curves["cuda:0"] if rate]
    assert rates[-1] > plan.speeds[0].tokens_per_second > rates[0]


def test_the_text_of_a_plan(planned):
    text = io.StringIO()
    show(plan_tables(planned({"*": "llvm"})), text)
    table = [line.rstrip() for line in text.getvalue().splitlines()]
    assert [line for line in table if line and not set(line) & set("┏┃┡│└")] == [
        "Plan",
        "Devices",
        "Expected speed",
        "model.gguf: qwen3moe of 48 layers, 8 of 128 experts for a token; the cache has 8 sequences of 4,096 tokens. "
        "Nothing was compiled.",
        "Rates of memory, products and transfers are assumed (tables), not measured. Estimated, too, is other memory: "
        "activations and, on GPUs, context and code.",
    ]
    assert [line.split("│")[1].strip() for line in table if line.startswith("│")] == [
        *("embeddings", "attention", "router, norms", "experts", "output"),
        *("llvm:0", "cuda:0"),
        "decode, 1 text, after 2,048 tokens",
        "prefill of 512 tokens, in chunks of 256",
        "prefill of 4,096 tokens, in chunks of 256",
    ]


def test_prefill_reads_an_expert_once_for_a_chunk(planned):
    """One row reads 8 of 128 experts, many rows all of them."""
    plan = planned({"*": "llvm"})
    decode, short, long = plan.speeds
    assert (short.tokens, long.tokens) == (512, 4096)
    assert 2 * decode.tokens_per_second < short.tokens_per_second
    assert long.seconds > 8 * short.seconds  # attention reads more


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_planned(name, tmp_path, invoke):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], sparse=True)
    data = parsed(invoke("explain", path, *ON_BOTH, "--place-auto", "--json"))
    assert data["layers"] == MODELS[name].layers and data["context"] == 512
    assert data["speeds"][0]["tokens_per_second"] > 0
    assert sum(part["layer"] is None for part in data["parts"]) == 2


def test_a_page_shows_the_plan(invoke, tmp_path):
    path, page = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], sparse=True), tmp_path / "plan.html"
    options = ["--memory-limit", "cuda=600MiB", "--context", 256, "--slots", 2]
    result = invoke("explain", path, *ON_BOTH, *options, "--html", page)
    assert result.exit_code == 0 and not result.stdout, result.output
    data = data_of(page.read_text())
    assert (data["kind"], data["title"]) == ("plan", "model")
    plan = data["plan"]
    assert (plan["context"], plan["slots"], plan["is_auto"]) == (256, 2, True)
    assert list(plan["curves"]) == ["cuda:0"] and plan["devices"][1]["limit"] == 600 << 20
    assert 'data-library="echarts.min.js"' in page.read_text()
    result = invoke("explain", path, "--html", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["devices"][0]["name"] == "llvm:0"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--memory-limit", "cuda=24GiB"], 1, "'cuda'"),
        (
            [*ON_BOTH, "--memory-limit", "cuda=100MiB", "--memory-limit", "llvm=1MiB"],
            1,
            "no split by layers or by parts",
        ),
        (["--vdevice", "nonsense"], 1, "nonsense"),
        ([*ON_BOTH, "--place", "*=cuda:1"], 1, "cuda:1"),
        ([*ON_BOTH, "--place", "blk.*.fn_down=cuda"], 1, "'blk.*.fn_down' matches no node's name"),
        ([*ON_BOTH, "--place", "blk.*.ffn_*_exps[0-8]=cuda"], 1, "found expert 8, but the model has experts 0 to 7"),
        ([*ON_BOTH, "--place", "*=cuda", "--expert-counts", "{model}"], 2, "--expert-counts is for --place-auto"),
        ([*ON_BOTH, "--place-auto", "--expert-counts", "{model}"], 1, "is not a file of expert counts"),
        ([*ON_BOTH, "--place", "*=cuda", "--memory-limit", "cuda=1GiB"], 2, "excludes --place"),
        (["token", "--context", "256"], 2, "--context, --slots and --expert-counts go with"),
        (["--compare", "{model}"], 2, "--compare goes with"),
        (["--objective", "throughput", "--place-auto"], 2, "objective go with an ONNX file"),
        (["--html", "absent/plan.html"], 1, "there is no folder absent"),
        (["--html", "{model}"], 2, "is the model itself"),
    ],
)
def test_mistakes_are_named(options, code, message, invoke, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], sparse=True)
    result = invoke("explain", path, *(text.replace("{model}", str(path)) for text in options))
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())


def test_a_file_that_is_none_is_refused(invoke, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing of the kind")
    result = invoke("explain", path, *ON_BOTH, "--memory-limit", "cuda=24GiB")
    assert result.exit_code == 1
    assert "expected it to begin with b'GGUF', found b'noth'" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_language_model_is_not_called_as_one_function(command, invoke, large):
    """It is refused before it is compiled, which would take minutes."""
    result = invoke(command, large)
    assert result.exit_code == 2 and "which chat and serve run" in " ".join(result.output.replace("│", " ").split())
