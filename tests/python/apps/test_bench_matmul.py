"""The matmul benchmark: contestants compute right numbers, the report draws the right conclusions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[3] / "apps" / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCH / "matmul.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(kind: str = "f32", shape: str = "64x64x64", threads: int = 1, weight: bool = True, **speeds: float) -> Any:
    names = {"ours": "relax-hetero", "stock": "stock TVM"}
    rows = {names.get(name, name): {"median_gops": value, "fastest_gops": value} for name, value in speeds.items()}
    peak = rows.pop("peak", None)
    row = {"kind": kind, "shape": shape, "full_shape": shape, "threads": threads, "weight": weight, "rows": rows}
    return row if peak is None else {**row, "peak": peak}


@pytest.mark.slow
def test_every_type_against_numpy_at_two_thread_counts() -> None:
    rows = json.loads(
        run("--shapes", "9x20x17,2*3x4x5", "--rounds", "1", "--peers", "numpy,tvm", "--threads", "1,2", "--json")
    )
    configurations = {(row["kind"], row["shape"], row["threads"], row["weight"]) for row in rows}
    shapes = [("9x20x17", True), ("2*3x4x5", False)]
    kinds = ("f32", "u8s8", "s8s8", "bf16")
    assert configurations == {(kind, shape, n, weight) for kind in kinds for shape, weight in shapes for n in (1, 2)}
    for row in rows:
        ours = row["rows"]["relax-hetero"]
        assert "failure" not in ours and ours["error"] <= 1 and ours["median_gops"] > 0, row
        assert ("median_gops" in row["rows"]["numpy"]) == (row["kind"] == "f32")


@pytest.mark.slow
def test_no_weight_makes_both_operands_activations() -> None:
    options = ("--types", "f32", "--rounds", "1", "--peers", "numpy", "--threads", "1", "--json")
    (row,) = json.loads(run("--no-weight", "--shapes", "8", *options))
    assert row["weight"] is False and row["full_shape"] == "8x8x8"
    assert row["rows"]["relax-hetero"]["error"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "3x4"], "'3x4' is no shape"),
        (["--types", "f64"], "'f64' is none of f32, u8s8"),
        (["--peers", "mkl"], "'mkl' is none of tvm, numpy"),
        (["--threads", "two"], "expected numbers of threads"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: list[str], message: str) -> None:
    from click.testing import CliRunner
    from matmul import main

    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("kind", ["f32", "u8s8", "s8s8", "bf16"])
@pytest.mark.parametrize(("shape", "weight"), [("9x20x17", True), ("9x20x17", False), ("3*4x6x5", False)])
@pytest.mark.parametrize("name", ["numpy", "ONNX Runtime", "torch", "torch packed", "OpenVINO", "IREE", "stock TVM"])
def test_a_peer_computes_the_product_or_says_why_not(name: str, kind: str, shape: str, weight: bool) -> None:
    from peers import PEERS
    from peers.product import Product
    from peers.shape import Shape, Unsupported

    peer = next(peer for peer in PEERS if peer.name == name)
    if not peer.installed:
        pytest.skip(f"{peer.package} is not installed")
    product = Product(Shape.parse(shape), kind, weight, seed=5)
    try:
        contestant = peer.make(product, 1)
    except Unsupported as reason:
        assert str(reason)
        assert (name, kind) not in {("numpy", "f32"), ("ONNX Runtime", "f32"), ("OpenVINO", "f32"), ("torch", "f32")}
        return
    contestant.call()
    error = product.error(contestant.result())
    if (name, kind) == ("stock TVM", "bf16"):  # it accumulates in bfloat16, and the worker leaves it out
        assert error > 1
    else:
        assert error <= 1


@pytest.mark.parametrize("name", ["relax-hetero", "ONNX Runtime", "OpenVINO"])
def test_weights_of_four_bits_are_computed_in_float32(name: str) -> None:
    from peers import OURS, PEERS
    from peers.product import Product
    from peers.shape import Shape

    peer = next(peer for peer in (OURS, *PEERS) if peer.name == name)
    if not peer.installed:
        pytest.skip(f"{peer.package} is not installed")
    product = Product(Shape.parse("3x64x40"), "q4", True, seed=5)
    contestant = peer.make(product, 1)
    contestant.call()
    assert product.error(contestant.result()) <= 1


@pytest.mark.parametrize(("shape", "weight"), [("3x50x40", True), ("3x64x40", False), ("2*3x64x40", False)])
def test_peers_without_weights_of_four_bits_are_left_out(shape: str, weight: bool) -> None:
    from peers import OURS
    from peers.product import Product
    from peers.shape import Shape, Unsupported

    with pytest.raises(Unsupported, match="weights whose k is a multiple of 32"):
        OURS.make(Product(Shape.parse(shape), "q4", weight), 1)


def test_weights_of_four_bits_are_compared_with_our_own_float32() -> None:
    from bars import checks

    by_name = {
        check.what: check for check in checks([result(shape="1x64x64", ours=10.0), result("q4", "1x64x64", ours=29.0)])
    }
    check = by_name["q4, 1 thread: 1x64x64 over our f32"]
    assert check.found == pytest.approx(2.9) and not check.passed


def test_wrong_and_right_results_are_distinguished() -> None:
    from peers.product import BF16, Product
    from peers.shape import Shape

    for kind in ("f32", "u8s8", "s8s8", "bf16"):
        product = Product(Shape(5, 40, 7), kind, weight=True)
        right = product.reference.astype(product.result_dtype)
        assert product.error(right) <= 1
        wrong = right.copy()
        wrong[2, 3] += wrong.dtype.type(1)
        assert product.error(wrong) > 1
        assert product.error(right[:4]) > 1
    product = Product(Shape(5, 40, 7), "bf16", weight=True)
    assert product.error(np.full((5, 7), np.nan, BF16)) > 1


def test_shapes_are_read_and_counted() -> None:
    from peers.shape import Shape

    assert Shape.parse("256") == Shape(256, 256, 256)
    assert Shape.parse("12*128x64x128") == Shape(128, 64, 128, 12)
    assert str(Shape.parse("12*128x64x128")) == "12*128x64x128"
    assert Shape(2, 3, 5, 4).operations == 2 * 4 * 2 * 3 * 5
    for text in ("", "3x4", "axbxc", "3x4x5x6"):
        with pytest.raises(ValueError, match="no shape"):
            Shape.parse(text)


def test_ratios_are_to_the_best_peer_of_each_shape() -> None:
    from bars import best_peer, checks, ratio

    first = result(shape="8x64x64", ours=90.0, numpy=100.0, torch=80.0)
    second = result(shape="64x64x64", ours=160.0, numpy=90.0, torch=80.0)
    assert best_peer(first) == ("numpy", 100.0) and ratio(first) == pytest.approx(0.9)
    by_name = {check.what: check for check in checks([first, second])}
    mean = by_name["f32, 1 thread: geometric mean over the best peer"]
    assert mean.found == pytest.approx((0.9 * 160 / 90) ** 0.5) and mean.passed
    low = by_name["f32, 1 thread: 8x64x64"]  # below 0.94, and above 0.90 which is for M = 1
    assert low.bar == 0.94 and not low.passed


def test_bars_for_one_row_no_weights_stock_and_peak() -> None:
    from bars import LARGE, checks

    rows = [
        result(shape="1x64x64", ours=91.0, numpy=100.0),
        result(shape="7x64x64", weight=False, ours=94.0, numpy=100.0),
        result(shape=LARGE, ours=240.0, numpy=200.0, stock=3.0, peak=260.0),
    ]
    by_name = {check.what: check for check in checks(rows)}
    assert "f32, 1 thread: 1x64x64" not in by_name
    assert not by_name["f32, 1 thread: geometric mean without weights"].passed
    assert not by_name["f32, 1 thread: 7x64x64 without weights"].passed
    assert not by_name[f"f32, 1 thread: {LARGE} over stock TVM"].passed
    assert by_name[f"f32, 1 thread: {LARGE} over the peak"].found == pytest.approx(240 / 260)


def test_our_failure_is_a_missed_bar() -> None:
    from bars import checks

    failed = result(numpy=100.0)
    failed["rows"]["relax-hetero"] = {"failure": "HeteroError: no"}
    bars = checks([failed, result(shape="2x2x2", ours=300.0, numpy=100.0)])
    assert not bars[0].passed and any("64x64x64" in check.what and not check.passed for check in bars)


def test_markdown_has_every_number() -> None:
    from bars import markdown

    text = markdown([result(ours=123.4, numpy=87.6, peak=260.0)])
    assert "| 64x64x64 | 123 (123) | 87.6 (87.6) | – | 260 (260) | numpy | 1.409 |" in text
    assert "- reached: f32, 1 thread: geometric mean over the best peer: 1.409, at least 1.02" in text


def test_the_peak_loop_touches_registers_only() -> None:
    from peers.peak import peak
    from peers.shape import Unsupported

    for kind, mnemonic in (("f32", "vfmadd"), ("u8s8", "vpdpbusd"), ("bf16", "vdpbf16ps")):
        try:
            loop = peak(kind, 1)
        except Unsupported:
            continue
        lines = [line.split("#")[0] for line in loop.assembly.splitlines() if mnemonic in line]
        assert lines and len(lines) % 12 == 0, len(lines)  # the chains, perhaps unrolled
        assert not any("(" in line for line in lines), lines
        loop()


def test_turns_give_every_program_its_calls() -> None:
    from turns import take_turns

    counts = {"a": 0, "b": 0}

    def program(name: str) -> Any:
        def call() -> None:
            counts[name] += 1

        return call

    timings = take_turns({name: program(name) for name in counts}, rounds=3)
    assert all(timing.turns == 3 and len(timing.seconds) <= counts[name] for name, timing in timings.items())
    assert all(timing.fastest <= timing.median for timing in timings.values())


def test_a_process_is_quiet_when_it_uses_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import turns

    now, used = 0.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, used
        now += seconds
        used += seconds if now < busy_until else 0.0

    monkeypatch.setattr(turns.time, "sleep", sleep)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now)
    monkeypatch.setattr(turns.time, "process_time", lambda: used)
    busy_until = 0.1
    assert turns.wait_until_idle() and busy_until < now < busy_until + 0.01
    busy_until = 10.0
    assert not turns.wait_until_idle()
