"""The benchmark of command buffers: contestants compute right numbers, and impossible figures are not reported."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

BENCH = Path(__file__).parents[3] / "apps" / "bench"
# Contestants for chains of kernels: with one command buffer, and with a call of each kernel.
RECORDED, ONE_BY_ONE = ("command buffers", "by hand", "by hand, bound"), ("without", "stock TVM")


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    # The tests have a package of that name too, which other tests may have imported.
    monkeypatch.delitem(sys.modules, "models", raising=False)


def run(*arguments: str) -> Any:
    command = [sys.executable, str(BENCH / "command_buffers.py"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [(), pytest.param(("--symbolic",), marks=pytest.mark.slow)])
def test_chains_of_kernels_are_one_region_and_every_contestant_has_a_time(options: tuple[str, ...]) -> None:
    report = run("elementwise", "--counts", "2,20", "--rounds", "1", *options)
    chains, kernel = report["found"]["chains"], report["found"]["kernel_ns"]
    assert [(chain["regions"], chain["commands"]) for chain in chains.values()] == [(1, 2), (1, 20)]
    for chain in chains.values():
        assert set(chain["us"]) == set(kernel) == {*RECORDED, *ONE_BY_ONE}
        for one in chain["us"].values():
            assert 0 < one["fastest"] <= one["median"]
    first = chains["2"]["us"]
    assert [check["found"] for check in report["checks"]] == [
        value for name in ("command buffers", "by hand") for value in (kernel[name], first[name]["median"])
    ]


@pytest.mark.timing
@pytest.mark.parametrize("options", [(), ("--symbolic",)], ids=["static", "symbolic"])
def test_kernels_in_a_command_buffer_cost_less_than_through_bytecode(options: tuple[str, ...]) -> None:
    kernel = run("elementwise", "--counts", "2,200", "--rounds", "2", *options)["found"]["kernel_ns"]
    # The difference is more than tenfold.
    for name in RECORDED:
        assert 0 < kernel[name] < min(kernel[other] for other in ONE_BY_ONE) / 2


@pytest.mark.slow
def test_models_are_compared_with_and_without_command_buffers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from model_zoo.graph import Graph

    graph = Graph("small")
    x = graph.node("Relu", graph.conv(graph.input("image", (1, 3, 8, 9)), 20, 3, stride=2, norm=True))
    onnx.save(graph.model(graph.classifier(x, classes=7)), tmp_path / "small.onnx")
    report = run("models", str(tmp_path / "small.onnx"), "--threads", "1", "--rounds", "1", "--seconds", "0.02")
    (result,) = report["found"]
    assert (result["model"], result["threads"], result["equal"]) == ("small", 1, True)
    assert result["peers"]["bytecode"] == {"regions": 0, "commands": 0}
    assert result["peers"]["ours"]["commands"] >= 2 and result["peers"]["ours"]["regions"] >= 1
    for key in ("ours", "bytecode", "onnxruntime"):
        assert result["rows"][key]["median_ms"] > 0 and result["rows"][key]["error"] <= 1
    ratio = result["rows"]["bytecode"]["median_ms"] / result["rows"]["ours"]["median_ms"]
    assert [check["found"] for check in report["checks"]] == [pytest.approx(ratio)] * 2


@pytest.mark.slow
def test_compile_times_are_those_of_kernels_that_differ() -> None:
    report = run("compile", "kernels:9", "--rounds", "1")
    (row,) = report["found"]
    assert (row["kernels"], row["regions"], row["commands"]) == (9, 1, 9)
    times = {key: row[key] for key in ("compile_with", "compile_without", "machine_with", "machine_without")}
    assert min(times.values()) > 0
    ratio = (row["compile_with"] + row["machine_with"]) / (row["compile_without"] + row["machine_without"])
    assert row["ratio"] == pytest.approx(ratio) == report["checks"][0]["found"]


@pytest.mark.slow
def test_memory_is_read_while_bindings_differ() -> None:
    report = run("memory", "--submissions", "500", "--kernels", "3")
    assert [row["bindings"] for row in report["found"]] == [64, 64, 64]
    assert [check["found"] for check in report["checks"]] == [row["grown_kb"] for row in report["found"]]


def test_growth_is_between_the_outer_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    from command_buffer_bench import growth as module

    pages: list[int] = []
    monkeypatch.setattr(module, "resident", lambda name: sum(pages))
    # 64 KB of each of the 160 submissions that are counted; between the middles of the outer quarters lie 120.
    assert module.growth(lambda index: pages.append(1 << 16), 200) == 120 * 64
    assert module.growth(lambda index: None, 200) == 0


@pytest.mark.timing
def test_a_leak_is_seen() -> None:
    from command_buffer_bench.growth import GROWTH_BAR, growth

    pages: list[mmap.mmap] = []

    def leak(_index: int) -> None:
        pages.append(mmap.mmap(-1, 1 << 16))  # fresh pages: no freed memory is reused
        pages[-1].write(b"x" * (1 << 16))

    assert growth(leak, 200) == pytest.approx(120 * 64, rel=0.1)
    assert growth(lambda index: None, 200) < GROWTH_BAR


@pytest.mark.parametrize("grows", [False, True])
def test_a_kernel_left_out_or_out_of_order_changes_the_result(grows: bool) -> None:
    from command_buffer_bench.chains import Chain, whole_numbers

    chain = Chain(12, distinct=12 if grows else 4, grows=grows)
    array = whole_numbers(3)
    expected = chain.result(array)
    assert expected.shape == ((28,) if grows else (16,)) and np.abs(expected).max() < 2**24
    functions = chain.module().functions
    assert len(functions) == (13 if grows else 5)
    for left_out in range(12):
        assert not np.array_equal(_without(array, chain.distinct, left_out), expected[:16])
    assert np.array_equal(_without(array, chain.distinct, None), expected[:16])


def _without(x: np.ndarray, distinct: int, left_out: int | None) -> np.ndarray:
    from command_buffer_bench.chains import step

    for index in range(12):
        add, negate = step(index % distinct)
        if index != left_out:
            x = add - x if negate else x + add
    return x


def test_a_wrong_contestant_gets_no_time() -> None:
    import tvm
    from command_buffer_bench.chains import Chain, whole_numbers
    from command_buffer_bench.elementwise import Contestant, WrongResult, check_result

    array, chain = whole_numbers(1), Chain(5)

    def contestant(kernels: int) -> Contestant:
        return Contestant(lambda: None, lambda: tvm.runtime.tensor(Chain(kernels).result(array)))

    check_result("right", chain, contestant(5), array)
    with pytest.raises(WrongResult, match="wrong, 5 kernels: found"):
        check_result("wrong", chain, contestant(4), array)


def test_models_whose_bits_differ_are_failures() -> None:
    from command_buffer_bench.model_report import model_checks, model_failures

    rows = {"ours": {"median_ms": 1.0}, "bytecode": {"median_ms": 1.5}, "onnxruntime": {"failure": "gone"}}
    result = {"model": "net", "threads": 2, "rows": rows, "equal": False}
    assert model_failures([result]) == [
        "net, 2 threads, onnxruntime: gone",
        "net, 2 threads: command buffers compute other bits than bytecode",
    ]
    one, mean = model_checks([result])
    assert one.found == pytest.approx(1.5) == mean.found and one.passed and mean.passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["elementwise", "--counts", "1,many"], "expected numbers, as in 1,2"),
        (["elementwise", "--counts", "0"], "expected numbers from 1 on"),
        (["models", "no_such_net"], "'no_such_net' is no file *.onnx and none of resnet50"),
        (["compile", "gone.onnx"], "no file gone.onnx"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: list[str], message: str) -> None:
    from click.testing import CliRunner
    from command_buffers import main

    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and message in done.output
