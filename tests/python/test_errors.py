"""Errors keep their class and message through TVM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
import tvm_ffi

from relax_hetero import errors
from relax_hetero.errors import HeteroError, PlacementError


@pytest.mark.parametrize("kind", [HeteroError, *HeteroError.__subclasses__()])
def test_class_survives_tvm_sequential(kind):
    @tvm.transform.module_pass(opt_level=0, name="Raise")
    def fail(_mod, _ctx):
        raise kind("op 'add': found 'a', expected 'b'")

    nested = tvm.transform.Sequential([tvm.transform.Sequential([fail])])
    with pytest.raises(kind) as error:
        nested(tvm.IRModule({}))
    assert type(error.value) is kind
    assert str(error.value) == "op 'add': found 'a', expected 'b'"


def test_later_subclass_survives_too():
    class OwnError(PlacementError):
        """A user's refinement."""

    def fail() -> None:
        raise OwnError("refined")

    with pytest.raises(OwnError, match="^refined$"):
        tvm_ffi.convert(fail)()


def test_errors_do_not_import_the_compiler():
    code = "import sys, relax_hetero.errors; assert 'tvm' not in sys.modules, 'the compiler was imported'"
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.fixture
def runtime_distribution(tmp_path, monkeypatch):
    """relax-hetero-runtime is installed, with the extra llm."""
    folder = tmp_path / "relax_hetero_runtime-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: relax-hetero-runtime\nProvides-Extra: llm\n")
    monkeypatch.syspath_prepend(tmp_path)
    errors.distribution_name.cache_clear()
    yield
    errors.distribution_name.cache_clear()


def test_a_hint_names_the_installed_distribution(runtime_distribution):
    assert errors.pip_install("llm") == "pip install 'relax-hetero-runtime[llm]'"
    whole = "pip uninstall relax-hetero-runtime && pip install 'relax-hetero[llm,cluster]'"
    assert errors.pip_install("llm,cluster") == whole


def test_a_hint_names_the_whole_library_without_the_run_time():
    assert errors.pip_install("llm,serve") == "pip install 'relax-hetero[llm,serve]'"
