"""The script that applies the map of renames, on a small package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "python/relax_hetero/__init__.py": "",
    "python/relax_hetero/doze.py": '''
        from dataclasses import dataclass, replace

        MOST = 3

        @dataclass
        class Doze:
            """Sleeps.

            Attributes
            ----------
            told : int
                A number, at most `MOST`.
            """

            told: int = MOST

            def longer(self) -> "Doze":
                return replace(self, told=self.told + 1)

        class Nap:
            told = 1

        def rest(doze: Doze, nap: Nap, most: int = MOST) -> str:
            MOST_ = [told for told in (doze.told, nap.told)]
            return f"{doze.told} of {most} {MOST_}"
        ''',
    "python/relax_hetero/use.py": """
        from .doze import MOST, Doze, Nap, rest
        from . import doze as module

        def text() -> str:
            told = Doze(told=1)
            return rest(told.longer(), Nap(), most=min(MOST, module.MOST))

        def clash(most: int) -> int:
            limit = most
            return limit
        """,
    "docs/page.md": "See `Doze` in doze.py, `relax_hetero/doze.py` and `relax_hetero.doze.rest`; `told` is a word.\n",
}
MAP = """kind,where,old,new
module,,doze,backoff
class,doze,Doze,Backoff
constant,doze,MOST,MAX_SECONDS
attribute,doze.Doze,told,seconds
parameter,doze.rest,most,limit
parameter,use.clash,most,limit
function,doze,gone,absent
"""


def indented(text: str) -> str:
    lines = text.strip("\n").split("\n")
    width = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[width:] for line in lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(indented(text))
    (tmp_path / "map.csv").write_text(MAP)
    subprocess.run("git init -q . && git add -A", shell=True, cwd=tmp_path, check=True)
    return tmp_path


def rename(folder: Path) -> str:
    command = [sys.executable, ROOT / "docs/tools/rename.py", "--root", folder, folder / "map.csv"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def texts(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for f in ("python", "docs") for p in (folder / f).rglob("*.*")}


def test_names_change_where_they_mean_the_same_and_a_second_run_changes_nothing(folder: Path) -> None:
    said = rename(folder)
    files = texts(folder)
    assert "collision: parameter use.clash.most -> limit" in said
    assert "python/relax_hetero/doze.py" not in files
    backoff, use = files["python/relax_hetero/backoff.py"], files["python/relax_hetero/use.py"]
    for line in (
        "MAX_SECONDS = 3",
        "class Backoff:",
        "    seconds : int",
        "A number, at most `MAX_SECONDS`.",
        "    seconds: int = MAX_SECONDS",
        "return replace(self, seconds=self.seconds + 1)",
        "    told = 1",
        "def rest(doze: Backoff, nap: Nap, limit: int = MAX_SECONDS) -> str:",
        "MOST_ = [told for told in (doze.seconds, nap.told)]",
        'return f"{doze.seconds} of {limit} {MOST_}"',
    ):
        assert line in backoff
    for line in (
        "from .backoff import MAX_SECONDS, Backoff, Nap, rest",
        "from . import backoff as module",
        "told = Backoff(seconds=1)",
        "rest(told.longer(), Nap(), limit=min(MAX_SECONDS, module.MAX_SECONDS))",
        "def clash(most: int) -> int:",
    ):
        assert line in use
    page = "See `Backoff` in doze.py, `relax_hetero/backoff.py` and `relax_hetero.backoff.rest`; `told` is a word.\n"
    assert files["docs/page.md"] == page
    rename(folder)
    assert texts(folder) == files
