"""The benchmark of PyTorch networks: its definitions and its report without torch, a network end to end with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

BENCH = Path(__file__).parents[3] / "apps" / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_networks_are_known_without_the_packages_that_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_bench import torch_models
    from torch_bench.networks import NETWORKS

    packages = {network.package for network in NETWORKS.values()}
    assert packages == {"torchvision", "timm", "transformers", "diffusers", "torch"}
    assert len(NETWORKS) >= 20
    monkeypatch.setattr(torch_models, "is_installed", lambda package: package != "torch")
    with pytest.raises(click.ClickException, match=r"not installed: torch; relax-hetero\[torch\]"):
        torch_models._check(("resnet50",), ("ours",))
    monkeypatch.setattr(torch_models, "is_installed", lambda package: True)
    torch_models._check(("resnet50",), ("ours", "from_torch", "inductor"))
    with pytest.raises(click.BadParameter, match="'resnet5' is none of resnet50"):
        torch_models._check(("resnet5",), ("ours",))
    with pytest.raises(click.BadParameter, match="'nobody' is none of ours"):
        torch_models._check((), ("nobody",))


def test_the_report_divides_each_way_in_by_its_peer() -> None:
    from torch_bench.report import summary, table

    def result(model: str, **times: float) -> dict[str, object]:
        return {"model": model, "threads": 2, "rows": {key: {"median_ms": value} for key, value in times.items()}}

    results = [
        result("a", ours=2.0, onnxruntime=4.0, from_torch=1.0, inductor=3.0),
        result("b", ours=4.0, onnxruntime=2.0, inductor=5.0),
    ]
    title, columns, rows = table(results)
    assert title.startswith("2 threads")
    assert columns[-2:] == ["from_onnx against ONNX Runtime", "from_torch against torch.compile"]
    assert [row[-2:] for row in rows] == [["2.00", "3.00"], ["0.50", "–"]]
    assert summary(results) == [
        "from_onnx against ONNX Runtime: 1.000, lowest 0.500 of b (2)",
        "from_torch against torch.compile: 3.000, lowest 3.000 of a (1)",
    ]


@pytest.mark.slow
def test_a_network_is_exported_compiled_checked_and_timed(tmp_path: Path) -> None:
    for package in ("torchvision", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    file = tmp_path / "results.json"
    command = [
        sys.executable,
        str(BENCH / "torch_bench" / "torch_models.py"),
        "shufflenet_v2_x1_0",
        "--folder",
        str(tmp_path),
    ]
    command += ["--peers", "ours,onnxruntime,from_torch,eager", "--rounds", "1", "--seconds", "0.02"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    for key in ("ours", "onnxruntime", "from_torch", "eager"):
        assert result["rows"][key]["median_ms"] > 0 and result["rows"][key]["error"] <= 1
