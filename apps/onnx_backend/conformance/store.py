"""Outcomes on disk, so that a run can be resumed: a JSON line per run of a case; a case's last line counts."""

from __future__ import annotations

import json
from pathlib import Path

from .outcome import Outcome


def path_of(folder: Path, configuration: str) -> Path:
    """The file of one configuration."""
    return folder / f"{configuration}.jsonl"


def read(folder: Path, configuration: str) -> dict[str, Outcome]:
    """Outcomes by case name; empty if there is no file. A last line cut short by a kill is dropped."""
    path = path_of(folder, configuration)
    outcomes: dict[str, Outcome] = {}
    if not path.exists():
        return outcomes
    for line in path.read_text().splitlines():
        try:
            outcome = Outcome(**json.loads(line))
        except json.JSONDecodeError:
            continue
        outcomes[outcome.name] = outcome
    return outcomes


def append(folder: Path, configuration: str, outcome: Outcome) -> None:
    """Add one outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    with path_of(folder, configuration).open("a") as file:
        file.write(json.dumps(outcome.to_json()) + "\n")
