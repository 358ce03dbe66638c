"""The C of the worker threads: its LLVM IR is up to date, and ThreadSanitizer finds no race in it."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from relax_hetero.artifact.worker_threads import MAX_CPUS, MAX_THREADS
from relax_hetero.driver.link.threads.generate import ARCHITECTURES, SOURCE, generate, header, ir_path

HERE = Path(__file__).parent


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_llvm_ir_is_that_of_the_source(architecture):
    assert ir_path(architecture).read_text().startswith(header()), "run `make workers`"


@pytest.mark.skipif(find_spec("ziglang") is None, reason="no clang: make test DEV=dev-all")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_llvm_ir_is_what_the_compiler_makes(architecture):
    assert ir_path(architecture).read_text() == generate(architecture), "run `make workers`"


def test_limits_are_the_same_in_c_and_python():
    constants = dict(re.findall(r"#define (\w+) +(\w+)", SOURCE.read_text()))
    assert int(constants["MAX_THREADS"]) == MAX_THREADS
    assert constants["MAX_CPUS"] == "CPU_SETSIZE" and MAX_CPUS == 1024  # of Linux' C libraries


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_threads_under_load_have_no_race(tmp_path):
    program = tmp_path / "load"
    flags = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type", "-Wno-tsan", "-pthread"]
    source = HERE / "workers_under_load.c"
    command = ["gcc", *flags, "-fsanitize=thread", "-I", str(SOURCE.parent), str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "tsan" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("this gcc lacks ThreadSanitizer's library")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}  # a forked process begins threads of its own
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not support this kernel's randomized addresses (vm.mmap_rnd_bits)")
    assert done.returncode == 0, done.stderr[-8000:]
