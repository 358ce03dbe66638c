"""The wheel works where nothing else is installed, with each Python that the library supports and this machine has."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import onnx.parser
import pytest

import relax_hetero as rh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    toy (float[4, 8] x) => (float[4, 8] y) { r = Relu(x) y = Add(r, x) }"""
PROGRAM = """
import numpy as np
import relax_hetero as rh

mod = rh.from_onnx("toy.onnx", vdevices=["llvm", "llvm"], placement={"Add": "llvm:1"})
machine = rh.vm.VirtualMachine(rh.compile(mod))
x = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
np.testing.assert_allclose(machine["main"](x).numpy(), np.maximum(x, 0) + x)
print(rh.__file__)
"""


def run(*words, cwd, **settings):
    """Standard output of a command that knows nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env={**environment, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def interpreter(version):
    """A Python of this version that can make environments: on PATH, or one that pyenv keeps; skips without."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [*os.get_exec_path(), *(str(folder / "bin") for folder in sorted(pyenv.glob(f"{version}.*")))]
    for folder in folders:
        path = shutil.which(f"python{version}", path=folder)
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"Python {version} is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "python", copy / "python", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_all_files_of_the_package(wheel):
    package = ROOT / "python"
    files = {str(path.relative_to(package)) for path in package.glob("relax_hetero/**/*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_in_an_empty_environment(version, wheel, tmp_path):
    settings = {"RELAX_HETERO_CACHE": str(tmp_path / "cache")}
    run(interpreter(version), "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    onnx.save(onnx.parser.parse_model(MODEL), str(tmp_path / "toy.onnx"))

    shown = run(programs / "relax-hetero", "--version", cwd=tmp_path).splitlines()
    assert shown[0] == f"relax-hetero {rh.__version__}"
    assert shown[-1].startswith(f"Python {version}.")
    report = json.loads(run(programs / "relax-hetero", "doctor", "--json", cwd=tmp_path, **settings))
    assert report["ok"]
    assert [f["about"] for f in report["findings"] if f["section"] == "packages" and f["state"] != "ok"] == []
    assert "Add" in run(programs / "relax-hetero", "check", "toy.onnx", cwd=tmp_path, **settings)
    # A report takes files that are not Python.
    run(programs / "relax-hetero", "explain", "toy.onnx", "--html", "toy.html", cwd=tmp_path, **settings)
    assert "</html>" in (tmp_path / "toy.html").read_text()
    (tmp_path / "toy.py").write_text(PROGRAM)
    assert run(programs / "python", "toy.py", cwd=tmp_path, **settings).startswith(str(tmp_path / "venv"))


def test_the_script_installs_the_checkout_in_an_empty_environment(tmp_path):
    """The steps of the image, from a copy of the committed files."""
    archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "checkout", filter="data")
    settings = {"RELAX_HETERO_CACHE": str(tmp_path / "cache"), "PYTHON": sys.executable}
    shown = run(tmp_path / "checkout/release/install.sh", tmp_path / "venv", "compiler", cwd=tmp_path, **settings)
    assert "Everything required works." in shown
    onnx.save(onnx.parser.parse_model(MODEL), str(tmp_path / "toy.onnx"))
    # Without a C compiler on PATH, the one of the extra links.
    words = ("relax-hetero", "compile", "toy.onnx", "-o", "toy.so")
    run(tmp_path / "venv/bin" / words[0], *words[1:], cwd=tmp_path, PATH="/nowhere", CXX="", CC="", HOME=str(tmp_path))
    run(tmp_path / "venv/bin" / words[0], "explain", "toy.so", "--html", "toy.html", cwd=tmp_path)
    assert "</html>" in (tmp_path / "toy.html").read_text()


def test_type_checkers_read_the_wheel(wheel, tmp_path):
    """Without the sources at hand: the wheel says that it is typed."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (tmp_path / "user.py").write_text("import relax_hetero as rh\n\nrh.compile\nrh.compil\n")
    checked = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", "cache", "user.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(checked, cwd=tmp_path, env=environment, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if line.startswith("user.py") and "error" in line]
    assert len(errors) == 1 and errors[0].startswith("user.py:4: ") and '"compil"' in errors[0], done.stdout[-2000:]
