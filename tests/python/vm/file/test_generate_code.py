"""Machine code of an executable's modules: there when a machine is made, written by several threads."""

from __future__ import annotations

import threading

import pytest

from relax_hetero.vm.file import export
from relax_hetero.vm.file.export import generate_machine_code


class Module:
    """Members of a TVM module that are looked at."""

    def __init__(self, kind: str, names: list[str], imports: list[Module] | None = None, meet=lambda: None):
        self.kind, self.imports, self.asked = kind, imports or [], []
        self._names, self._meet = names, meet

    def __getitem__(self, name: str):
        assert name == "get_func_names"
        return lambda: self._names

    def get_function(self, name: str):
        self._meet()
        self.asked.append((name, threading.current_thread()))


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(export, "num_cores", lambda: 2)


def test_modules_of_llvm_are_asked_for_a_function_each_at_once():
    barrier = threading.Barrier(2, timeout=30)
    parts = [
        Module("llvm", ["__tvm_ffi_f", "__tvm_ffi_g"], meet=barrier.wait),
        Module("llvm", ["__tvm_ffi_h"], meet=barrier.wait),
    ]
    other, empty = Module("cuda", ["k"]), Module("llvm", [])
    generate_machine_code(Module("relax.VMExecutable", ["main"], [parts[0], other, empty, parts[1]]))
    assert [[name for name, _ in part.asked] for part in parts] == [["f"], ["h"]]
    assert parts[0].asked[0][1] is not parts[1].asked[0][1]
    assert not other.asked and not empty.asked


def test_one_module_is_left_to_the_machine():
    part = Module("llvm", ["f"])
    generate_machine_code(Module("relax.VMExecutable", ["main"], [part]))
    assert not part.asked
