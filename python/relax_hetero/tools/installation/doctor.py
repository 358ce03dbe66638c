"""``relax-hetero doctor``: what is installed, which devices there are, whether they work, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...artifact.cache_folder import CacheFolder, folder_of
from ...artifact.regular_files import why_foreign
from ...display.console import console, print_json, print_table
from ...display.text import bytes_text, plural
from ...errors import HeteroError
from ..command import command, json_option
from .packages import Finding, State, broken, extra_findings, package_findings, versions

# Description of GPUs by the operating system, without TVM and at once.

_GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_system() -> int:
    """How many NVIDIA GPUs the system's driver knows, whatever TVM can do with them."""
    try:
        return len(list(_GPUS.iterdir()))
    except OSError:
        return 0


def device_texts(suffix: str = "") -> list[str]:
    """The devices of this machine as ``--vdevice`` takes them; the CPU's name has `suffix`."""
    return [f"llvm{suffix}", *(f"cuda:{index}" for index in range(gpus_of_system()))]


def driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


# Description of this machine that a process of its own finds out.

SECONDS = 120.0
"""How long the process may take, which needs about five seconds; a busy machine needs more."""

_SELF_TEST = "relax_hetero.tools.installation.self_test"
_CUDA = "pip install 'relax-hetero[cuda]'"


def probe_findings(
    command: list[str] | None = None, seconds: float = SECONDS
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Devices, tools and the self-test; and the devices as data.

    Parameters
    ----------
    command : list of str, optional
        The process to ask, by default the self-test.
    """
    told, failure = _told(command or [sys.executable, "-m", _SELF_TEST], seconds)
    devices: list[dict[str, Any]] = told.get("devices") or []
    findings = [*_devices(devices), *_gpus(told.get("gpus"), devices), *_compiler(told.get("compiler"))]
    for test in told["tests"]:
        name, state = test["name"], _state(test["ok"])
        findings.append(Finding("self-test", name, state, test["about"], "" if test["ok"] else _fix_of_device(name)))
    if failure:
        where = told.get("trying") if told.get("trying") not in [test["name"] for test in told["tests"]] else None
        fix = _fix_of_device(where) if where else "pip install --force-reinstall relax-hetero"
        findings.append(Finding("self-test", where or "import tvm", "error", failure, fix))
    return findings, devices


def _told(command: list[str], seconds: float) -> tuple[dict[str, Any], str]:
    """Output of the process, and why it did not come to its end."""
    told: dict[str, Any] = {"tests": []}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, errors, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, errors, status = _text(late.stdout), f"no end within {seconds:.0f} s", 1
    except OSError as error:
        return told, f"the process cannot be started: {error}"
    for line in output.splitlines():
        for kind, what in _objects(line):
            told["tests"].append(what) if kind == "tested" else told.update({kind: what})
    if "end" in told:
        return told, ""
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
    return told, f"ended by {signal.Signals(-status).name}" if status < 0 else last.strip()


def _objects(line: str) -> Iterator[tuple[str, Any]]:
    try:
        found = json.loads(line)
    except ValueError:  # what a library prints
        return
    if isinstance(found, dict):
        yield from found.items()


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _devices(devices: list[dict[str, Any]]) -> Iterator[Finding]:
    from ...display.text import bytes_text, plural

    version = driver() if len(devices) > 1 else ""
    for device in devices:
        parts = [device["model"], plural(device["cores"], "core"), device["instructions"], bytes_text(device["memory"])]
        if device["name"].startswith("llvm"):
            parts.insert(2, plural(device["numa_nodes"], "NUMA node"))
        else:
            parts.append(f"driver {version or 'unknown'}")
        yield Finding("devices", device["name"], "ok", ", ".join(filter(None, parts)))


def _gpus(why: dict[str, str] | None, devices: list[dict[str, Any]]) -> Iterator[Finding]:
    if why is None:
        return
    usable, there = len(devices) - 1, gpus_of_system()
    if usable < there:
        about = f"the driver has {there}, TVM can use {usable}: {why['runtime'] or 'no reason was given'}"
        yield Finding("devices", "GPUs", "error", about, f"{_CUDA}, and see that nvidia-smi lists them")
    elif not usable:
        yield Finding("devices", "GPUs", "absent", "no NVIDIA GPU was found")
    if why["compiler"]:
        yield Finding("tools", "CUDA compiler", "ok", why["compiler"])
    else:
        state: State = "error" if usable > 0 else "absent"
        yield Finding("tools", "CUDA compiler", state, "neither NVRTC with its headers nor nvcc", _CUDA)


def _compiler(found: dict[str, Any] | None) -> Iterator[Finding]:
    if found is None:
        return
    if found["ok"]:
        yield Finding("tools", "C compiler", "ok", found["about"])
    else:
        fix = "install one, such as apt install g++, or name one with CXX; without it models run but are not exported"
        yield Finding("tools", "C compiler", "warning", found["about"], fix)


def _state(works: bool) -> State:
    return "ok" if works else "error"


def _fix_of_device(name: str) -> str:
    if name.startswith("llvm"):
        return "pip install --force-reinstall relax-hetero; if that does not help, report this output"
    return f"see that nvidia-smi works, then {_CUDA}; without it leave {name} out of vdevices"


# The folder of the compile cache: whether it is used, what it holds, and whether it can be written.

_VARIABLE = "RELAX_HETERO_CACHE"


def cache_finding() -> Finding:
    """Finding about the folder that the environment names."""
    try:
        folder = folder_of()
    except HeteroError as error:
        return _finding("warning", str(error), f"set {_VARIABLE}_SIZE to a size such as 10G")
    if folder is None:
        return _finding("absent", "switched off, or there is no home: every model is compiled each time")
    try:
        return _of_folder(folder)
    except OSError as error:
        return _finding("warning", f"{folder.path}: {error.strerror}", f"chmod u+rwx '{folder.path}'")


def _of_folder(folder: CacheFolder) -> Finding:
    path = folder.path
    if not os.path.lexists(path):
        above = next((place for place in path.parents if place.exists()), Path("/"))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            fix = f"make {above} a folder that you can write, or set {_VARIABLE} to another"
            return _finding("warning", f"{path} cannot be made", fix)
        return _finding("ok", f"{path}: empty, at most {bytes_text(folder.limit)}")
    status = path.stat()
    foreign = why_foreign(status)
    if foreign:
        return _finding(
            "warning", f"{path} is not used: {foreign}", f"chmod go-w '{path}', or set {_VARIABLE} to another"
        )
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return _finding("warning", f"{path} cannot be read and written", f"chmod u+rwx '{path}'")
    entries = folder.entries()
    used = bytes_text(sum(entry.bytes for entry in entries))
    return _finding("ok", f"{path}: {plural(len(entries), 'executable')}, {used} of at most {bytes_text(folder.limit)}")


def _finding(state: State, about: str, fix: str = "") -> Finding:
    return Finding("tools", "compile cache", state, about, fix)


_SECTIONS = ("packages", "extras", "devices", "tools", "self-test")
_SIGNS = {"ok": "ok", "absent": "-", "warning": "warning", "error": "ERROR"}


@command("doctor")
@click.option(
    "--self-test/--no-self-test",
    default=True,
    show_default=True,
    help="Run a small model on each device, or list only what is installed.",
)
@json_option
def doctor_command(self_test: bool, as_json: bool) -> None:
    """Say what is installed, which devices there are, whether a model runs on them, and what to mend.

    Exits with 1 if something that is needed is broken. The self-test takes about five seconds.
    """
    findings = [*package_findings(), *extra_findings(), cache_finding()]
    if self_test:
        with console(stderr=True).status("Trying the devices"):
            found, devices = probe_findings()
        findings += found
    else:
        devices = []
    wrong = broken(findings)
    if as_json:
        print_json({"ok": not wrong, "versions": versions(), "devices": devices, "findings": [*map(asdict, findings)]})
    else:
        _show(findings, wrong)
    if wrong:
        sys.exit(1)


def _show(findings: list[Finding], wrong: list[Finding]) -> None:
    for section in _SECTIONS:
        rows = [[f.name, _SIGNS[f.state], f.about] for f in findings if f.section == section]
        if rows:
            print_table(section.capitalize(), ["name", "state", "found"], rows)
    out = console()
    for title, states in (("To mend", ("error", "warning")), ("To add, if you want it", ("absent",))):
        lines = [f"  {f.name}: {f.fix}" for f in findings if f.state in states and f.fix]
        if lines:
            out.print("\n".join([f"{title}:", *lines]), markup=False, soft_wrap=True)
    verdict = f"{plural(len(wrong), 'thing')} that is needed does not work." if wrong else "All that is needed works."
    out.print(verdict, markup=False)
