"""Type checkers know the public names: a correct program of a user passes, and each of its mistakes is found."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize("package", [rh, llm, cluster, transform, frontend], ids=lambda package: package.__name__)
def test_names_that_checkers_see_exist(package):
    """Checkers and the package read the same stub: a name without a module would fail on first use only."""
    pytest.importorskip("ray") if package is cluster else None
    stub = Path(package.__file__).with_suffix(".pyi").read_text()
    names = re.findall(r"^from \S+ import (\w+) as \1$", stub, re.MULTILINE)
    assert sorted(names) == sorted(package.__all__) == sorted(dir(package))
    for name in names:
        getattr(package, name)


def marked_lines() -> list[int]:
    """The lines of the file of mistakes that hold one."""
    lines = MISTAKES.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# error")]


@pytest.mark.slow
def test_mypy(tmp_path):
    """Mypy's cache is kept next to that of `make lint`, as reading the whole package takes some ten seconds."""
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
    errors = re.findall(r"(\w+\.py):(\d+): error: ", done.stdout)
    assert errors == [(MISTAKES.name, str(line)) for line in marked_lines()], done.stdout + done.stderr


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
    errors = [
        (Path(problem["file"]).name, problem["range"]["start"]["line"] + 1)
        for problem in json.loads(done.stdout)["generalDiagnostics"]
        if problem["severity"] == "error"
    ]
    assert errors == [(MISTAKES.name, line) for line in marked_lines()], done.stdout
