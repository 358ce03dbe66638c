"""The document about conformance, made from the outcomes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from .outcome import CRASHED, NOT_RUN, PASSED, RAISED, REFUSED, STATUSES, WRONG, Outcome

TITLES = {
    "a": "(a) stock `from_onnx` and `tvm.compile`, one CPU",
    "b": "(b) relax_hetero, one CPU device",
    "c": "(c) relax_hetero, two CPU devices",
}
_EXPLAINED = {
    PASSED: "outputs have the expected types and shapes, and values within the case's tolerances",
    WRONG: "outputs differ",
    REFUSED: "a `HeteroError` says what is not supported",
    RAISED: "any other exception",
    NOT_RUN: "sequence or optional inputs or outputs, which stock TVM's front end takes no values for",
    CRASHED: "the process died, or ran out of time or memory",
}


def markdown(results: dict[str, dict[str, Outcome]]) -> str:
    """Text of `docs/conformance.md`.

    Parameters
    ----------
    results : dict
        Configuration letter to case name to outcome; configurations without outcomes are left out.
    """
    held = {key: outcomes for key, outcomes in results.items() if outcomes}
    parts = [_head(held), _table(held), _promise(held)]
    if "b" in held:
        parts.append(_refusals(held["b"]))
    return "\n".join(parts)


def _head(held: dict[str, dict[str, Outcome]]) -> str:
    count = max(map(len, held.values()), default=0)
    return f"""# Conformance

ONNX's own backend suite: {count:,} cases of the kinds node, simple and pytorch-\\*, as the `onnx` package holds
them. In (c) the nodes of each model are dealt out in turn to two CPU devices with different targets, and transfers
are inserted. Written by

```
make conformance        # python apps/onnx_backend/run.py --write-docs
```
"""


def _table(held: dict[str, dict[str, Outcome]]) -> str:
    lines = ["| | " + " | ".join(STATUSES) + " |", "| --- |" + " ---: |" * len(STATUSES)]
    for key, outcomes in held.items():
        counts = Counter(outcome.status for outcome in outcomes.values())
        lines.append(f"| {TITLES[key]} | " + " | ".join(f"{counts[status]:,}" for status in STATUSES) + " |")
    lines += ["", *(f"- {status}: {meaning}" for status, meaning in _EXPLAINED.items()), ""]
    return "\n".join(lines)


def _promise(held: dict[str, dict[str, Outcome]]) -> str:
    stock = {name for name, outcome in held.get("a", {}).items() if outcome.status == PASSED}
    lines = []
    for key in ("b", "c"):
        if key in held:
            lost = [name for name in stock if name in held[key] and held[key][name].status != PASSED]
            gained = sum(outcome.status == PASSED for name, outcome in held[key].items() if name not in stock)
            lines.append(f"Of what (a) passes, ({key}) loses {len(lost)}; it passes {gained:,} that (a) does not.")
    return "\n".join([*lines, ""])


def _refusals(outcomes: dict[str, Outcome]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes.values():
        if outcome.status == REFUSED:
            groups[_group(outcome)].append(outcome.name.removeprefix("test_"))
    lines = ["## What (b) refuses", "", "| why | cases | for example |", "| --- | ---: | --- |"]
    for why, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {why} | {len(names)} | {', '.join(f'`{name}`' for name in sorted(names)[:3])} |")
    return "\n".join([*lines, ""])


def _group(outcome: Outcome) -> str:
    """A refusal without the names of its case: op and kind of reason."""
    text = outcome.detail.splitlines()[0]
    if re.search(r"sequence|optional", text):
        return "sequence or optional values as inputs"
    if re.search(r"string", text):
        return "strings"
    if re.search(r"float8|float4|int4|int2|uint2|e8m0|e4m3|e5m2|e2m1|below 8 bits|4-bit|8 bits", text):
        return "types below 8 bits, and 8-bit floats"
    if re.search(r"domain", text):
        return "ops of other domains"
    ops = re.findall(r"\b([A-Z][A-Za-z0-9]+) \(|op type '?([A-Z][A-Za-z0-9]+)|\b([A-Z][A-Za-z0-9]+) node", text)
    names = sorted({name for match in ops for name in match if name})
    return f"op {', '.join(names)}" if names else f"graph of {', '.join(outcome.ops[:3])}"
