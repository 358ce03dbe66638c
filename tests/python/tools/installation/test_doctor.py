"""relax-hetero doctor: a sound installation, and broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from relax_hetero.tools.installation import doctor, packages
from relax_hetero.tools.installation.packages import Finding

from ..conftest import parsed

Invoke = Callable[..., Result]

CPU = {"name": "llvm:0", "model": "a CPU", "cores": 2, "instructions": "avx512", "numa_nodes": 1, "memory": 1 << 30}
LINES: list[dict[str, Any]] = [
    {"start": None},
    {"compiler": {"ok": True, "about": "g++"}},
    {"gpus": {"runtime": "", "compiler": "NVRTC", "no_compiler": ""}},
    {"devices": [CPU]},
    {"trying": "llvm:0"},
    {"tested": {"name": "llvm:0", "ok": True, "about": "fine"}},
    {"end": None},
]
PROBE = doctor.run_self_test


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation with all that it needs, no GPU, and a process that tries its devices and finds them well."""
    requirements = ["apache-tvm==0.27.0", "numpy>=1.26,<3", 'tokenizers>=0.20,<1; extra == "llm"']
    monkeypatch.setattr(metadata, "requires", lambda _: requirements)
    monkeypatch.setattr(metadata, "metadata", lambda _: {"Requires-Python": ">=3.10"})
    install(monkeypatch)
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    tries(monkeypatch, LINES)


def install(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Let packages be installed in these versions, or not at all."""
    there = {"apache-tvm": "0.27.0", "apache-tvm-ffi": "0.1.14", "numpy": "2.0.0", "tokenizers": "0.21.0"}
    there |= {name.replace("_", "-"): version for name, version in changes.items()}

    def version(name: str) -> str:
        installed = there.get(name)
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)


PROBE = doctor.run_self_test


def tries(monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], last: str = "") -> None:
    """Let the process that tries the devices print these lines, and then do something else."""
    program = f"import os, sys\nprint({chr(10).join(map(json.dumps, lines))!r}, flush=True)\n{last}"
    command = [sys.executable, "-S", "-c", program]
    monkeypatch.setattr(doctor, "run_self_test", lambda: PROBE(command))


def diagnosed(invoke: Invoke) -> tuple[int, dict[str, Finding]]:
    """The exit code, and findings by name."""
    result = invoke("doctor", "--json")
    report = parsed(result)
    findings = [Finding(**finding) for finding in report["findings"]]
    assert report["ok"] == (result.exit_code == 0)
    return result.exit_code, {finding.name: finding for finding in findings}


def test_all_is_well(invoke: Invoke):
    status, findings = diagnosed(invoke)
    assert status == 0
    assert {name: finding.state for name, finding in findings.items()} == {
        "Python": "ok",
        "apache-tvm": "ok",
        "numpy": "ok",
        "llm": "ok",
        "compile cache": "ok",
        "llvm:0": "ok",
        "GPUs": "absent",
        "CUDA compiler": "ok",
        "C compiler": "ok",
    }
    shown = invoke("doctor")
    assert shown.exit_code == 0
    assert "Everything required works." in shown.stdout
    assert "To fix" not in shown.stdout


def test_json_has_versions_and_devices(invoke: Invoke):
    report = parsed(invoke("doctor", "--json"))
    assert report["versions"]["apache-tvm"] == "0.27.0"
    assert report["devices"] == [CPU]


def test_the_self_test_can_be_left_out(invoke: Invoke):
    report = parsed(invoke("doctor", "--no-self-test", "--json"))
    assert report["devices"] == []
    assert {finding["section"] for finding in report["findings"]} == {"packages", "extras", "tools"}


def test_a_missing_package(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, numpy=None)
    status, findings = diagnosed(invoke)
    assert (status, findings["numpy"].state) == (1, "error")
    assert findings["numpy"].about.startswith("missing, expected")
    shown = invoke("doctor")
    assert shown.exit_code == 1
    assert "To fix:\n  numpy: pip install 'numpy" in shown.stdout
    assert "1 error: see above." in shown.stdout


def test_a_wrong_version(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, apache_tvm="0.28.0")
    status, findings = diagnosed(invoke)
    assert status == 1
    assert findings["apache-tvm"].about == "0.28.0, expected ==0.27.0"
    assert findings["apache-tvm"].fix == "pip install 'apache-tvm==0.27.0'"


def test_a_wrong_python(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.9.18")
    status, findings = diagnosed(invoke)
    assert (status, findings["Python"].about) == (1, "3.9.18, expected >=3.10")


@pytest.mark.parametrize("version, state", [(None, "absent"), ("9.0", "warning")])
def test_an_extra_is_not_needed(version: str | None, state: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, tokenizers=version)
    status, findings = diagnosed(invoke)
    assert (status, findings["llm"].state, findings["llm"].fix) == (0, state, "pip install 'relax-hetero[llm]'")


def test_a_source_tree_that_pip_did_not_install(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    status, findings = diagnosed(invoke)
    assert (status, findings["relax-hetero"].state) == (0, "warning")


def test_no_compiler(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    lines = [line if "compiler" not in line else {"compiler": {"ok": False, "about": "no c++"}} for line in LINES]
    tries(monkeypatch, lines)
    status, findings = diagnosed(invoke)
    assert (status, findings["C compiler"].state, findings["C compiler"].about) == (0, "warning", "no c++")
    assert "apt install g++" in findings["C compiler"].fix


def test_a_gpu_that_tvm_cannot_use(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "count_gpus", lambda: 1)
    status, findings = diagnosed(invoke)
    assert (status, findings["GPUs"].state) == (1, "error")
    assert "relax-hetero[cuda]" in findings["GPUs"].fix


def test_wrong_numbers(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    wrong = {"tested": {"name": "llvm:0", "ok": False, "about": "largest error 1.0"}}
    tries(monkeypatch, [*LINES[:-2], wrong, LINES[-1]])
    report = parsed(invoke("doctor", "--json"))
    (finding,) = [finding for finding in report["findings"] if finding["section"] == "self-test"]
    assert (report["ok"], finding["state"], finding["about"]) == (False, "error", "largest error 1.0")


@pytest.mark.parametrize(
    "lines, last, name, about",
    [
        (1, "sys.exit('ImportError: libtvm.so')", "import tvm", "ImportError: libtvm.so"),
        (5, "os.kill(os.getpid(), 11)", "llvm:0", "ended by SIGSEGV"),
    ],
    ids=["import", "crash"],
)
def test_a_process_that_fails(
    lines: int, last: str, name: str, about: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
):
    """Its output before the failure is not lost."""
    tries(monkeypatch, LINES[:lines], last)
    result = invoke("doctor", "--json")
    report = parsed(result)
    assert result.exit_code == 1
    (finding,) = [finding for finding in report["findings"] if finding["state"] == "error"]
    assert (finding["section"], finding["name"], finding["about"]) == ("self-test", name, about)
    assert report["devices"] == ([CPU] if lines > 3 else [])


def test_a_process_that_hangs(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **_: object) -> None:
        output = "\n".join(map(json.dumps, LINES[:5])).encode()
        raise subprocess.TimeoutExpired(command, 120, output=output)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    status, findings = diagnosed(invoke)
    assert (status, findings["C compiler"].state) == (1, "ok")
    assert findings["llvm:0"].section == "self-test"
    assert (findings["llvm:0"].state, findings["llvm:0"].about) == ("error", "it did not finish within 120 s")


def test_a_process_that_does_not_start():
    findings, devices = PROBE(["/no/such/program"])
    assert (devices, [finding.state for finding in findings]) == ([], ["error"])
    assert "cannot be started" in findings[0].about


def test_a_cache_that_others_may_write_to(invoke: Invoke, tmp_path: Path):
    folder = tmp_path / "cache" / "executables"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    status, findings = diagnosed(invoke)
    assert (status, findings["compile cache"].state) == (0, "warning")
    assert findings["compile cache"].fix.startswith(f"chmod go-w '{folder}'")


def test_no_cache(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")
    assert diagnosed(invoke)[1]["compile cache"].state == "absent"


def test_a_malformed_size_of_the_cache_is_reported(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE_SIZE", "much")
    assert diagnosed(invoke)[1]["compile cache"].state == "warning"


def test_the_version_names_what_a_report_needs(invoke: Invoke):
    shown = invoke("--version")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "relax-hetero",
        "apache-tvm",
        "apache-tvm-ffi",
        "Python",
    ]


def test_this_installation_works(monkeypatch: pytest.MonkeyPatch):
    """The process as it is: TVM is imported, and a model runs on each device."""
    monkeypatch.undo()
    findings, devices = doctor.run_self_test()
    assert devices[0]["name"].startswith("llvm")
    assert [finding for finding in findings if finding.state == "error"] == []
