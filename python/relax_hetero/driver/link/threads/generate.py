"""A program (`make workers`) that generates the LLVM IR of the worker threads from `workers.c`.

It needs the package ziglang, which contains clang for all targets, and nothing of this package.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("workers.c")
ARCHITECTURES = ("x86_64", "aarch64")
# Small code, because every compiling process compiles it again; readable names.
_FLAGS = (
    "-S -emit-llvm -Os -std=c11 -fPIC -g0 -fno-strict-aliasing -fno-sanitize=undefined -fno-stack-protector"
    " -fno-discard-value-names -Wall -Werror -Wno-unused-command-line-argument"
).split()
# Attributes of the module and of functions, which TVM's target sets, and unused metadata.
_PROPERTIES = re.compile(r"^(?:; ModuleID|; Function Attrs|source_filename|target |attributes #|!).*\n", re.MULTILINE)
_REFERENCES = re.compile(r" #\d+\b|, ![\w.]+ !\d+|\s+; preds = .*")


def ir_path(architecture: str) -> Path:
    """The file with the LLVM IR for Linux on an architecture."""
    return SOURCE.with_name(f"workers.{architecture}-linux.ll")


def header() -> str:
    """The first line of each file, with a hash of the source."""
    return f"; Made from workers.c by `make workers`, SHA-256 {hashlib.sha256(SOURCE.read_bytes()).hexdigest()}\n"


def generate(architecture: str, python: str = sys.executable) -> str:
    """Translate `workers.c` to LLVM IR for an architecture.

    `architecture`: a member of `ARCHITECTURES`; `python`: interpreter with the package ziglang.
    """
    command = [python, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu", *_FLAGS, str(SOURCE), "-o"]
    with tempfile.TemporaryDirectory() as folder:  # zig does not treat "-" as standard output
        output = Path(folder, "workers.ll")
        subprocess.run([*command, str(output)], check=True)
        text = output.read_text()
    body = _REFERENCES.sub("", _PROPERTIES.sub("", text))
    return header() + "\n" + re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


if __name__ == "__main__":
    for each in ARCHITECTURES:
        ir_path(each).write_text(generate(each))
