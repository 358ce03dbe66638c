"""Runs attacks in child processes: a crash, a hang or a memory that grows is a finding, and not the end.

An *attack* is a function that takes a random generator and returns what happened (`Outcome`). A child process runs
attacks of one kind one after the other, each from its own seed, and says on a pipe which seed it begins and how it
ended. The parent notes what the child says, replaces a child that dies or stays silent, and goes on with the next seed.
`repeat` runs one seed again, in this process, so that a debugger sees it.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np

_say: Callable[[str], object] = len
"""Function by which a child reports to its parent; outside of a child it does nothing."""


@contextmanager
def reference() -> Iterator[None]:
    """Mark the block as the reference's work: a crash there is not a finding."""
    _say(json.dumps({"event": "reference"}))
    yield
    _say(json.dumps({"event": "ours"}))


Attack = Callable[[np.random.Generator], "Outcome"]

NOISE = 20000
"""Number of characters that are kept of a child's standard error."""

SILENCE_S = 90.0
"""A case that takes longer hangs. Models are small: the slowest legal ones take a few seconds on a busy machine."""

MEMORY_BYTES = 12 << 30
"""Address space of a child. TVM, LLVM and numpy reserve about 3 GiB of it before the first case."""

_THREADS = {"TVM_NUM_THREADS": "2", "TVM_BIND_THREADS": "0", "RELAX_HETERO_CACHE": "off"}

CASES_OF_A_CHILD = 400
"""A child is replaced after this many cases, so that what one leaks is not blamed on another."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes
    ----------
    kind : str
        "right" (the reference's result), "refused" (an error of this library), "declined" (an error where the reference
        has a result, which is allowed, but of interest), or a finding: "wrong" numbers, "foreign" (an error other
        than HeteroError), "accepted" (a result where the reference refuses).
    detail : str
        For a finding what to look at.
    counts : mapping of str to int
        Where the case was a batch, how many of it ended how.
    """

    kind: str
    detail: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


RIGHT, REFUSED = Outcome("right"), Outcome("refused")


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """A batch as one outcome: its first finding if it has one, and the counts of all."""
    counts = Counter(outcome.kind for outcome in outcomes)
    texts = [outcome for outcome in outcomes if outcome.detail]
    finding = next((one for one in texts if one.kind not in HARMLESS), texts[0] if texts else Outcome("batch"))
    return replace(finding, counts=counts)


HARMLESS = ("right", "refused", "declined", "skipped", "batch")


@dataclass
class Report:
    """Result of a run: cases tried by outcome, findings with their seeds, and harmless outcomes to be shown."""

    tried: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, int, str, str]] = field(default_factory=list)
    shown: Sequence[str] = ()

    def note(self, attack: str, seed: int, kind: str, detail: str, counts: Mapping[str, int] | None = None) -> None:
        """Count a case, or those of a batch."""
        for name, count in (counts or {kind: 0 if kind == "batch" else 1}).items():
            self.tried[f"{attack} {name}"] += count
        if kind not in HARMLESS or kind in self.shown:
            self.findings.append((attack, seed, kind, detail))

    @property
    def total(self) -> int:
        """Cases tried."""
        return sum(self.tried.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.tried.items()))
        lines = [f"{self.total} cases: {counts}"]
        lines += [
            f"--- {kind}: repeat with `{attack} {seed}`\n{detail}" for attack, seed, kind, detail in self.findings
        ]
        return "\n".join(lines)


def run(
    attack: str,
    seconds: float,
    seed: int,
    report: Report,
    environment: Mapping[str, str],
    most_findings: int = 20,
) -> int:
    """Attack for some seconds, from `seed` on, in processes with some variables; what happens is added to `report`.

    Returns
    -------
    int
        The next seed.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(report.findings) < most_findings:
        seed = _run_child(attack, seed, end, report, environment, CASES_OF_A_CHILD)
    return seed


def _run_child(
    attack: str, seed: int, end: float, report: Report, environment: Mapping[str, str], most_cases: int
) -> int:
    """Run cases in one child until it has run enough, dies, hangs or the time is over; returns the next seed."""
    script = str(Path(__file__).with_name("run.py"))
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", script, "--child", attack, str(seed), str(most_cases)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **_THREADS, **environment},
        start_new_session=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        under_way: int | None = None
        is_reference = False
        noise = ""
        begun = time.monotonic()
        while time.monotonic() < end:
            line, noise = _line(
                child.stdout, child.stderr, noise, max(0.0, SILENCE_S - (time.monotonic() - begun)), end
            )
            if line is None and time.monotonic() - begun < SILENCE_S:
                break  # the time of the run is over
            if line is None or not line:
                code = None if line is None else child.wait()
                if under_way is not None or code != 0:
                    kind = "hang" if code is None else f"crash {code}"
                    report.note(attack, seed, "skipped" if is_reference else kind, noise)
                    seed += 1
                break
            message = json.loads(line)
            begun = time.monotonic()
            is_reference = message["event"] == "reference"
            if message["event"] == "begin":
                under_way = seed = message["seed"]
                noise = ""
            elif message["event"] == "end":
                report.note(attack, message["seed"], message["kind"], message["detail"], message["counts"])
                under_way, seed = None, message["seed"] + 1
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    return seed


def _line(stdout: IO[bytes], stderr: IO[bytes], noise: str, patience: float, end: float) -> tuple[str | None, str]:
    """The child's next line ("" at its end, None if it stays silent), and the end of its standard error."""
    limit = min(time.monotonic() + patience, end)
    while True:
        ready, _, _ = select.select([stdout, stderr], [], [], max(0.0, min(1.0, limit - time.monotonic())))
        noise = (noise + _waiting(stderr))[-NOISE:]
        if stdout in ready:
            line = stdout.readline().decode()
            return line, noise if line else (noise + _waiting(stderr))[-NOISE:]
        if time.monotonic() >= limit:
            return None, noise


def _waiting(stream: IO[bytes]) -> str:
    """Text that can be read from a stream without waiting."""
    parts = []
    while select.select([stream], [], [], 0)[0]:
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def be_child(attack: Attack, seed: int, most_cases: int, limit_memory: bool) -> None:
    """In the child: run cases from `seed` on, and say so on the standard output."""
    # The output of models and TVM goes to the standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    global _say
    _say = functools.partial(print, file=out, flush=True)
    if limit_memory:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(seed, seed + most_cases):
        _say(json.dumps({"event": "begin", "seed": number}))
        outcome = tried(attack, number)
        _say(
            json.dumps(
                {
                    "event": "end",
                    "seed": number,
                    "kind": outcome.kind,
                    "detail": outcome.detail,
                    "counts": outcome.counts,
                }
            )
        )


def tried(attack: Attack, seed: int) -> Outcome:
    """One case. An error that the attack does not catch is a finding."""
    try:
        return attack(np.random.default_rng(seed))
    except Exception:
        return Outcome("foreign", traceback.format_exc()[-3000:])
