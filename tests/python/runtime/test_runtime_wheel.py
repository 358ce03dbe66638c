"""The wheel relax-hetero-runtime runs files in an environment without TVM's compiler."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runtime.runtime_files import write_files

ROOT = Path(__file__).resolve().parents[3]
BUILD = runpy.run_path(str(ROOT / "release" / "runtime_wheel.py"))
LARGEST_WHEEL = 10 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return BUILD["build"](tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_run_time_and_no_compiler(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tvm/lib/libtvm_runtime.so", "relax_hetero/include/relax_hetero.hpp"} <= set(names)
    assert not any("libtvm_compiler" in name for name in names)
    assert any(name.endswith("licenses/tvm/LICENSE") for name in names) and len(names) == len(set(names))
    text = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "Requires-Dist: apache-tvm-ffi" in text and "Requires-Dist: apache-tvm=" not in text
    assert wheel.stat().st_size < LARGEST_WHEEL


@pytest.mark.slow  # pip installs the wheel and its dependencies
@pytest.mark.timeout(1200)
def test_the_run_time_tests_pass_without_the_compiler(wheel, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["RELAX_HETERO_RUNTIME_FILES"] = str(tmp_path)

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(word) for word in command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    write_files(tmp_path)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[llm,serve]", "pytest")
    shutil.copy(Path(__file__).with_name("test_run_time.py"), tmp_path)
    assert "passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_run_time.py")
    if shutil.which("g++"):
        options = run(tmp_path / "venv" / "bin" / "relax-hetero", "config", "--cflags", "--libs").split()
        assert all("apache_tvm" not in option and "libtvm_compiler" not in option for option in options)
        source = ROOT / "examples" / "cpp" / "run.cpp"
        run("g++", "-std=c++17", source, "-o", tmp_path / "run", *options)
        (tmp_path / "n.bin").write_bytes(b"")
        assert (
            "device llvm:1"
            in subprocess.run(
                [tmp_path / "run", tmp_path / "decoder.so", "0", tmp_path / "results"], capture_output=True, text=True
            ).stdout
        )
