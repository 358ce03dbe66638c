"""Figures of devices: measured once, kept, and used by the cost model where devices of two kinds are here."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import tvm
from click.testing import CliRunner

import relax_hetero as rh
from relax_hetero.artifact.cache_folder import resolve_cache_folder
from relax_hetero.frontend import CostModel
from relax_hetero.frontend.auto import cost_model, measure_devices
from relax_hetero.frontend.auto.measure_devices import DeviceFigures, Figures, LinkFigures, figures_of, known_figures_of
from relax_hetero.frontend.auto.work_graph import Work
from relax_hetero.target.vdevice import parse_vdevices
from relax_hetero.tools import devices as devices_of_command
from relax_hetero.tools.cli import cli

GPU = {"kind": "cuda", "arch": "sm_90a"}
FAST = DeviceFigures({"float32": 4e13, "float16": 6e14, "bfloat16": 6e14}, 4e12, 2e-6, 1e-4)
SLOW = DeviceFigures({"float32": 1e12, "float16": 1e12, "bfloat16": 2e12}, 1e11, 1e-6, 1e-5)
LINK = LinkFigures(5e10, 1e-5, 4e-5)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The kinds of figures that are measured, in order; nothing is, and nothing was before."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    monkeypatch.setattr(measure_devices, "_figures", {})
    measured = []
    monkeypatch.setattr(measure_devices._DEVICE, "measure", lambda v: measured.append("device") or SLOW)
    monkeypatch.setattr(measure_devices._LINKS, "measure", lambda a, b: measured.append("links") or (LINK, LINK))
    return measured


@pytest.fixture
def pair():
    return parse_vdevices(["llvm", GPU])


def test_figures_are_measured_once_on_a_machine(counted, pair, monkeypatch):
    assert figures_of(pair[:1]).devices == {0: SLOW} and figures_of(pair, "nothing") is None
    figures = figures_of(pair)
    assert figures == figures_of(pair, "nothing") == Figures({0: SLOW, 1: SLOW}, {(0, 1): LINK, (1, 0): LINK})
    assert counted == ["device", "device", "links"]
    assert figures_of(pair) == figures
    monkeypatch.setattr(measure_devices, "_figures", {})  # another process
    assert figures_of(pair[:1]).devices == {0: SLOW} and figures_of(pair) == figures
    assert len(counted) == 3
    figures_of(pair, "all")
    assert len(counted) == 6
    measure_devices._figures.clear()
    resolve_cache_folder().clear()
    figures_of(pair)
    assert len(counted) == 9


def test_cpu_devices_of_one_target_are_measured_once(counted):
    assert figures_of(parse_vdevices(["llvm", "llvm"])).devices == {0: SLOW, 1: SLOW} and counted == ["device"]


def test_figures_of_a_busy_machine_are_reported_and_measured_again(counted, pair, monkeypatch, caplog):
    share, now = [0.4], [0.0]
    monkeypatch.setattr(measure_devices.CpuWatch, "others", lambda watch: share[0])
    monkeypatch.setattr(measure_devices.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(measure_devices, "_rough_figures", {})
    assert figures_of(pair[:1]).other_work == 0.4 and "40 % of the CPUs" in caplog.text
    assert figures_of(pair[:1]).other_work == 0.4 and counted == ["device"]  # for now
    monkeypatch.setattr(measure_devices, "_figures", {})  # another process finds none
    monkeypatch.setattr(measure_devices, "_rough_figures", {})
    figures_of(pair[:1])
    assert counted == ["device"] * 2
    share[0], now[0] = 0.0, 1000.0
    assert figures_of(pair[:1]).other_work == 0 and counted == ["device"] * 3
    now[0] = 2000.0
    figures_of(pair[:1])
    assert counted == ["device"] * 3 and list(resolve_cache_folder().path.glob("*.figures"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"key": "KEY"}',
        '{"key": "KEY", "figures": [[]]}',
        '{"key": "KEY", "figures": {"products": {"float32": -1}, "bandwidth": 1.0, "launch": 1.0, "call": 1.0}}',
        "of the next key",
    ],
)
def test_figures_that_are_spoilt_are_measured_again(counted, pair, text):
    figures_of(pair)
    files = list(resolve_cache_folder().path.glob("*.figures"))
    assert len(files) == 3
    texts = [file.read_text() for file in files]
    for file, other in zip(files, [*texts[1:], texts[0]], strict=True):
        file.write_text(other if text == "of the next key" else text.replace("KEY", file.stem))
    measure_devices._figures.clear()
    assert figures_of(pair).devices == {0: SLOW, 1: SLOW} and len(counted) == 6


def test_without_a_cache_the_process_keeps_them(counted, pair, monkeypatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")
    assert figures_of(pair) == figures_of(pair) and len(counted) == 3


def test_a_kernel_that_fails_leaves_tables(counted, pair, monkeypatch, caplog):
    def fail(*_):
        raise rh.BuildError("no kernel")

    monkeypatch.setattr(measure_devices._LINKS, "measure", fail)
    assert figures_of(pair) is None and "placement uses tables: no kernel" in caplog.text
    monkeypatch.setattr(cost_model, "are_present", lambda vdevices: True)
    assert CostModel.measured(pair) == CostModel.for_vdevices(pair)


def test_a_device_that_fails_leaves_the_figures_of_the_others(counted, monkeypatch):
    gpus = parse_vdevices(["llvm", GPU, rh.VDevice(GPU, 1)])

    def measure(*vdevices):
        if vdevices[-1] == gpus[1]:
            raise RuntimeError("out of memory")
        return SLOW if len(vdevices) == 1 else (LINK, LINK)

    for kind in (measure_devices._DEVICE, measure_devices._LINKS):
        monkeypatch.setattr(kind, "measure", measure)
    links = {(0, 2): LINK, (2, 0): LINK}
    assert known_figures_of(gpus) == Figures({0: SLOW, 2: SLOW}, links, failures={(1,): "out of memory"})
    assert figures_of(gpus) is None and figures_of([gpus[0], gpus[2]]).links == {(0, 1): LINK, (1, 0): LINK}


def test_the_cost_model_has_what_was_measured(pair, monkeypatch):
    figures = Figures({0: SLOW, 1: FAST}, {(0, 1): LINK, (1, 0): dataclasses.replace(LINK, bandwidth=1e10)})
    monkeypatch.setattr(cost_model, "are_present", lambda vdevices: True)
    monkeypatch.setattr(cost_model, "figures_of", lambda vdevices, measure: figures)
    model = CostModel.measured(pair)
    assert model.transfer_seconds(1e9, 1, 0) == pytest.approx(0.1 + 4.5e-5)
    half, single = (model.op_seconds(Work(1e12, 0, dtype), 1) for dtype in ("float16", "float32"))
    assert single == pytest.approx(15 * half, rel=0.01)
    assert model.op_seconds(Work(0, 4e12), 1) == pytest.approx(1, rel=0.01)
    assert model.op_seconds(Work(0, 0), 1) == 2e-6 and model.op_seconds(Work(0, 0, is_kernel=False), 1) == 0


def test_tables_are_used_for_absent_devices_and_one_kind(counted):
    for vdevices in (["llvm", "llvm"], ["llvm"], ["llvm", rh.VDevice(GPU, 99)]):
        CostModel.measured(parse_vdevices(vdevices))
    assert counted == []


def test_this_cpu_is_here_and_others_are_not():
    assert measure_devices.are_present(parse_vdevices(["llvm"]))
    assert not measure_devices.are_present(parse_vdevices([{"kind": "llvm", "mcpu": "x86-64-v2"}]))
    assert not measure_devices.are_present(parse_vdevices(["llvm", "c"]))


@pytest.mark.slow
def test_measured(monkeypatch, tmp_path):
    """Two CPU devices stand for two of different kinds."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    vdevices = parse_vdevices(["llvm", "llvm"])
    device = measure_devices._measure_device(vdevices[0])
    assert set(device.products) == {*measure_devices.TYPES, "quantized"}
    assert all(1e9 < rate < 1e15 for rate in device.products.values())
    assert 1e8 < device.bandwidth < 1e13 and 1e-8 <= device.launch < 1e-2 and 0 < device.call < 1
    for link in measure_devices._measure_links(*vdevices):
        assert link.bandwidth > 1e8 and 0 < link.latency < 1 and 0 < link.crossing < 1


def test_the_command(counted):
    done = CliRunner().invoke(cli, ["devices", "--no-measure", "--json"])
    assert done.exit_code == 0, done.output
    devices = json.loads(done.output)["devices"]
    assert devices[0]["name"] == "llvm:0" and devices[0]["cores"] >= 1 and devices[0]["memory"] > 1e8
    kinds = [device["name"].partition(":")[0] for device in devices]
    assert kinds.count("llvm") == 1 and kinds.count("cuda") == sum(tvm.cuda(i).exist for i in range(8))
    assert counted == []
    done = CliRunner().invoke(cli, ["devices"])
    assert done.exit_code == 0 and "llvm:0" in done.output and "device" in counted


def test_the_command_names_devices_that_fail_and_shows_the_others(counted, monkeypatch):
    describe = devices_of_command._describe

    def describe_gpu(vdevice):
        if vdevice.target.kind.name == "llvm":
            return describe(vdevice)
        if int(vdevice.vdevice_id) == 1:
            raise RuntimeError("CUDA_ERROR_NO_DEVICE")
        return {"model": "a GPU", "cores": 132, "instructions": "wgmma", "memory": 1 << 37}

    def fail(*vdevices):
        raise rh.BuildError("no kernel between them")

    kinds = [SimpleNamespace(kind="cuda", count=lambda: 2)]
    monkeypatch.setattr("relax_hetero.target.backend.backends", lambda: kinds)
    monkeypatch.setattr(devices_of_command, "_describe", describe_gpu)
    monkeypatch.setattr(measure_devices._LINKS, "measure", fail)
    done = CliRunner().invoke(cli, ["devices"])
    assert done.exit_code == 1 and counted == ["device", "device"]
    assert done.stderr.splitlines() == [
        "error: cuda:1: CUDA_ERROR_NO_DEVICE",
        "error: llvm:0 and cuda:0: no kernel between them",
    ]
    listed, measured = done.stdout.split("Measured")
    assert all(name in listed for name in ("llvm:0", "cuda:0", "cuda:1"))
    assert "llvm:0" in measured and "cuda:0" in measured and "cuda:1" not in measured
    done = CliRunner().invoke(cli, ["devices", "--json"])
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["devices"][2]["error"] == "CUDA_ERROR_NO_DEVICE"
    assert set(data["measured"]["devices"]) == {"llvm:0", "cuda:0"} and data["measured"]["links"] == []
    assert data["measured"]["failures"] == [{"devices": ["llvm:0", "cuda:0"], "error": "no kernel between them"}]


def test_tensors_of_many_devices_fit_in_memory(monkeypatch):
    monkeypatch.setattr(measure_devices, "host_memory", lambda: 32 << 30)
    assert measure_devices._shared_stream_bytes(2) == measure_devices._CPU_STREAM_BYTES
    assert 128 * measure_devices._shared_stream_bytes(128) <= 4 << 30
