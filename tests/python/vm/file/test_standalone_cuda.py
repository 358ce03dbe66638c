"""Command buffers of a GPU without Python and without a GPU: a program in C plays the driver and the device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hetero.artifact.graph_layout import CACHED_GRAPHS, REPORT_INTERVAL, RING_ROWS, Layout
from relax_hetero.target.c_options import compile_options
from relax_hetero.vm.file import standalone

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc on Linux")


def test_command_buffers_mailboxes_and_reports(tmp_path):
    """Each result is right whenever the device runs, also when graphs are dropped or cannot be captured."""
    assert (CACHED_GRAPHS, RING_ROWS, REPORT_INTERVAL) == (8, 16, 4)  # of the program
    assert (Layout(2, 1).ring, Layout(2, 1).state_words, Layout(2, 1).constants) == (19 + 16, 19 + 16 + 32, 5)
    program = tmp_path / "program"
    warnings = [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
    ]
    sanitizers = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    options = [*warnings, *sanitizers, *standalone._definitions(), f"-I{standalone._SOURCE.parent}", *compile_options()]
    source = str(Path(__file__).with_name("fake_gpu.c"))
    command = ["gcc", "-std=gnu11", "-rdynamic", *options, source, "-o", str(program), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], env={"ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
