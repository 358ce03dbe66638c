"""The option ``--isa``: this library compiled for older instructions of this CPU, and peers held to the same.

`HELD` has the environment that holds libraries: oneDNN's in OpenVINO and torch, and ATen's and MKL's in torch. MKL
takes AVX2 on other vendors' CPUs, unless its results are to be the same on all CPUs. ONNX Runtime asks the CPU itself
and cannot be held: it is timed, and left out of ratios. llama.cpp's instructions are chosen when it is compiled;
README.md has the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

NEWER_LLAMA_CPP = {"sse4": ("AVX",), "avx2": ("AVX_VNNI", "AVX512"), "avx-vnni": ("AVX512",)}
"""Beginnings of names in llama.cpp's list of its instructions that it must not have."""

HELD: dict[str, dict[str, str]] = {
    "": {},
    "sse4": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx-vnni": {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""Environment of a process by instructions, as `rh.native` names them."""


def check_llama_cpp(instructions: str, isa: str) -> None:
    """Exit if llama.cpp was compiled for newer instructions, from its list ``NAME = 1 | ...``."""
    pairs = (each.rpartition(":")[2].split("=") for each in instructions.split("|") if "=" in each)
    names = [name.strip() for name, value in pairs if value.strip() == "1"]
    if isa and (newer := [name for name in names if name.startswith(NEWER_LLAMA_CPP[isa])]):
        raise SystemExit(
            f"llama.cpp has {', '.join(newer)}, which --isa {isa} excludes: compile it as README.md says, and set "
            "LLAMA_CPP_LIB_PATH to its folder"
        )


def isa_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option as a decorator; the command gets ``isa``, empty for all instructions of this CPU."""
    names = [name for name in HELD if name]
    return click.option(
        "--isa", default="", type=click.Choice(["", *names]), help=f"Newest instructions: {', '.join(names)}."
    )(command)
