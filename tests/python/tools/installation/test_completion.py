"""relax-hetero completion: scripts of shells, and what click answers them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import Result

import relax_hetero
from relax_hetero.tools.cli import cli
from relax_hetero.tools.installation import doctor
from relax_hetero.tools.installation.completion import PROGRAM

Invoke = Callable[..., Result]


def script_of(invoke: Invoke, shell: str, monkeypatch: pytest.MonkeyPatch) -> str:
    # click asks bash for its version, and warns of an old one.
    monkeypatch.setattr("click.shell_completion.BashComplete._check_version", lambda *_: None)
    result = invoke("completion", shell)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_asks_the_program(shell: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    script = script_of(invoke, shell, monkeypatch)
    assert f"_RELAX_HETERO_COMPLETE={shell}_complete" in script
    assert PROGRAM in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_script(shell: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(script_of(invoke, shell, monkeypatch))
    read = subprocess.run([program, "-n", str(script)], capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")


def test_other_shells_are_refused(invoke: Invoke):
    refused = invoke("completion", "tcsh")
    assert refused.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in refused.stderr


def completed(words: list[str], incomplete: str) -> list[str]:
    """Completions of an incomplete word after others."""
    completion_class = get_completion_class("bash")
    assert completion_class is not None
    items = completion_class(cli, {}, PROGRAM, "_RELAX_HETERO_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in items]


def test_commands_are_completed():
    assert completed([], "d") == ["devices", "doctor"]
    assert completed([], "comp") == ["compile", "completion"]
    assert completed(["completion"], "") == ["bash", "zsh", "fish"]


def test_options_are_completed():
    assert set(completed(["doctor"], "--")) == {"--self-test", "--no-self-test", "--json", "--debug", "--help"}


def test_devices_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / gpu).mkdir()
    monkeypatch.setattr(doctor, "_DRIVER_GPUS_FOLDER", tmp_path)
    assert completed(["compile", "model.onnx", "--vdevice"], "") == ["llvm", "cuda:0", "cuda:1"]
    assert completed(["compile", "model.onnx", "--vdevice"], "c") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(doctor, "_DRIVER_GPUS_FOLDER", tmp_path / "none")
    assert completed(["compile", "model.onnx", "--vdevice"], "") == ["llvm"]


def test_sections_are_completed():
    assert completed(["explain", "model.onnx"], "t") == ["transfers", "token"]


def test_the_program_answers_a_shell():
    """Request of the bash script: words in COMP_WORDS, the index of the incomplete one in COMP_CWORD."""
    variables = {"_RELAX_HETERO_COMPLETE": "bash_complete", "COMP_WORDS": "relax-hetero doc", "COMP_CWORD": "1"}
    package = str(Path(relax_hetero.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "relax_hetero"],
        env={**os.environ, **variables, "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "plain,doctor\n", done.stderr
