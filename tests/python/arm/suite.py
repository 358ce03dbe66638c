"""Run the tests for AArch64 on any Linux machine; `make test-arm` is this file.

    python tests/python/arm/suite.py [arguments of pytest]

First those of this folder, slow ones included: products and whole models on CPUs with few and with many instructions.
Then the tests of kernels run as they do on x86: kernels are compiled by this machine, and called on the emulated CPU.
Last, tests of `PROGRAMS` run with TVM's wheel for AArch64, compiler included, which is 10 to 15 times slower. Any other
test runs there too: ``.venv-arm/bin/python -m pytest tests/python/llm``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arm.environment import PYTHON, REPOSITORY, unsupported_reason  # noqa: E402

TESTS = "tests/python"

KERNELS = ["tir", "driver/link/test_lower_vector_math.py", "transform/dispatch/test_tied_operands.py"]
"""Tests of kernels that are compiled for a named CPU, and called without a virtual machine."""

PROGRAMS = [
    "driver/test_aarch64.py",
    "target",
    "vm/args",
    "vm/device/test_cpu_features.py",
    "tir/attention/cached/test_cached_layers.py",
]
"""Tests that run within the emulated Python."""

# Tests that `KERNELS` leaves out, and why.
LEFT_OUT = {
    "tir/cuda": "kernels of GPUs",
    "tir/commands": "command lists of GPUs",
    "tir/attention/cached": "whole models, which a test runs in its own process: among PROGRAMS",
    "tir/test_assembly.py": "reads assembly of x86; that of AArch64 is read in arm/test_inner_loops.py",
    "tir/matmul/test_amx.py": "Intel AMX",
    "tir/matmul/test_amx_blocks.py": "Intel AMX",
    "tir/attention/test_amx_attention.py": "Intel AMX",
    "tir/conv/test_amx_conv.py": "Intel AMX",
}


def main() -> None:
    """Run all parts; the exit status is that of the first part that fails."""
    reason = unsupported_reason()
    if reason:
        sys.exit(reason)
    from arm.emulated_cpu import VARIABLE

    variables = {**os.environ, "QEMU_CPU": "max", "TVM_NUM_THREADS": os.environ.get("TVM_NUM_THREADS", "2")}
    pytest = ["-m", "pytest", "-q", "--timeout", "3000", *sys.argv[1:]]
    left_out = [word for path in LEFT_OUT for word in ("--ignore", f"{TESTS}/{path}")]
    parts = [
        ([sys.executable, *pytest, "-m", "not timing", f"{TESTS}/arm"], {}),
        ([sys.executable, *pytest, *left_out, *(f"{TESTS}/{path}" for path in KERNELS)], {VARIABLE: "max"}),
        ([str(PYTHON), *pytest, *(f"{TESTS}/{path}" for path in PROGRAMS)], {}),
    ]
    for command, more in parts:
        status = subprocess.run(command, cwd=REPOSITORY, env={**variables, **more}).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
