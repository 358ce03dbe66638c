"""Set up .venv-arm: Debian's Python for AArch64, TVM's wheel for it and this library, run by qemu on any Linux machine.

    python tests/python/arm/environment.py        # needs qemu-user, mmdebstrap, g++-aarch64-linux-gnu; no root
    .venv-arm/bin/python -m pytest tests/python/tir/rows      # any test, under emulation: 10 to 15 times slower

``.venv-arm/root`` holds Debian's files and is not a chroot: qemu looks there before it looks at the machine's own, so
that emulated programs find their libraries, and start the machine's own compiler and linker.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / ".venv-arm"
PYTHON = FOLDER / "bin" / "python"
STAMP = FOLDER / ".stamp"

# Debian's release, its Python, and the platforms of wheels for its C library, 2.36.
SUITE, VERSION = "bookworm", "3.11"
PROGRAMS = {
    "qemu-aarch64": "qemu-user",
    "mmdebstrap": "mmdebstrap",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
}
PLATFORMS = [*(f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)), "manylinux2014_aarch64"]

# Requirements of `pip install '.[dev]'` that are left out, and why. Tests of what needs them are skipped.
LEFT_OUT = {
    "pyopencl": "no OpenCL device",
    "nvidia-cuda-nvrtc": "kernels of GPUs are compiled where their tests run: on x86",
    "nvidia-cuda-nvdisasm": "as above",
    "nvidia-cuda-runtime": "as above",
    "ray": "its daemons take minutes to start under emulation",
    "playwright": "drives a browser",
    "openai": "a client of the server over HTTP, in Python only",
    "ipykernel": "runs notebooks, in Python only",
    "jupytext": "as above",
    "nbclient": "as above",
    "import-linter": "a check of sources",
    "mypy": "a check of sources",
    "pyright": "a check of sources",
    "ruff": "a check of sources",
    "relax-hetero": "its extras are listed here, and its sources are on PYTHONPATH",
}
EXTRAS = ("demo", "llm", "serve", "dev")

# A CPU with all that qemu's "max" has: LLVM, and our check of CPU features, read Linux's list.
CPUINFO = """\
processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 \
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb dcpodp sve2 sveaes svebitperm svesha3 svesm4 flagm2 \
frint svei8mm svebf16 i8mm bf16 dgh bti
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 0

"""


def unsupported_reason() -> str:
    """Why programs for AArch64 cannot be run, and what to install; empty if they can."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        return f"to run programs for AArch64: apt install {' '.join(missing)}; then make {FOLDER.name}/.stamp"
    return "" if STAMP.exists() else f"to run programs for AArch64: make {FOLDER.name}/.stamp"


def requirements() -> list[str]:
    """The requirements of the library and of its tests that have a use here."""
    from packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    machine = {"platform_machine": "aarch64", "python_version": VERSION}
    return [
        text
        for text, requirement in ((text, Requirement(text)) for text in texts)
        if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate(machine))
    ]


def main() -> None:
    """Set up the folder anew."""
    if platform.system() != "Linux":
        sys.exit("expected Linux, whose programs qemu-aarch64 runs")
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        sys.exit(f"missing {', '.join(missing)}: apt install {' '.join(missing)}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    root, packages = FOLDER / "root", FOLDER / "lib" / f"python{VERSION}" / "site-packages"
    packages.mkdir(parents=True)
    PYTHON.parent.mkdir()
    debian = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64"]
    subprocess.run([*debian, f"--include=python{VERSION},libgomp1,libstdc++6", SUITE, str(root)], check=True)
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "cpuinfo").write_text(CPUINFO)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--target", str(packages)]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    binary = ["--only-binary=:all:", "--implementation", "cp", "--python-version", VERSION]
    subprocess.run([*pip, *platforms, *binary, *requirements()], check=True)
    interpreter = root / "usr" / "bin" / f"python{VERSION}"
    (FOLDER / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    # A script, so that emulated programs can start it too: only the machine's kernel can run a program of its own.
    PYTHON.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="${{PYTHONPATH:-{REPOSITORY}/python}}" CXX="${{CXX:-aarch64-linux-gnu-g++}}"\n'
        f'exec qemu-aarch64 -L "{root}" -0 "{PYTHON}" "{interpreter}" "$@"\n'
    )
    PYTHON.chmod(0o755)
    modules = "import numpy, onnx, tvm, relax_hetero"
    subprocess.run([str(PYTHON), "-c", modules], check=True, env={**os.environ, "QEMU_CPU": "max"})
    STAMP.touch()


if __name__ == "__main__":
    main()
