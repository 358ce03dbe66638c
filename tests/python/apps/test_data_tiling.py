"""The example of data tiling on two devices: right numbers, layouts of each device, a missing compiler, wrong use."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tvm.support.cc import get_cc

import relax_hetero as rh

APP = Path(__file__).resolve().parents[3] / "apps" / "data_tiling_two_devices" / "run.py"
AVX2 = json.dumps({"kind": "llvm", "mcpu": "x86-64-v3"})


@pytest.fixture(scope="module")
def main() -> click.Command:
    spec = importlib.util.spec_from_file_location("data_tiling_two_devices", APP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # TVMScript looks its source up there
    spec.loader.exec_module(module)
    return module.main


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(APP), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "240", **env})


@pytest.mark.skipif(get_cc() is None, reason="a c device needs a C compiler")
def test_the_document_s_product(main: click.Command):
    shown = CliRunner(env={"COLUMNS": "240"}).invoke(main, [], catch_exceptions=False).output
    assert "[[12. 12. 12. 12. 12.]\n [30. 30. 30. 30. 30.]]" in shown
    assert "The same as exact integer arithmetic: 2×3 times 3×5, on both devices, added." in shown
    # Encodings before, layouts after: row-major here, small tiles there, padded to whole tiles.
    assert "matmul[1]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=?, k=?>" in shown
    assert "pack<outer=[0, 1] inner=[0:8, 1:8]>" in shown and "(n + 7) // 8 * k * 32" in shown
    assert "on llvm:0: identity<2> to pack<outer=[0, 1] inner=[0:8, 1:8]>" in shown


def test_other_sizes_on_two_instruction_sets_with_the_ir(main: click.Command):
    arguments = ["--m", "33", "--k", "1", "--n", "130", "--vdevice", "llvm", "--vdevice", AVX2, "--ir"]
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    assert "33×1 times 1×130, on both devices, added." in shown
    for text in ("after SetEncoding", "after SpecializeEncodings", "R.hetero.set_encoding(", 'kernel="matmul_'):
        assert text in shown


def test_without_a_c_compiler_a_second_llvm_device_takes_over(tmp_path: Path):
    done = run(PATH=str(tmp_path), CXX="", CC="")
    assert done.returncode == 0, done.stderr
    assert "There is no C compiler here" in done.stdout and "llvm:1" in done.stdout
    assert "[[12. 12. 12. 12. 12.]" in done.stdout


def test_wrong_use_is_refused(main: click.Command):
    for arguments, message in (
        (["--vdevice", "llvm"], "two --vdevice are needed, found 1"),
        (["--m", "0"], "Invalid value for '--m'"),
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2 and message in done.stderr
    with pytest.raises(rh.HeteroError, match="not a target in JSON"):
        CliRunner().invoke(main, ["--vdevice", "llvm", "--vdevice", "{broken"], catch_exceptions=False)


def test_errors_are_one_line():
    done = run("--vdevice", "llvm", "--vdevice", "quantum")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and "'quantum'" in done.stderr
