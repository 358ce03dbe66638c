"""``relax-hetero doctor``: checks packages, devices, tools and the compile cache, and says how to fix problems."""

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

from ...artifact.cache_folder import CacheFolder, resolve_cache_folder
from ...display.console import console, print_json, print_table
from ...display.text import bytes_text, plural
from ...errors import HeteroError, pip_install
from ...system import why_untrusted
from ..command import command, json_option
from .packages import Finding, State, extra_findings, package_findings, versions

_DRIVER_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")
SELF_TEST_TIMEOUT_SECONDS = 120.0  # timeout of the self-test, which takes about five seconds on an idle machine
_SELF_TEST_MODULE = "relax_hetero.tools.installation.self_test"
_INSTALL_CUDA = pip_install("cuda")
_CACHE_VARIABLE = "RELAX_HETERO_CACHE"
_SECTIONS = ("packages", "extras", "devices", "tools", "self-test")
_STATE_TEXTS = {"ok": "ok", "absent": "-", "warning": "warning", "error": "ERROR"}


def count_gpus() -> int:
    """Count the NVIDIA GPUs that the driver lists, without loading TVM."""
    try:
        return len(list(_DRIVER_GPUS_FOLDER.iterdir()))
    except OSError:
        return 0


def device_choices(suffix: str = "") -> list[str]:
    """Values of ``--vdevice`` that shells complete: this machine's devices, with `suffix` after the CPU's ``llvm``."""
    return [f"llvm{suffix}", *(f"cuda:{index}" for index in range(count_gpus()))]


def _driver_version() -> str:
    """The version of NVIDIA's driver; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        result = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else ""


def run_self_test(
    command: list[str] | None = None, timeout: float = SELF_TEST_TIMEOUT_SECONDS
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Run the self-test in a process of its own; return findings about devices and tools, and the devices it lists.

    `command`: command line of the process, by default of the module `self_test`; `timeout`: time limit of the process
    in seconds.
    """
    output, failure = _run_process(command or [sys.executable, "-m", _SELF_TEST_MODULE], timeout)
    devices: list[dict[str, Any]] = output.get("devices") or []
    findings = [
        *_device_findings(devices),
        *_gpu_findings(output.get("gpus"), devices),
        *_compiler_findings(output.get("compiler")),
    ]
    for test in output["tests"]:
        state: State = "ok" if test["ok"] else "error"
        fix = "" if test["ok"] else _device_fix(test["name"])
        findings.append(Finding("self-test", test["name"], state, test["about"], fix))
    if failure:
        last_device = output.get("trying")
        device = None if last_device in [test["name"] for test in output["tests"]] else last_device
        fix = _device_fix(device) if device else "pip install --force-reinstall relax-hetero"
        findings.append(Finding("self-test", device or "import tvm", "error", failure, fix))
    return findings, devices


def _run_process(command: list[str], timeout: float) -> tuple[dict[str, Any], str]:
    """Run the process; return the values that it prints as lines ``{key: value}``, and the reason of a failure."""
    output: dict[str, Any] = {"tests": []}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        stdout, stderr, status = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as timeout_error:
        stdout, stderr, status = _decode(timeout_error.stdout), f"it did not finish within {timeout:.0f} s", 1
    except OSError as error:
        return output, f"the process cannot be started: {error}"
    for line in stdout.splitlines():
        for key, value in _parse_object(line):
            output["tests"].append(value) if key == "tested" else output.update({key: value})
    if "end" in output:
        return output, ""
    last_line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return output, f"ended by {signal.Signals(-status).name}" if status < 0 else last_line.strip()


def _parse_object(line: str) -> Iterator[tuple[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError:  # printed by a library
        return
    if isinstance(value, dict):
        yield from value.items()


def _decode(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _device_findings(devices: list[dict[str, Any]]) -> Iterator[Finding]:
    version = _driver_version() if len(devices) > 1 else ""
    for device in devices:
        if "error" in device:
            yield Finding("devices", device["name"], "error", device["error"])
            continue
        parts = [device["model"], plural(device["cores"], "core"), device["instructions"], bytes_text(device["memory"])]
        if device["name"].startswith("llvm"):
            parts.insert(2, plural(device["numa_nodes"], "NUMA node"))
        else:
            parts.append(f"driver {version or 'unknown'}")
        yield Finding("devices", device["name"], "ok", ", ".join(filter(None, parts)))


def _gpu_findings(gpus: dict[str, str] | None, devices: list[dict[str, Any]]) -> Iterator[Finding]:
    if gpus is None:
        return
    usable, total = len(devices) - 1, count_gpus()  # the first device is the CPU
    if usable < total:
        about = f"the driver lists {total}, TVM can use {usable}: {gpus['runtime'] or 'unknown reason'}"
        yield Finding("devices", "GPUs", "error", about, f"{_INSTALL_CUDA}, and check that nvidia-smi lists them")
    elif not usable:
        yield Finding("devices", "GPUs", "absent", "no NVIDIA GPU was found")
    if gpus["compiler"]:
        yield Finding("tools", "CUDA compiler", "ok", gpus["compiler"])
    else:
        state: State = "error" if usable > 0 else "absent"
        yield Finding("tools", "CUDA compiler", state, "neither NVRTC with its headers nor nvcc", _INSTALL_CUDA)


def _compiler_findings(compiler: dict[str, Any] | None) -> Iterator[Finding]:
    if compiler is None:
        return
    if compiler["ok"]:
        yield Finding("tools", "C compiler", "ok", compiler["about"])
    else:
        fix = (
            f"install one, such as apt install g++ or {pip_install('compiler')}, or name one with CXX; "
            "without it models run but are not exported"
        )
        yield Finding("tools", "C compiler", "warning", compiler["about"], fix)


def _device_fix(name: str) -> str:
    if name.startswith("llvm"):
        return "pip install --force-reinstall relax-hetero; if that does not help, report this output"
    return f"check that nvidia-smi works, then {_INSTALL_CUDA}; to do without this GPU, leave {name} out of vdevices"


def check_cache() -> Finding:
    """Check that the compile cache is enabled, private and writable."""
    try:
        folder = resolve_cache_folder()
    except HeteroError as error:
        return _cache_finding("warning", str(error), f"set {_CACHE_VARIABLE}_SIZE to a size such as 10G")
    if folder is None:
        return _cache_finding("absent", "switched off, or there is no home folder: every model is compiled each time")
    try:
        return _check_folder(folder)
    except OSError as error:
        return _cache_finding("warning", f"{folder.path}: {error.strerror}", f"chmod u+rwx '{folder.path}'")


def _check_folder(folder: CacheFolder) -> Finding:
    path = folder.path
    if not os.path.lexists(path):
        parent = next((ancestor for ancestor in path.parents if ancestor.exists()), Path("/"))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            fix = f"make {parent} a folder that you can write, or set {_CACHE_VARIABLE} to another"
            return _cache_finding("warning", f"{path} cannot be created", fix)
        return _cache_finding("ok", f"{path}: empty, at most {bytes_text(folder.limit)}")
    foreign = why_untrusted(path.stat())
    if foreign:
        fix = f"chmod go-w '{path}', or set {_CACHE_VARIABLE} to another"
        return _cache_finding("warning", f"{path} is not used: {foreign}", fix)
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return _cache_finding("warning", f"{path} cannot be read and written", f"chmod u+rwx '{path}'")
    entries = folder.entries()
    size = bytes_text(sum(entry.bytes for entry in entries))
    about = f"{path}: {plural(len(entries), 'executable')}, {size} of at most {bytes_text(folder.limit)}"
    return _cache_finding("ok", about)


def _cache_finding(state: State, about: str, fix: str = "") -> Finding:
    return Finding("tools", "compile cache", state, about, fix)


@command("doctor")
@click.option(
    "--self-test/--no-self-test", default=True, help="Run a small model on each device, or list only what is installed."
)
@json_option
def doctor_command(self_test: bool, as_json: bool) -> None:
    """Check packages, devices, tools and the compile cache, and say how to fix problems.

    Exits with 1 if something required is broken. The self-test takes about five seconds.
    """
    findings = [*package_findings(), *extra_findings(), check_cache()]
    if self_test:
        with console(stderr=True).status("Testing the devices"):
            self_test_findings, devices = run_self_test()
        findings += self_test_findings
    else:
        devices = []
    errors = [finding for finding in findings if finding.state == "error"]
    if as_json:
        print_json({"ok": not errors, "versions": versions(), "devices": devices, "findings": [*map(asdict, findings)]})
    else:
        _print_findings(findings, errors)
    if errors:
        sys.exit(1)


def _print_findings(findings: list[Finding], errors: list[Finding]) -> None:
    for section in _SECTIONS:
        rows = [[f.name, _STATE_TEXTS[f.state], f.about] for f in findings if f.section == section]
        if rows:
            print_table(section.capitalize(), ["name", "state", "found"], rows)
    stdout = console()
    for title, states in (("To fix", ("error", "warning")), ("Optional", ("absent",))):
        lines = [f"  {f.name}: {f.fix}" for f in findings if f.state in states and f.fix]
        if lines:
            stdout.print("\n".join([f"{title}:", *lines]), markup=False, soft_wrap=True)
    verdict = f"{plural(len(errors), 'error')}: see above." if errors else "Everything required works."
    stdout.print(verdict, markup=False)
