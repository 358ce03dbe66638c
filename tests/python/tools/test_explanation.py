"""A placement report, added up per device and printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_hetero.tools.explanation import FIELDS, Explanation


def entry(kind: str, variable: str, device: str, size: int | None) -> dict[str, Any]:
    values = ("main", variable, "relax.add", device, kind, size, f"because of [{variable}]")
    return dict(zip(FIELDS, values, strict=True))


EXPLANATION = Explanation(
    "model.onnx",
    {"llvm:0": '{"kind":"llvm"}', "cuda:0": '{"kind":"cuda","arch":"sm_90"}'},
    [
        entry("param", "x", "llvm:0", 8),
        entry("op", "a", "llvm:0", 16),
        entry("transfer", "a_cuda", "cuda:0", 16),
        entry("constant", "w", "cuda:0", 2048),
        entry("op", "b", "cuda:0", None),
        entry("op", "c", "cuda:0", 32),
    ],
)


def test_totals_add_up_per_device():
    cpu, gpu = EXPLANATION.totals()
    assert (cpu.name, cpu.ops, cpu.op_bytes, cpu.param_bytes, cpu.transfers_in) == ("llvm:0", 1, 16, 8, 0)
    assert (gpu.ops, gpu.op_bytes, gpu.constant_bytes, gpu.transfers_in, gpu.transfer_bytes) == (2, 32, 2048, 1, 16)
    assert gpu.unknown_bytes == 1


def test_a_device_outside_the_manifest_is_shown_too():
    explanation = Explanation("m", {"cuda:0": "{}"}, [entry("op", "shape", "host", 8)])
    assert [total.name for total in explanation.totals()] == ["cuda:0", "host"]


def test_every_op_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]):
    EXPLANATION.print(every_op=True)
    shown = capsys.readouterr().out
    for text in ("because of [a]", "because of [b]", "because of [a_cuda]", "2.0 KiB", "cuda sm_90"):
        assert text in shown
    assert "3 ops on 2 devices, 1 transfer of 16 B in all." in shown


def test_summary_leaves_the_ops_out(capsys: pytest.CaptureFixture[str]):
    EXPLANATION.print(every_op=False)
    shown = capsys.readouterr().out
    assert "because of [a_cuda]" in shown and "because of [b]" not in shown


def test_what_the_cost_model_expects_is_printed(capsys: pytest.CaptureFixture[str]):
    busy = {"llvm:0": 0.0012, "cuda:0": 0.0034567}
    for objective, words in (("latency", "one call takes 3.46 ms"), ("throughput", "time between calls 3.46 ms")):
        estimate = {"objective": objective, "seconds": 0.0034567, "busy_seconds": busy}
        replace(EXPLANATION, estimate=estimate).print(every_op=False)
        shown = " ".join(capsys.readouterr().out.split())
        assert f"Placed for {objective} by the cost model: {words}; " in shown
        assert "busy for one call: llvm:0 1.2 ms, cuda:0 3.46 ms." in shown


def test_json_holds_every_field():
    data = EXPLANATION.to_json()
    assert [device["name"] for device in data["devices"]] == ["llvm:0", "cuda:0"]
    assert [tuple(e) for e in data["entries"]] == [FIELDS] * 6
