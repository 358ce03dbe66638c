"""Tests lie where the code they test lies, and no text has marks of a merge."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "python" / "relax_hetero", ROOT / "tests" / "python"
# Tests outside of the package's folders: programs, emulated CPUs, whole models, machines with GPUs, their interpreter,
# and types.
OTHERS = {"apps", "arm", "fuzz", "gpu", "gpu_interpreter", "models", "runtime", "user_types"}


def folders_with_python(top: Path) -> Counter[Path]:
    """How many Python files each folder holds, those in folders below it not counted."""
    return Counter(file.parent for file in top.rglob("*.py"))


def test_tests_lie_where_the_code_lies():
    astray = [
        str(folder.relative_to(TESTS))
        for folder in folders_with_python(TESTS)
        if folder.relative_to(TESTS).parts[:1] not in {(), *((name,) for name in OTHERS)}
        and not (PACKAGE / folder.relative_to(TESTS)).is_dir()
    ]
    assert astray == []


def test_every_room_has_tests():
    rooms = {folder.relative_to(PACKAGE) for folder in folders_with_python(PACKAGE)}
    tested = {folder.relative_to(TESTS) for folder in folders_with_python(TESTS)}
    assert sorted(map(str, rooms - tested)) == []


def test_no_text_has_marks_of_a_merge():
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in "python", "tests", "apps", "examples", "docs", "release":
        files += [file for end in ("py", "md", "c", "h", "hpp") for file in (ROOT / folder).rglob(f"*.{end}")]
    marked = [str(file) for file in files if re.search(r"^(<{7}|>{7}) ", file.read_text("utf-8"), re.MULTILINE)]
    assert marked == []
