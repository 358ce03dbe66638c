"""Type checkers know the public names: a correct program of a user passes, and each of its mistakes is found."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relax_hetero as rh
from relax_hetero import cluster, frontend, llm, transform

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).parent / "cases"
MISTAKES = CASES / "user_mistakes.py"
MYPY = "[mypy]\nstrict = True\nfollow_imports = silent\npython_version = 3.10\n"


def names_for_checkers(room) -> dict[str, object]:
    """The names that a room imports for checkers only, each with the object that it would be."""
    source = inspect.getsource(room)
    (block,) = re.findall(r"^if TYPE_CHECKING:.*\n((?: .*\n)+)", source, re.MULTILINE)
    found = {}
    for module, attribute, name in re.findall(r"from (\.[\w.]*) import (\w+) as (\w+)", block):
        package = importlib.import_module(module, room.__name__)
        # A module of a room may have the name of a function in it.
        found[name] = (
            importlib.import_module(f".{attribute}", package.__name__) if module == "." else getattr(package, attribute)
        )
    assert len(found) == len([line for line in block.splitlines() if line.strip()])
    return found


@pytest.mark.parametrize("room", [rh, llm, cluster, transform, frontend], ids=lambda room: room.__name__)
def test_checkers_see_the_names_that_exist(room):
    pytest.importorskip("ray") if room is cluster else None
    declared = names_for_checkers(room)
    assert sorted(declared) == sorted(room._EXPORTS)
    assert {name: getattr(room, name) for name in declared} == declared


def marked_lines() -> list[int]:
    """The lines of the file of mistakes that hold one."""
    lines = MISTAKES.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# error")]


@pytest.mark.slow
def test_mypy(tmp_path):
    """Its cache is kept beside that of `make lint`, as reading the whole package takes it some ten seconds."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = ["-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", ROOT / ".mypy_cache" / "user_types"]
    done = subprocess.run(
        [sys.executable, *command, *sorted(CASES.glob("*.py"))],
        env={**os.environ, "MYPYPATH": str(ROOT / "python")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"(\w+\.py):(\d+): error: ", done.stdout)
    assert found == [(MISTAKES.name, str(line)) for line in marked_lines()], done.stdout + done.stderr


@pytest.mark.slow
def test_pyright(tmp_path):
    """Slow where its program has to be downloaded first."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("needs pip's pyright")
    for case in CASES.glob("*.py"):
        shutil.copy(case, tmp_path)
    settings = {"extraPaths": [str(ROOT / "python")], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**settings, "pythonVersion": "3.10"}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--project", tmp_path, "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start here, as it needs node: {done.stderr[-300:]}")
    found = [
        (Path(problem["file"]).name, problem["range"]["start"]["line"] + 1)
        for problem in json.loads(done.stdout)["generalDiagnostics"]
        if problem["severity"] == "error"
    ]
    assert found == [(MISTAKES.name, line) for line in marked_lines()], done.stdout
