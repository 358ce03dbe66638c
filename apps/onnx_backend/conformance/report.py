"""The document about conformance, made from the outcomes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import onnx

from .cases import DRAWS, LOOSER
from .outcome import CRASHED, NOT_RUN, PASSED, RAISED, REFUSED, STATUSES, WRONG, Outcome

TITLES = {
    "a": "(a) stock `from_onnx` and `tvm.compile`, one CPU",
    "b": "(b) relax_hetero, one CPU device",
    "c": "(c) relax_hetero, two CPU devices",
    "d": "(d) relax_hetero, one NVIDIA GPU",
    "e": "(e) relax_hetero, a GPU and a CPU",
}
YARDSTICKS = {"b": "a", "c": "a", "d": "b", "e": "b"}
"""The configuration whose passed cases each one must pass, too: stock TVM, or one CPU device for GPUs."""
_EXPLAINED = {
    PASSED: "outputs have the expected types and shapes, and values within the case's tolerances",
    WRONG: "outputs differ",
    REFUSED: "a `HeteroError` names the unsupported feature",
    RAISED: "any other exception",
    NOT_RUN: "sequence or optional inputs or outputs, for which stock TVM's front end takes no values",
    CRASHED: "the process died, or ran out of time or memory",
}


OTHER_DEVICES = "## On other devices"
"""Heading of the part of the document that is written by hand, before its last line."""


def markdown(results: dict[str, dict[str, Outcome]], before: str = "") -> str:
    """Text of `docs/reference/conformance.md`.

    Parameters
    ----------
    results : dict
        Configuration letter to case name to outcome; configurations without outcomes are left out.
    before : str
        The document's text before, whose part about other devices stays.
    """
    results = {key: outcomes for key, outcomes in results.items() if outcomes}
    parts = [_head(results), _table(results), _promise(results), _comparison()]
    if "b" in results:
        parts.append(_refusals(results["b"]))
    if OTHER_DEVICES in before:
        parts.append(OTHER_DEVICES + before.partition(OTHER_DEVICES)[2].partition("**Next")[0])
    parts.append("**Next:** [performance](performance.md).\n")
    return "\n".join(parts)


def _head(results: dict[str, dict[str, Outcome]]) -> str:
    count = max(map(len, results.values()), default=0)
    gpu = "; in (e) between a GPU and a CPU" if "e" in results else ""
    return f"""# Conformance

This page shows the results of ONNX's own backend suite: {count:,} cases of the kinds node, simple and pytorch-\\*, \
as the `onnx` package {onnx.__version__} holds them.
In (c) the nodes of each model alternate between two CPU devices with different targets, \
and transfers are inserted{gpu}.
This command writes the page:

```
make conformance        # python apps/onnx_backend/run.py --write-docs
```
"""


def _table(results: dict[str, dict[str, Outcome]]) -> str:
    lines = ["| | " + " | ".join(STATUSES) + " |", "| --- |" + " ---: |" * len(STATUSES)]
    for key, outcomes in results.items():
        counts = Counter(outcome.status for outcome in outcomes.values())
        lines.append(f"| {TITLES[key]} | " + " | ".join(f"{counts[status]:,}" for status in STATUSES) + " |")
    lines += ["", *(f"- {status}: {meaning}" for status, meaning in _EXPLAINED.items()), ""]
    return "\n".join(lines)


def _promise(results: dict[str, dict[str, Outcome]]) -> str:
    lines = []
    for key, yardstick in YARDSTICKS.items():
        if key in results:
            passed = {name for name, outcome in results.get(yardstick, {}).items() if outcome.status == PASSED}
            lost = [name for name in passed if name in results[key] and results[key][name].status != PASSED]
            gained = sum(outcome.status == PASSED for name, outcome in results[key].items() if name not in passed)
            line = f"Of what ({yardstick}) passes, ({key}) loses {len(lost)}"
            lines.append(f"{line}; it passes {gained:,} that ({yardstick}) does not.")
    return "\n".join([*lines, ""])


def _comparison() -> str:
    """The rules of comparison that differ from the case's own."""
    lines = [
        "Values are compared as ONNX's own runner compares them, by the tolerances of each case, except for these:",
        "",
    ]
    for name, atol in LOOSER.items():
        lines.append(
            f"- `{name.removeprefix('test_')}*`: within {atol:g}, because the expected values are rounded to float32 "
            "and are further from the exact ones than the case allows."
        )
    lines.append(
        f"- `{DRAWS.removeprefix('test_')}*`: the expected values are random draws, so only type and shape are "
        "compared, and every value must be 0 or 1."
    )
    return "\n".join([*lines, ""])


def _refusals(outcomes: dict[str, Outcome]) -> str:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes.values():
        if outcome.status == REFUSED:
            groups[_reason(outcome)].append(outcome)
    lines = ["## Refused by (b)", "", "| why | cases | ops | for example |", "| --- | ---: | --- | --- |"]
    for why, refused in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        named = Counter(_op(outcome) for outcome in refused)
        ops = ", ".join(f"{op} ({count})" for op, count in sorted(named.items(), key=lambda each: (-each[1], each[0])))
        names = sorted(outcome.name.removeprefix("test_") for outcome in refused)
        lines.append(f"| {why} | {len(refused)} | {ops} | {', '.join(f'`{name}`' for name in names[:2])} |")
    return "\n".join([*lines, ""])


_REASONS = (
    (r"known at import|at import time|starts length", "shapes, axes or sizes that are inputs of the graph"),
    (r"STRING|string", "strings"),
    (
        r"8 bits|from (?:float8|float4|u?int[24])|to (?:float8|float4)|type u?int[24]|int[24],",
        "types below 8 bits, 8-bit floats",
    ),
    (r"is a (?:sequence|optional)|empty optional", "sequences or optionals as inputs, empty optionals as outputs"),
    (r"domain 'ai\.onnx\.", "ops of other domains (ml, training, preview)"),
    (r"have no |TVM cannot import|cannot be imported$", "ops without a converter"),
    (r"cannot be lowered|no kernel", "kernels that cannot be built"),
)


def _reason(outcome: Outcome) -> str:
    text = outcome.detail.splitlines()[0]
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            return reason
    return "other forms of an op"


def _op(outcome: Outcome) -> str:
    """The op that a refusal names, else the only op of the graph, else "several"."""
    text = outcome.detail.splitlines()[0]
    match = re.search(r"FrontendError: (\w+) node|: (\w+) of domain|node '[^']*' \((\w+)\)", text)
    if match is None:
        return outcome.ops[0] if len(outcome.ops) == 1 else "several"
    return next(name for name in match.groups() if name)
