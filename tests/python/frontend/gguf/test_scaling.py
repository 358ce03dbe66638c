"""Arrangements of a language model on many devices: limits, identities, and the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import relax_hetero as rh
from llm.gguf_files import FOUR_BITS, MODELS, QWEN3_30B, write_gguf
from relax_hetero.display.text import bytes_text, time_text
from relax_hetero.frontend import CostModel, DeviceCost, LinkCost, PagedCache
from relax_hetero.frontend.auto.measure_devices import DeviceFigures, Figures, SharingFigures
from relax_hetero.frontend.gguf.choose_rules import choose_replicas
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import DeltaRule, hyperparameters_of
from relax_hetero.frontend.gguf.place_layers import LayerProblem
from relax_hetero.frontend.gguf.scaling import Calibration, Fleet, HostTime, Pipeline, arrangements, group_shapes
from relax_hetero.frontend.gguf.tensor_parallel import split_caches
from relax_hetero.llm.calibrate import _product_ratio
from relax_hetero.target.cpu_cores import num_cores
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.tools.scale import fleet_of

GPU = {"kind": "cuda", "arch": "sm_90a"}
COSTS = CostModel([DeviceCost(40e12, 2e12, 2e-6, {"quantized": 400e12, "float16": 400e12})], {})
FAST, SLOW = LinkCost(400e9, 5e-6), LinkCost(1e9, 1e-3)
CACHE = PagedCache((1, 8), (256,), None, 4096)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Qwen 3 30B-A3B in 4 bits, without its numbers."""
    path = write_gguf(tmp_path_factory.mktemp("large") / "model.gguf", QWEN3_30B, FOUR_BITS, sparse=True)
    file = read_gguf(path)
    return path, file, hyperparameters_of(file), parse_vdevices([GPU])


def on(large, hosts, devices, texts=32, network=SLOW, limit=None):
    _, file, model, (vdevice,) = large
    return arrangements(file, model, CACHE, vdevice, COSTS, Fleet(hosts, devices, FAST, network), texts, limit)


def pipeline(large, tensor, stages, devices=8):
    _, file, model, vdevices = large
    problem = LayerProblem(file, model, CACHE, vdevices, COSTS, {})
    return problem, Pipeline(problem.search.parts, model, COSTS, Fleet(1, devices, FAST, SLOW), tensor, stages)


def test_one_device_has_the_time_of_its_plan(large):
    problem, alone = pipeline(large, 1, 1, 1)
    seconds, busy = alone.decode(1, CACHE.context // 2)
    assert seconds == pytest.approx(problem.best().seconds)
    assert busy == pytest.approx(1)
    assert list(alone.exchanges(1)) == []
    (only,) = on(large, 1, 1)
    assert (only.tensor, only.stages, only.replicas, only.texts) == (1, 1, 1, 32)


def test_a_full_pipeline_is_as_fast_as_its_slowest_stage(large):
    _, four = pipeline(large, 1, 4)
    slowest = max(four.stage_seconds(stage, 8, 1, 2048) for stage in range(4))
    seconds, busy = four.decode(32, 2048, 8)
    assert seconds >= 4 * slowest
    assert seconds == pytest.approx(4 * slowest + FAST.latency, rel=0.1)
    assert 0.8 < busy <= 1
    one_text, lone = four.decode(1, 2048)  # a single text is in one stage at a time
    assert lone == pytest.approx(0.25, rel=0.1)
    assert one_text > sum(four.stage_seconds(stage, 1, 1, 2048) for stage in range(4))


def test_groups_share_weights_and_add_sums(large):
    _, alone = pipeline(large, 1, 1)
    _, pair = pipeline(large, 2, 1)
    one, two = alone.decode(1, 2048)[0], pair.decode(1, 2048)[0]
    assert 1.1 < one / two < 2
    sums = next(iter(pair.exchanges(1)))
    assert (sums.kind, sums.count, sums.bytes) == ("all-reduce", 2 * 48, 4 * 2048)
    # Embeddings are whole on both.
    assert alone.stage_bytes[0] / 2 < pair.stage_bytes[0] < alone.stage_bytes[0] / 2 + 700e6


def test_a_step_takes_as_long_as_its_calls_take_the_host(large):
    """The host begins a step while devices compute the last one."""
    _, file, model, vdevices = large
    parts = LayerProblem(file, model, CACHE, vdevices, COSTS, {}).search.parts

    def seconds(call, tensor, stages):
        calibration = Calibration({1: 1.0}, 1.0, 1.0, HostTime(call, 0.25, 0.5, 4.0))
        groups = Pipeline(parts, model, COSTS, Fleet(1, 8, FAST, SLOW), tensor, stages, 1, calibration)
        return groups.decode(8, 2048, 4)[0]

    assert HostTime(1.0, 0.25, 0.5, 4.0).seconds(5, 4, 3) == 1.0 + 4 * 0.25 + 3 * 3 * 0.5 + 2 * 4.0
    assert seconds(1.0, 2, 1) == 2 * (1.0 + 3 * 0.25 + 0.5)
    assert seconds(1.0, 1, 2) == 2 * (1.0 + 3 * 0.25 + 4.0)
    fast = Pipeline(parts, model, COSTS, Fleet(1, 8, FAST, SLOW), 1, 2)
    idle = Calibration({1: 1.0}, 1.0, 1.0, HostTime(1e-6, 1e-9, 1e-6, 1e-6))
    bound = Pipeline(parts, model, COSTS, Fleet(1, 8, FAST, SLOW), 1, 2, 1, idle)
    assert bound.decode(8, 2048, 4) == pytest.approx(fast.decode(8, 2048, 4))


def test_arrangements_are_sorted_and_fit(large):
    found = on(large, 2, 8)
    assert [each.tokens_per_second for each in found] == sorted((e.tokens_per_second for e in found), reverse=True)
    assert all(each.tensor * each.stages * each.replicas == 16 and each.tensor in (1, 2, 4) for each in found)
    assert {each.tensor for each in found} == {1, 2, 4}  # heads of keys: 4
    limit = sorted(each.device_bytes for each in found)[len(found) // 2]
    assert 0 < len(on(large, 2, 8, limit=limit)) < len(found)
    expected = r"found a limit of 1,000 bytes for a device, expected at least .* \(.* GiB\) on each of 16 devices"
    with pytest.raises(rh.PlacementError, match=expected):
        on(large, 2, 8, limit=1000)


def test_groups_are_those_that_can_share_layers(large):
    """A layer with a state, as the gated delta rule has, stays on one device; `tensor_parallel=` refuses it."""
    model = large[2]
    with_states = replace(model, delta=DeltaRule(2, 4, 8, 16, 4, is_tiled=False, period=3))
    with pytest.raises(rh.FrontendError, match="has a state, expected heads"):
        split_caches(with_states, {"*": "vdevice[0:2]"}, parse_vdevices([GPU] * 2))
    fleet = Fleet(1, 8, FAST, SLOW)
    assert {tensor for tensor, _, _ in group_shapes(model, fleet)} == {1, 2, 4}
    assert {tensor for tensor, _, _ in group_shapes(with_states, fleet)} == {1}


def test_a_prefill_has_one_row_after_the_attention_of_the_last_layer(large):
    problem, groups = pipeline(large, 4, 1)
    layers = [[part for part in problem.search.parts if part.layer == 46 + i and part.name != "output"] for i in (0, 1)]
    for before, last in zip(*layers, strict=True):
        times = [groups.seconds([part], 1, rows, 0) for part, rows in ((before, 256), (last, 256), (before, 1))]
        if last.name == "attn":  # its products are 2048 by 4096 and 1024, and 4096 by 2048, which has a sum
            assert last.last_row == (pytest.approx(4096 / (2 * 4096 + 1024)), 0) and before.last_row == (0, 0)
            assert times[0] - times[1] > groups.sum_seconds(256 * 2048 * 4) - groups.sum_seconds(2048 * 4)
        else:
            assert times[0] > times[1] == times[2]
    assert problem.search.parts[-1].last_row == (1, 0)


def test_logits_of_many_texts_take_memory(large):
    """Besides their caches: a call decodes all texts of a replica that has one stage."""
    one, many = (on(large, 1, 1, texts)[0].device_bytes for texts in (1024, 3072))
    cache = sum(cache.kv_heads * cache.size * 2 * 2 * 4096 for cache in large[2].caches)
    assert many - one >= 2048 * (cache + 4 * large[2].vocabulary)


def test_a_slow_network_is_crossed_seldom(large):
    def seconds(network):
        return next(e for e in on(large, 2, 1, 2, network) if e.stages == 2).token_seconds

    assert seconds(SLOW) > seconds(FAST) + 1e-3


def test_the_commands_of_the_document(large, runner, tmp_path, monkeypatch):
    """The file's metadata is that of the commands, and the table has what they show."""
    text = (Path(__file__).parents[4] / "docs/explanation/scaling.md").read_text()
    writing, scaling = (shlex.split(line) for line in text.split("```sh\n")[2].partition("```")[0].splitlines())
    monkeypatch.setattr(sys, "argv", [*writing[1:2], str(tmp_path / "model.gguf"), *writing[3:]])
    sys.modules["random_gguf"].main()
    assert (tmp_path / "model.gguf").stat().st_blocks * 512 < 1e8 < 17e9 < (tmp_path / "model.gguf").stat().st_size
    arguments = [*scaling[1:2], str(tmp_path / "model.gguf"), *scaling[3:]]
    found = json.loads(runner(*arguments, "--json"))
    assert found["figures"] == "tables" and found["measured_over_expected"] is None
    shown = {
        (each["tensor"], each["stages"], each["replicas"]): [
            f"{each['tokens_per_second']:,.0f}",
            time_text(each["token_seconds"]),
            time_text(each["prefill_seconds"]),
            bytes_text(each["device_bytes"]),
            f"{each['busy']:.0%}",
        ]
        for each in found["arrangements"]
    }
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for tensor, stages, replicas, cells in rows:
        assert shown[int(tensor), int(stages), int(replicas)] == cells.split(" | ")
    arguments = ["scale", str(large[0]), "--vdevice", json.dumps(GPU), "--devices", "4", "--memory-limit", "64GiB"]
    shown = runner(*arguments)
    assert "Arrangements" in shown and "on 1 host of 4 devices, 32 texts" in shown and "Nothing was compiled" in shown


def test_layers_are_measured(runner, tmp_path, monkeypatch):
    """Ratios of decode steps and of a prompt, on a CPU device of one core; two work at the same time."""
    path = write_gguf(tmp_path / "model.gguf", replace(MODELS["llama"], layers=4), "F32")
    core, sizes = json.dumps({"kind": "llvm", "num-cores": 1}), ["--devices", "2", "--texts", "2", "--context", "64"]
    monkeypatch.setattr("relax_hetero.llm.calibrate._MIN_SECONDS", 0)
    monkeypatch.setattr("relax_hetero.frontend.auto.measure_devices._MIN_MEASURE_SECONDS", 0)
    monkeypatch.setattr("relax_hetero.frontend.auto.measure_devices._CPU_STREAM_BYTES", 4 << 20)
    found = json.loads(runner("scale", str(path), "--vdevice", core, *sizes, "--measure", "--json"))
    ratios = found["measured_over_expected"]
    assert set(ratios["decode"]) == {"1", "2"} and min(*ratios["decode"].values(), ratios["prefill"]) > 0
    assert ratios["host"] is None and len(found["shared_bandwidths"]) == 8 * (num_cores() > 1)
    assert all(rate > 1e8 for rate in found["shared_bandwidths"])
    assert {(each["tensor"], each["stages"], each["replicas"]) for each in found["arrangements"]} == {
        *((1, 1, 2), (1, 2, 1), (2, 1, 1))
    }


def test_a_machine_that_changes_its_speed_is_named(large, runner, monkeypatch):
    rates, host = iter([33e9] * 4 + [22e9] * 4), HostTime(3e-4, 1e-6, stage=4e-5)
    shared = SimpleNamespace(measure=lambda: next(rates))
    monkeypatch.setattr("relax_hetero.frontend.auto.measure_devices.SharedBandwidth.of", lambda vdevice: shared)
    monkeypatch.setattr("relax_hetero.llm.calibrate.calibrate", lambda *_: Calibration({1: 1.0}, 1.0, 1.0, host))
    arguments = ["scale", str(large[0]), "--vdevice", json.dumps(GPU), "--devices", "2", "--measure"]
    shown = " ".join(runner(*arguments).split())
    assert "read 27.5 GB/s each, 22.0 to 33.0 in 8 measurements. This machine changes its speed" in shown
    assert "The host takes 300 us for a step of one text on one device, 1 us for each further text, 40 us for" in shown
    assert "No time was measured, and none is assumed, for each further device of a group." in shown


def test_first_layers_are_a_model(large):
    _, file, *_ = large
    part = file.first_layers(2)
    assert hyperparameters_of(part).layers == 2
    layers = {int(name.split(".")[1]) for name in part.tensors if name.startswith("blk.")}
    assert layers == {0, 1} and "output.weight" in part.tensors
    listed = replace(file, fields={**file.fields, "qwen3moe.attention.head_count_kv": [4] * 48})
    assert hyperparameters_of(listed.first_layers(3)).kv_heads == (4, 4, 4)


def test_a_device_with_a_number_stands_for_its_kind():
    """The link is between two devices: that of one to itself would cost nothing."""
    _, costs, fleet = fleet_of("cuda:1", 1, 8, SLOW)
    assert fleet == fleet_of("cuda", 1, 8, SLOW)[2]
    assert fleet.link.bandwidth < math.inf and len(costs.devices) == 2 and fleet.devices == 8


def test_of_a_device_alone_only_the_link_is_assumed(large, runner, monkeypatch):
    """One GPU in this machine: its figures count for all, and the command says what the link's would need."""
    figures = Figures({0: DeviceFigures({"float32": 1e13, "float16": 2e14}, 3e12, 2e-6, 5e-5)}, {})
    for module in ("cost_model", "measure_devices"):
        name = f"relax_hetero.frontend.auto.{module}.are_present"
        monkeypatch.setattr(name, lambda vdevices: [int(each.vdevice_id) for each in vdevices] == [0])
    monkeypatch.setattr("relax_hetero.frontend.auto.cost_model.figures_of", lambda vdevices, *_: figures)
    monkeypatch.setattr("relax_hetero.frontend.auto.auto_placement.are_present", lambda vdevices: False)
    vdevices, costs, fleet = fleet_of(GPU, 1, 8, SLOW)
    assert [int(vdevice.vdevice_id) for vdevice in vdevices] == [0, 1]
    assert [cost.bandwidth for cost in costs.devices] == [3e12, 3e12] and costs.figures == "measured"
    assert fleet.link.bandwidth == CostModel.for_vdevices(vdevices).links[0, 1].bandwidth
    common = ["scale", str(large[0]), "--vdevice", json.dumps(GPU), "--devices", "2", "--memory-limit", "80GiB"]
    shown = " ".join(runner(*common).split())
    assert "Rates were measured" in shown
    assert "found 1 of these devices in this machine, expected 2 to measure it; give it as --link GB/S" in shown
    assert "expected 2" not in runner(*common, "--link", "200", "5")
    assert json.loads(runner(*common, "--json"))["figures"] == "measured, links from tables"
    assert json.loads(runner(*common, "--link", "200", "5", "--json"))["figures"] == "measured"


@pytest.fixture
def runner():
    from click.testing import CliRunner

    from relax_hetero.tools.cli import cli

    def run(*arguments, code=0):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == code, result.output
        return result.output if code else result.stdout

    return run


def chosen(large, count, texts, link=FAST, limit=None):
    _, file, model, _ = large
    costs = CostModel(list(COSTS.devices) * count, dict.fromkeys(itertools.permutations(range(count), 2), link))
    return choose_replicas(file, model, CACHE, parse_vdevices([GPU] * count), costs, limit, texts)


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.has_peer_access", lambda gpu, peer: True)


@pytest.mark.usefixtures("peers")
def test_replicas_are_chosen_by_rates_and_limits(large):
    """Slow links are for replicas; many texts share weights; limits are for stages."""
    few = chosen(large, 4, 8, SLOW)
    assert (few.replicas, few.devices, few.slots, few.rules) == (4, 1, 2, None)
    assert chosen(large, 4, 64, SLOW).replicas == 4
    many = chosen(large, 4, 256)
    assert (many.replicas, many.devices, many.slots, many.rules) == (1, 4, 256, {"*": "vdevice[0:4]"})
    assert many.batch == 256  # estimates are of steps that read all weights once
    assert "1 replica of 4 devices that share each layer, about " in many.reason and "next best: " in many.reason
    alone = on(large, 1, 1, 2)[0].device_bytes
    limited = chosen(large, 4, 8, SLOW, alone * 3 // 4)
    assert (limited.replicas, limited.devices, limited.slots, limited.batch) == (2, 2, 4, 2)
    assert limited.rules["blk.47.*"] == "vdevice:1" and limited.rules["*"] == "vdevice:0"
    with pytest.raises(rh.PlacementError, match="found a limit of 1,000 bytes"):
        chosen(large, 4, 8, limit=1000)
    one = chosen(large, 1, 8)
    assert (one.replicas, one.devices, one.slots, one.batch, one.rules) == (1, 1, 8, 8, None)
    with pytest.raises(rh.PlacementError, match="found a limit of 1,000 bytes"):
        chosen(large, 1, 8, limit=1000)
    spare = chosen(large, 4, 2, SLOW)  # two of four replicas would have no text
    assert (spare.replicas, spare.devices, spare.slots) == (2, 1, 1)
    assert spare.reason.startswith("2 replicas of 1 device")


def test_replicas_where_gpus_do_not_reach_each_other(large):
    best = chosen(large, 4, 256)
    assert best.rules is None or "[" not in str(best.rules)
    assert "need GPUs that reach each other's memory, and 0 and 1 do not" in best.reason


def test_replicas_without_texts_are_idle(large):
    (replicas,) = (each for each in on(large, 1, 4, 2) if each.replicas == 4)
    assert replicas.busy == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shared", "ratio", "slowdown"), [(3.0, 1.0, 1.0), (2.0, 1.0, 1.0), (0.5, 1.0, 2.5), (0.5, 2.0, 1.75)]
)
def test_memory_that_devices_share_adds_to_the_time_of_a_byte(shared, ratio, slowdown):
    """Twice as long for each byte as one device alone, whose kernels take `ratio` times as long as expected."""
    vdevices, alone = parse_vdevices(["llvm"] * 2), COSTS.devices[0]
    sharing = SharingFigures(2, 2 * alone.bandwidth, shared * alone.bandwidth, 1.25, 1e-5, 1e-6)
    fleet = Fleet.of_vdevices(vdevices, CostModel(COSTS.devices, {(0, 1): FAST}), sharing=sharing)
    assert fleet.slowdowns(alone.bandwidth / ratio, 2, 2) == pytest.approx((1.0, slowdown, 1.25))
    assert fleet.slowdowns(alone.bandwidth / ratio, 1, 1) == (1.0, 1.0, 1.0)
    assert fleet.slowdowns(alone.bandwidth / ratio, 4, 1) == pytest.approx((2.0, slowdown, 1.25))


def test_devices_of_a_host_share_its_cores_and_memory(large):
    """Figures of CPU devices: one alone, then as many as work at the same time, then more, which take turns."""
    _, file, model, vdevices = large
    bandwidth = COSTS.devices[0].bandwidth
    fleet = Fleet(1, 8, FAST, SLOW, 1e-5, False, 2, bandwidth, bandwidth / 1.5, 1.25)
    parts = LayerProblem(file, model, CACHE, vdevices, COSTS, {}).search.parts
    attention = [part for part in parts if part.name == "attn"]
    costs = CostModel([replace(COSTS.devices[0], launch=0.0, flops=1e9, products={})], {})  # products decide

    def seconds(tensor, stages, replicas=1):
        return Pipeline(parts, model, costs, fleet, tensor, stages, replicas).seconds(attention, 1, 1, 0)

    alone, sums = seconds(1, 1), 48 * 1e-5
    assert seconds(1, 4) == pytest.approx(alone)  # one stage works at a time
    assert seconds(1, 1, 2) == pytest.approx(alone * 1.25)
    assert seconds(1, 1, 4) == pytest.approx(alone * 1.25 * 2)
    assert seconds(2, 1) == pytest.approx(alone * 1.25 / 2 + sums, rel=1e-4)
    assert seconds(4, 1) == pytest.approx(alone + sums, rel=1e-4)


def test_measurements_of_layers_correct_estimates(large):
    _, alone = pipeline(large, 1, 1)
    _, file, model, _ = large
    measured = Calibration({1: 2.0, 4: 1.0}, 5.0, 3.0)
    corrected = Pipeline(alone.stages[0], model, COSTS, Fleet(1, 8, FAST, SLOW), 1, 1, 1, measured)
    for texts, ratio in (1, 2.0), (2, 1.5), (4, 1.0), (64, 1.0):
        short, long = (alone.decode(texts, cached)[0] for cached in (0, 2000))
        assert corrected.decode(texts, 0)[0] == pytest.approx(ratio * short)
        assert corrected.decode(texts, 2000)[0] == pytest.approx(ratio * short + 5 * (long - short))
    assert corrected.prefill(512, 256) == pytest.approx(3 * alone.prefill(512, 256))


def test_products_hide_reading_that_takes_longer(large):
    """A step of many texts that takes longer than reading, when memory is shared, is not slower."""
    _, file, model, vdevices = large
    bandwidth = COSTS.devices[0].bandwidth
    fleet = Fleet(1, 2, FAST, SLOW, 0.0, False, 2, bandwidth, bandwidth / 2)
    costs = replace(COSTS, devices=[replace(COSTS.devices[0], launch=0.0)])
    parts = LayerProblem(file, model, CACHE, vdevices, costs, {}).search.parts
    measured = Calibration({1: 1.0, 2: 0.5, 4: 2.0}, 1.0, 1.0)
    assert [measured.reading_ratio(texts) for texts in (1, 2, 3, 4, 64)] == [1.0, 0.5, 0.5, 0.5, 0.5]

    def seconds(texts, replicas):
        return Pipeline(parts, model, costs, fleet, 1, 1, replicas, measured).decode(texts, 0)[0]

    for texts, slowdown in (1, 2.0), (2, 3.0), (4, 1.0):
        assert seconds(texts, 2) == pytest.approx(slowdown * seconds(texts, 1), rel=0.02)


def test_rates_of_products_follow_from_a_prefill(large):
    """The time of products is what is left of a prefill; where little is, it says nothing about them."""
    assert _product_ratio(lambda ratio: 1.0 + 4.0 * ratio, 3.0) == pytest.approx(0.5, abs=2e-3)
    assert _product_ratio(lambda ratio: 1.0 + 4.0 * ratio, 9.0) == pytest.approx(2.0, abs=2e-3)
    assert _product_ratio(lambda ratio: 1.0 + 0.5 * ratio, 3.0) == 1.0
    assert _product_ratio(lambda ratio: 1.0 + 4.0 * ratio, 1.2) == 1.0
    _, alone = pipeline(large, 1, 1)
    products = Calibration({1: 1.0}, 1.0, 1.0, products=2.0)
    slower = Pipeline(alone.stages[0], large[2], COSTS, Fleet(1, 8, FAST, SLOW), 1, 1, 1, products)
    assert slower.prefill(4096, 4096) == pytest.approx(2 * alone.prefill(4096, 4096), rel=0.05)
    assert slower.decode(1, 0)[0] == pytest.approx(alone.decode(1, 0)[0])  # reads weights


def test_long_sums_are_shared_by_rows(large):
    """Each GPU sends and receives most of an operand once or twice, however many GPUs there are, and flags."""
    short, flags = {2: (512, 1), 4: (512, 3), 8: (256, 7)}, 4.6e-6
    for count, (kilobytes, others) in short.items():
        _, group = pipeline(large, count, 1)
        start = group.sum_seconds(0)
        for nbytes, factor, more in (kilobytes << 10, others, 0.0), (64 << 20, 2 * others / count, flags):
            assert group.sum_seconds(nbytes) - start == pytest.approx(factor * nbytes / FAST.bandwidth + more)
        assert group.sum_seconds(512 << 10) - start < 512e3 / FAST.bandwidth * 4 + flags


def test_frequent_experts_are_read_once_by_a_batch(large):
    """With counts, texts choose fewer different experts, and devices of a group have unequal work."""
    _, file, model, (vdevice,) = large
    few = dict.fromkeys(range(model.layers), [100.0] * 16 + [1.0] * 112)
    equal = dict.fromkeys(range(model.layers), [7.0] * 128)
    rows = 64

    def on_two(counts, texts=rows):
        return {
            each.tensor: each.token_seconds
            for each in arrangements(
                file, model, CACHE, vdevice, COSTS, Fleet(1, 2, FAST, SLOW), texts, None, None, counts
            )
            if each.stages == 1
        }

    assert on_two(equal) == pytest.approx(on_two(None))
    assert on_two(few)[1] < 0.8 * on_two(equal)[1]
    assert on_two(few)[2] / on_two(few)[1] > 1.1 * on_two(equal)[2] / on_two(equal)[1]  # the first device has them
    problem = LayerProblem(file, model, CACHE, [vdevice], COSTS, {}, few)
    experts = next(part for part in problem.search.parts if part.name == "experts")
    chances = [8 * count / sum(few[0]) for count in few[0]]
    assert experts.touched(rows) == pytest.approx(sum(1 - (1 - chance) ** rows for chance in chances) / 128)
    assert experts.touched(1) == pytest.approx(8 / 128)


def test_links_and_counts_are_given(large, runner, tmp_path):
    (tmp_path / "counts.json").write_text(json.dumps({"expert_counts": {"0": [1] * 127 + [1000]}}))
    common = ["scale", str(large[0]), "--vdevice", json.dumps(GPU), "--devices", "2", "--texts", "64", "--json"]

    def best(*arguments):
        found = json.loads(runner(*common, *arguments))["arrangements"]
        return {(each["tensor"], each["stages"]): each["token_seconds"] for each in found}

    usual, slow = best(), best("--link", "1", "500")
    assert slow[2, 1] > usual[2, 1] and slow[1, 2] > usual[1, 2] and slow[1, 1] == usual[1, 1]
    common[3] = '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}'
    near, far = best("--link", "10", "1"), best("--link", "10", "500")  # two sums a layer, of the heads and the experts
    assert far[2, 1] - near[2, 1] == pytest.approx(2 * 48 * 499e-6, rel=0.1) and far[1, 1] == near[1, 1]
    common[3] = json.dumps(GPU)
    counted = best("--expert-counts", str(tmp_path / "counts.json"))
    assert counted[1, 1] < usual[1, 1]
    assert "found --vdevice 2 times, expected one" in runner(*common, "--vdevice", "llvm", code=2)
