"""The kinds of attacks, by name."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .harness import Attack


def _marked_memory() -> dict[str, str]:
    # The C library fills memory that is freed or not yet written, so that reading it shows.
    return {"MALLOC_PERTURB_": "165"}


@functools.cache
def sanitizer() -> dict[str, str]:
    """Environment that runs a Python process and its compiled C++ code under AddressSanitizer; empty without gcc.

    Code for ``c`` devices is compiled with the sanitizer's checks. All of TVM gets its memory from the sanitizer, which
    also checks what the C library copies.
    """
    if shutil.which("g++") is None:
        return {}
    names = ("libasan.so", "libstdc++.so")
    paths = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(os.path.isabs(path) for path in paths):
        return {}
    folder = Path(tempfile.mkdtemp(prefix="relax_hetero_sanitizer_"))
    compiler = folder / "g++"
    compiler.write_text(
        f'#!/bin/sh\nexec {shutil.which("g++")} -fsanitize=address -fno-omit-frame-pointer -O1 -g "$@"\n'
    )
    compiler.chmod(0o755)
    return {
        "CXX": str(compiler),
        "LD_PRELOAD": ":".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
    }


@dataclass(frozen=True)
class Kind:
    """A kind of attack.

    Attributes
    ----------
    module : str
        The module of this folder that defines it.
    function : str
        Its function there.
    environment : callable
        Variables of the child processes; none at all where the kind cannot run.
    limit_memory : bool
        Whether children may take some memory only.
    quick : bool
        Whether the few seconds of `make test` have some of this kind.
    """

    module: str
    function: str = "attack"
    environment: Callable[[], Mapping[str, str]] = _marked_memory
    limit_memory: bool = True
    quick: bool = True

    def load(self) -> Attack:
        """The attack; its module is imported now, because each child runs one kind only."""
        attack: Attack = getattr(importlib.import_module(f"fuzz.{self.module}"), self.function)
        return attack


KINDS = {
    "graphs": Kind("onnx_graphs"),
    "sizes": Kind("call_sizes"),
    "arguments": Kind("argument_attacks"),
    "models": Kind("damaged_files", "attack_models"),
    "containers": Kind("damaged_files", "attack_containers"),
    "gguf": Kind("language_models", "attack_gguf"),
    "folders": Kind("language_models", "attack_folders", quick=False),
    "forms": Kind("language_models", "attack_forms"),
    "sanitized": Kind("onnx_graphs", "attack_sanitized", sanitizer, limit_memory=False, quick=False),
}
"""Kinds of attacks that `make fuzz` runs."""

KNOWN = {"known": Kind("known_endings")}
"""Attack for the tests of the harness."""


def kind_of(name: str) -> Kind:
    """A kind by its name."""
    return (KINDS | KNOWN)[name]


def possible(names: list[str]) -> list[str]:
    """Given kinds that can run on this machine."""
    return [name for name in names if kind_of(name).environment()]
