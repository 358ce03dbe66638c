"""``Executable.explain`` prints what the command line prints, without the compiler."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

import relax_hetero as rh


def test_an_executable_explains_itself_as_the_command_line_does(invoke: Callable[..., Result], model: Path):
    compiled = rh.compile(rh.from_onnx(str(model)))
    library = model.with_suffix(".so")
    compiled.export_library(library)
    for sections in ((), ("all",), ("ops", "memory")):
        texts = []
        for executable in (compiled, rh.load(library)):
            executable.explain(*sections, file=(text := io.StringIO()))
            texts.append(text.getvalue())
        assert texts == [invoke("explain", library, *(sections or ("--summary",))).stdout] * 2 and texts[0]


def test_a_loaded_executable_explains_itself_on_standard_output(model: Path, capsys: pytest.CaptureFixture[str]):
    library = model.with_suffix(".so")
    rh.compile(rh.from_onnx(str(model))).export_library(library)
    loaded = rh.load(library)
    loaded.explain()
    assert "/lower/MatMul" in capsys.readouterr().out
    loaded.metadata = replace(loaded.metadata, placement=None)
    with pytest.raises(rh.HeteroError, match="holds no placement report"):
        loaded.explain()


def test_an_explanation_needs_no_compiler(model: Path):
    library = model.with_suffix(".so")
    compiled = rh.compile(rh.from_onnx(str(model)))
    compiled.export_library(library)
    compiled.explain("all", file=(text := io.StringIO()))
    code = f"import relax_hetero as rh; rh.load({str(library)!r}).explain('all')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TVM_USE_RUNTIME_LIB": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.getvalue()
