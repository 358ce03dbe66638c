"""The module of systems on this one, and as the package sees macOS and Windows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hetero import system

ROOT = Path(__file__).resolve().parents[2]

# In a fork for each system, all modules of the package are imported where the system has another name, and lacks what
# only Linux or Unix has. Then a model is compiled and run by two devices, exported, loaded, and found in the compile
# cache. TVM, other packages and the linker stay those of this system.
PROGRAM = """
import os, sys, pkgutil, importlib, pathlib, shutil

import asyncio, concurrent.futures, multiprocessing, numpy as np, onnx.parser, rich.console, subprocess, tempfile, uuid
import ray, fastapi, uvicorn, gguf, jinja2, tokenizers, huggingface_hub, sentencepiece, llguidance
import tvm.relax, tvm.s_tir, tvm.script.relax, tvm.support.cc

folder, *names = sys.argv[1:]
for name in names:
    child = os.fork()
    if child == 0:
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
else:
    print("done")
    sys.exit()

folder = os.environ["RELAX_HETERO_CACHE"] = os.path.join(folder, name)
os.mkdir(folder)
compiler = shutil.which("g++") or shutil.which("cc")
shutil.which = lambda program: compiler if program == compiler else None  # of Linux, whatever the name of the system
sys.platform = name
hidden = ["sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"]
if name == "win32":
    hidden += ["O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_DIRECTORY", "pread", "geteuid", "sysconf"]
    hidden += ["register_at_fork", "fork"]
    os.supports_dir_fd, shutil._use_fd_functions, shutil._rmtree_impl = set(), False, shutil._rmtree_unsafe
    for module in ("fcntl", "resource"):
        sys.modules[module] = None
for attribute in hidden:
    delattr(os, attribute)

import relax_hetero as rh
from relax_hetero import system

system._OPEN_FILES = system._CPUINFO = system._MEMINFO = pathlib.Path("/nowhere")
system._windows_memory = lambda: (8 << 30, 4 << 30)
assert name == "darwin" or not system.HAS_PROCESS_LIMITS
for module in pkgutil.walk_packages(rh.__path__, "relax_hetero."):
    if not module.name.endswith(("__main__", "threads.generate")):
        importlib.import_module(module.name)

export = importlib.import_module("relax_hetero.vm.file.export")
vars(export).update(IS_WINDOWS=False, LINK_OPTIONS=("-shared",), find_compiler=lambda: [compiler])  # of Linux
text = '<ir_version: 8, opset_import: ["" : 17]> m (float[4, 8] x) => (float[4, 8] y) { r = Relu(x) y = Add(r, x) }'
model = onnx.parser.parse_model(text)
mod = rh.from_onnx(model, vdevices=["llvm", "llvm"], placement={"Add": "llvm:1"})
x = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)


def check(executable):
    machine = rh.vm.VirtualMachine(executable)
    for result in (machine["main"](x), machine.submit("main", x).result()):
        np.testing.assert_allclose(result.numpy(), np.maximum(x, 0) + x)


executable = rh.compile(mod, cache=True)
check(executable)
use = rh.compile(mod, cache=True).metadata.cache
assert use.state == "hit", (executable.metadata.cache, use)
library = os.path.join(folder, "library.so")
executable.export_library(library)
check(rh.load(library))
check(rh.load(library, copy=True))
check(rh.load(library))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="imitates other systems on Linux")
def test_the_package_runs_without_what_only_linux_has(tmp_path):
    settings = {"PYTHONPATH": str(ROOT / "python"), "TVM_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "darwin", "win32"]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


def test_a_folder_finds_its_files_after_its_path_was_replaced(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_bytes(b"old")
    with system.OpenFolder(tmp_path / "old") as folder:
        (tmp_path / "old").rename(tmp_path / "moved")
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "a").write_bytes(b"new file")
        assert folder.regular_status("a").st_size == 3 and folder.files("[ab]") == ["a"]
        folder.rename("a", "b")
        folder.remove("a")  # there is none
    assert sorted(os.listdir(tmp_path / "moved")) == ["b"] and os.listdir(tmp_path / "old") == ["a"]


def test_a_copy_in_memory_does_not_change(tmp_path):
    (tmp_path / "file").write_bytes(b"before")
    with open(tmp_path / "file", "rb") as file:
        descriptor = system.copy_to_memory(file)
    try:
        (tmp_path / "file").write_bytes(b"after!")
        assert system.map_privately(descriptor)[:] == b"before"
        path = system.path_of_open_file(descriptor)
        assert path is None or Path(path).read_bytes() == b"before"
    finally:
        os.close(descriptor)


def test_memory_and_processors_are_known():
    free = system.free_memory()  # macOS does not tell
    assert free is None or 0 < free <= system.installed_memory()
    assert system.allowed_cpus() and system.processor_name()
    assert system.has_symbol("exp") and not system.has_symbol("relax_hetero_has_no_such_function")
