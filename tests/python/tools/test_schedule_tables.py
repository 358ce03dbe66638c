"""Steps of functions as tables and JSON: where they run and what they wait for."""

from __future__ import annotations

import json

from relax_hetero.artifact.schedule import Schedule, Step
from relax_hetero.tools.schedule_tables import Schedules

MAIN = Schedule(
    "main",
    1,
    5,
    (
        Step(0, (0,), (1,), "main_step", calls=("main_commands",)),
        Step(1, (1,), (2,), source=0),
        Step(1, (2,), (3,), "main_step_1", also=(-1,)),
        Step(0, (1,), (4,), "main_step_2", calls=("exp", "tanh")),
    ),
    (3, 4),
)
ALONE = Schedule("other", 1, 2, (Step(1, (0,), (1,), "other"),), 1)


def test_a_row_for_each_step_of_functions_that_have_several(capsys):
    Schedules(["llvm:0", "c:0"], [MAIN, ALONE]).print()
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    assert rows == [
        ["0", "llvm:0", "main_commands", "-"],
        ["1", "c:0", "transfer from llvm:0", "0"],
        ["2", "c:0, host", "main_step_1", "1"],
        ["3", "llvm:0", "exp, tanh", "0"],
    ]
    assert "3 steps of work and 1 transfer; within one call some can overlap." in text
    assert "other" not in text


def test_json_is_the_steps():
    first, second = json.loads(json.dumps(Schedules(["llvm:0", "c:0"], [MAIN, ALONE]).to_json()))
    assert first.pop("overlaps") is True and second.pop("overlaps") is False
    assert [Schedule.from_json(data) for data in (first, second)] == [MAIN, ALONE]
