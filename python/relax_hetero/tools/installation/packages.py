"""Checks that the required packages are installed in the right versions, without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal, TypeAlias

from ...backends.cuda import CudaBackend
from ...errors import RUNTIME_DISTRIBUTION, distribution_name, pip_install

if TYPE_CHECKING:
    from packaging.requirements import Requirement


State: TypeAlias = Literal["ok", "absent", "warning", "error"]
"""State of a check; absent: missing, but optional; error: required, but broken."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    section: str  # ``packages``, ``extras``, ``devices``, ``tools`` or ``self-test``
    name: str  # subject of the check
    state: State  # state of the subject
    about: str  # result of the check
    fix: str = ""  # how to fix it; empty if there is nothing to do


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


EXTRAS = {
    CudaBackend.KIND: "compiling for NVIDIA GPUs without a CUDA toolkit",
    "opencl": "running on OpenCL devices",
    "opencl-cpu": "Intel's driver, for which a CPU is an OpenCL device",
    "torch": "rh.from_torch",
    "llm": "GGUF files, tokenizers and chat templates: rh.llm, relax-hetero chat",
    "serve": "the endpoints of OpenAI: relax-hetero serve",
    "cluster": "several hosts: rh.cluster",
    "nccl": "sums over GPUs, and tensors from GPU to GPU between hosts",
    "compiler": "exporting libraries where there is no C compiler",
    "demo": "make demo and apps/sentence_similarity",
}
"""Extras for users, and the purpose of each; other extras are for developers."""

_REINSTALL = "pip install --force-reinstall .  # in a checkout of the repository"


@dataclass(frozen=True)
class Dependency:
    """A package that this one requires."""

    requirement: str  # name and versions, as for pip
    version: str | None  # installed version; None if it is missing
    is_satisfied: bool  # whether the installed version meets the requirement


def versions() -> dict[str, str]:
    """Versions that belong into a bug report, by name; ``missing`` if a package is not installed."""
    from ... import __version__

    names = ("apache-tvm-ffi",) if distribution_name() == RUNTIME_DISTRIBUTION else ("apache-tvm", "apache-tvm-ffi")
    return {
        distribution_name(): __version__,
        **{name: _installed_version(name) or "missing" for name in names},
        "Python": platform.python_version(),
    }


def package_findings() -> list[Finding]:
    """Check Python and the required packages."""
    try:
        dependencies = dependencies_of("")
    except metadata.PackageNotFoundError:
        about, fix = "a source tree that pip did not install, without requirements", "pip install --editable ."
        return [Finding("packages", distribution_name(), "warning", about, fix)]
    except ImportError:
        return [Finding("packages", "packaging", "error", "missing: versions cannot be compared", _REINSTALL)]
    return [_check_python(), *(_check_package(dependency) for dependency in dependencies)]


def repairs() -> list[str]:
    """Commands that fix the required packages; a reinstallation if none of them is broken."""
    return [finding.fix for finding in package_findings() if finding.state == "error"] or [_REINSTALL]


def extra_findings() -> list[Finding]:
    """Check the optional packages."""
    findings = []
    for extra, purpose in EXTRAS.items():
        try:
            dependencies = dependencies_of(extra)
        except (metadata.PackageNotFoundError, ImportError):
            return []
        if dependencies:
            findings.append(_check_extra(extra, purpose, dependencies))
    return findings


def dependencies_of(extra: str) -> list[Dependency]:
    """Packages that an extra requires on this machine; an empty name means the required packages.

    Raises PackageNotFoundError if relax_hetero is not installed, and ImportError if ``packaging`` is missing.
    """
    return [_dependency(requirement) for requirement in _requirements(extra)]


def _requirements(extra: str) -> Iterable[Requirement]:
    from packaging.requirements import Requirement

    for text in metadata.requires(distribution_name()) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        is_required = marker is None or marker.evaluate({"extra": ""})
        if is_required if not extra else not is_required and marker and marker.evaluate({"extra": extra}):
            yield requirement


def _dependency(requirement: Requirement) -> Dependency:
    version = _installed_version(requirement.name)
    is_satisfied = version is not None and requirement.specifier.contains(version, prereleases=True)
    return Dependency(f"{requirement.name}{requirement.specifier}", version, is_satisfied)


def _check_python() -> Finding:
    from packaging.specifiers import SpecifierSet

    required, version = metadata.metadata(distribution_name())["Requires-Python"], platform.python_version()
    if SpecifierSet(required or "").contains(version, prereleases=True):
        return Finding("packages", "Python", "ok", version)
    fix = "make an environment with a Python of these versions: python3.12 -m venv .venv"
    return Finding("packages", "Python", "error", f"{version}, expected {required}", fix)


def _check_package(dependency: Dependency) -> Finding:
    name = _name(dependency)
    if dependency.is_satisfied:
        return Finding("packages", name, "ok", dependency.version or "")
    about = f"{dependency.version or 'missing'}, expected {dependency.requirement.removeprefix(name)}"
    return Finding("packages", name, "error", about, f"pip install '{dependency.requirement}'")


def _check_extra(extra: str, purpose: str, dependencies: list[Dependency]) -> Finding:
    command = pip_install(extra)
    unsatisfied = [each for each in dependencies if each.version is not None and not each.is_satisfied]
    if unsatisfied:
        about = ", ".join(f"{_name(each)} {each.version}, expected {each.requirement}" for each in unsatisfied)
        return Finding("extras", extra, "warning", f"{purpose}: {about}", command)
    missing = [_name(dependency) for dependency in dependencies if dependency.version is None]
    if missing:
        return Finding("extras", extra, "absent", f"{purpose}: without {', '.join(missing)}", command)
    return Finding("extras", extra, "ok", f"{purpose}: {', '.join(f'{_name(n)} {n.version}' for n in dependencies)}")


def _name(dependency: Dependency) -> str:
    from packaging.requirements import Requirement

    return Requirement(dependency.requirement).name
