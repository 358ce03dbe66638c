"""Explanations: an overview and its sections."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from relax_hetero.artifact.commands import SingleCall
from relax_hetero.display.console import show
from relax_hetero.errors import BindingError
from relax_hetero.report.text.command_tables import CommandBuffers
from relax_hetero.report.text.explanation import FIELDS, Explanation


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


def shown_of(explanation: Explanation, *sections: str) -> str:
    text = io.StringIO()
    show(explanation.tables(*sections), text)
    return text.getvalue()


@pytest.mark.parametrize("sections", [(), ("all",), ("ops", "transfers")])
def test_every_op_is_printed_with_its_reason(sections: tuple[str, ...]):
    shown = shown_of(EXPLANATION, *sections)
    assert ("because of [a_cuda]" in shown) == bool(sections)
    for text in ("because of [a]", "because of [b]", "16 B"):
        assert text in shown
    assert "3 ops on 2 devices, 1 transfer of 16 B in all." in shown


def test_an_op_over_a_mesh_is_listed_once_with_its_devices():
    """Its parts on further devices are ``y@1``, ``y@2``; other values of one name, or on other devices, are rows."""
    placed = [("y", 0), ("y@1", 1), ("z@1", 1), ("z@3", 3), ("a", 0), ("a", 1), ("b", 0), ("b@1", 0), ("y@2", 2)]
    placed += [("c", 2), ("c@1", 3)]
    entries = [entry("op", name, f"cuda:{device}", 16) for name, device in placed]
    targets = {f"cuda:{device}": '{"kind":"cuda","arch":"sm_90"}' for device in range(4)}
    shown = shown_of(Explanation("m", targets, entries), "ops")
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [
        ["y", "relax.add", "each of cuda[0:3]"],
        ["z@1", "relax.add", "each of cuda:1, cuda:3"],
        *(["a", "relax.add", "cuda:0"], ["a", "relax.add", "cuda:1"]),
        *(["b", "relax.add", "cuda:0"], ["b@1", "relax.add", "cuda:0"]),
        ["c", "relax.add", "each of cuda[2:4]"],
    ]
    assert "11 ops on 4 devices" in shown


def test_all_is_every_section():
    shown = shown_of(EXPLANATION, "all")
    for text in ("because of [a]", "because of [b]", "because of [a_cuda]", "2.0 KiB", "cuda sm_90"):
        assert text in shown
    assert "3 ops on 2 devices, 1 transfer of 16 B in all." in shown


def test_devices_without_ops_are_named_with_a_reason():
    idle = replace(EXPLANATION, targets={**EXPLANATION.targets, "cuda:1": '{"kind":"cuda","arch":"sm_90"}'})
    assert "cuda:1 runs no op; for example, 'a' is on llvm:0: because of [a]." in shown_of(idle)
    assert "no op" not in shown_of(EXPLANATION) and "no op" not in shown_of(replace(idle, entries=[]))


def test_copies_between_devices_without_collectives_are_pointed_to():
    assert '"transfers" lists' in shown_of(EXPLANATION, "collectives")
    copies = [each for each in EXPLANATION.entries if each["kind"] != "transfer"]
    assert "lists" not in shown_of(replace(EXPLANATION, entries=copies), "collectives")


def test_an_overview_counts_ops_by_device_and_reason():
    rules = [{**entry("op", f"v{i}", "llvm:0", 4), "reason": "rule '*'"} for i in range(20)]
    many = replace(EXPLANATION, entries=[*rules, entry("op", "b", "cuda:0", None)])
    (first, second) = (line for line in shown_of(many).splitlines() if "add" in line)
    assert [cell.strip() for cell in first.strip("│").split("│")] == ["llvm:0", "20", "20 add", "rule '*'"]
    assert [cell.strip() for cell in second.strip("│").split("│")] == ["cuda:0", "1", "1 add", "because of [b]"]
    assert "v3" not in shown_of(many) and "v3" in shown_of(many, "ops")


def test_an_overview_stays_short():
    kinds = [{**entry("op", f"v{i}", "llvm:0", 4), "op": f"relax.nn.op{i}", "reason": "rule '*'"} for i in range(20)]
    shown = shown_of(replace(EXPLANATION, entries=kinds))
    assert "1 op4, 15 others" in shown and "op5" not in shown
    reasons = [entry("op", f"v{i}", "llvm:0", 4) for i in range(100)]
    shown = shown_of(replace(EXPLANATION, entries=reasons))
    assert "because of [v10]" in shown and "because of [v11]" not in shown and "and 89 more reasons" in shown


def test_an_overview_says_what_was_declined_and_why():
    encodings = {"ops": [], "transfers": [], "cancelled": [{"reason": "no layout of [x]", "device": "cuda:0"}]}
    fusions = {"dispatches": [], "missed": [{"reason": "an output"}] * 2}
    calls = [SingleCall("main", str(i), "add", "alone") for i in range(3)]
    explanation = replace(
        EXPLANATION, encodings=encodings, fusions=fusions, commands=CommandBuffers(["llvm:0"], [], {}, calls)
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown_of(explanation).splitlines()]
    declined = rows.index(["command buffer", "3", "alone"])
    assert rows[declined + 1 : declined + 3] == [["fusion", "2", "an output"], ["encoding", "1", "no layout of [x]"]]


def test_sections_that_are_not_there():
    with pytest.raises(BindingError, match="no section 'op'; it has 'ops', .*'all'; did you mean 'ops'"):
        shown_of(EXPLANATION, "op")
    assert shown_of(EXPLANATION, "memory") == "memory: nothing to show for this model.\n"


def test_expectations_of_the_cost_model_are_printed():
    busy = {"llvm:0": 0.0012, "cuda:0": 0.0034567}
    for objective, words in (("latency", "one call takes 3.46 ms"), ("throughput", "time between calls 3.46 ms")):
        more = {"assumed_sizes": {"batch": 64}, "figures": "measured"}
        estimate = {"objective": objective, "seconds": 0.0034567, "busy_seconds": busy, **more}
        shown = " ".join(shown_of(replace(EXPLANATION, estimate=estimate)).split())
        assert f"Placed for {objective} by the cost model: {words}; " in shown
        assert "busy for one call: llvm:0 1.2 ms, cuda:0 3.46 ms; figures: measured; " in shown
        assert "symbolic sizes assumed as batch = 64." in shown


def test_json_holds_every_field():
    data = EXPLANATION.to_json()
    assert [device["name"] for device in data["devices"]] == ["llvm:0", "cuda:0"]
    assert [tuple(e) for e in data["entries"]] == [FIELDS] * 6
