"""A user's program, which is read by type checkers and never run: what it states of types must hold."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import assert_type

import relax_hetero as rh
from relax_hetero import cluster, llm, transform


def compile_and_run(model: Path) -> None:
    mod = rh.from_onnx(str(model), vdevices=["llvm", rh.VDevice("llvm")], placement={"*": "llvm:0"})
    exe = rh.compile(mod, checks="strict", accuracy={"*": "fast"})
    assert_type(exe, rh.vm.Executable)
    exe.export_library("model.so")
    assert_type(rh.load("model.so"), rh.vm.Executable)
    vm = rh.vm.VirtualMachine(exe)
    vm["main"](np.ones((2, 3), "float32"))
    fence = vm.submit("main", np.ones((2, 3), "float32"))
    assert_type(fence, rh.vm.Fence)
    future: Future[Any] = fence
    future.result()


def passes() -> None:
    transform.FormRows()
    assert_type(transform.find_pass("FormRows"), transform.PassDeclaration)
    assert_type(transform.find_pass("FormRows").summary, str)


def language_model(path: str) -> None:
    model, tokenizer = llm.load(path)
    assert_type(model, llm.CompiledModel)
    engine: llm.Engine = llm.Engine(model, tokenizer)
    params = llm.SamplingParams(temperature=0.5)
    request = engine.submit("Hello", params)
    assert_type(request, llm.Request)


def clusters() -> type[cluster.Cluster]:
    return rh.cluster.Cluster


def errors(error: rh.HeteroError) -> str:
    if isinstance(error, (rh.BuildError, rh.PlacementError, rh.VDeviceError)):
        return f"{rh.__version__}: {error}"
    return ""
