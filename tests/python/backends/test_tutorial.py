"""docs/tutorials/own_backend.md, followed in an empty folder: its files are written and its commands run, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "tutorials" / "own_backend.md"
BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"\n]*)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
MEASURES = "relax-hetero devices\n"
"""Beginning of the block that measures the devices."""


class Reader:
    """Someone who follows the page; their environment has this checkout and no network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, ""
        self.env = {**os.environ, "RELAX_HETERO_CACHE": str(folder / "cache"), "TVM_NUM_THREADS": "1"}
        self.env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "python", folder, folder / "installed")))

    def do(self, language: str, title: str | None, text: str) -> None:
        if title is not None:
            (self.folder / title).parent.mkdir(exist_ok=True)
            (self.folder / title).write_text(text)
        elif language == "sh":
            self.output = "".join(map(self.run, text.splitlines()))
        else:
            self.compare(text)

    def run(self, line: str) -> str:
        match line.split():
            case ["pip", "install", "--editable", "."]:
                self.install()
            case ["python", *words]:
                return self.python(*words)
            case ["relax-hetero", *words]:
                return self.python("-m", "relax_hetero", *words)
            case ["pip" | "mkdir" | "python3" | ".", *_]:
                pass  # the environment, which is made already
            case _:
                pytest.fail(f"a command that this test does not know: {line}")
        return ""

    def python(self, *words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self) -> None:
        """Write what pip writes, without asking a package index for setuptools."""
        project = (self.folder / "pyproject.toml").read_text()
        (name,) = re.findall(r'^name = "(.*)"$', project, re.MULTILINE)
        ((group, entry, value),) = re.findall(
            r'^\[project.entry-points."(.*)"\]\n(\w+) = "(.*)"$', project, re.MULTILINE
        )
        installed = self.folder / "installed" / f"{name}-1.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (installed / "entry_points.txt").write_text(f"[{group}]\n{entry} = {value}\n")

    def compare(self, expected: str) -> None:
        """Lines between lines of dots are part of the output; widths of columns depend on the computer."""
        lines, output = _lines(expected), _lines(self.output)
        if lines[0] == lines[-1] == "...":
            assert set(lines[1:-1]) <= set(output)
        else:
            assert output == lines


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def follow(folder: Path, measures: bool) -> str:
    """The last output of the page, up to the block that measures the devices or to the end."""
    blocks = [match.group("language", "title", "text") for match in BLOCK.finditer(PAGE.read_text())]
    (end,) = [number for number, (_, _, text) in enumerate(blocks) if text.startswith(MEASURES)]
    reader = Reader(folder)
    for block in blocks if measures else blocks[:end]:
        reader.do(*block)
    return reader.output


def test_a_back_end_from_nothing(tmp_path):
    assert "no device is faster: 47.1 us here" in follow(tmp_path, measures=False)


@pytest.mark.slow  # measures the devices
def test_a_back_end_from_nothing_measured(tmp_path):
    output = follow(tmp_path, measures=True)
    assert "ext_dev:0" in output and "auto, " in output
