"""The packages of this installation against the versions that relax_hetero asks for; none of them is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal, TypeAlias

from ...backends.cuda import CudaBackend

if TYPE_CHECKING:
    from packaging.requirements import Requirement


# Findings of ``relax-hetero doctor``: a line each, with what to do. Nothing here needs a package.

State: TypeAlias = Literal["ok", "absent", "warning", "error"]
"""Absent: not there, and not needed unless somebody wants what it is for. Error: what is needed is broken."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    section : str
        ``packages``, ``extras``, ``devices``, ``tools`` or ``self-test``.
    name : str
        Subject of the check.
    about : str
        Result of the check.
    fix : str
        Remedy; empty where nothing has to be done.
    """

    section: str
    name: str
    state: State
    about: str
    fix: str = ""


def broken(findings: list[Finding]) -> list[Finding]:
    """Those that keep the library from working."""
    return [finding for finding in findings if finding.state == "error"]


DISTRIBUTION = "relax-hetero"

EXTRAS = {
    CudaBackend.KIND: "compiling for NVIDIA GPUs without a CUDA toolkit",
    "torch": "rh.from_torch",
    "llm": "GGUF files, tokenizers and chat templates: rh.llm, relax-hetero chat",
    "serve": "the endpoints of OpenAI: relax-hetero serve",
    "cluster": "several hosts: rh.cluster",
    "nccl": "tensors from GPU to GPU between hosts",
    "demo": "make demo and apps/sentence_similarity",
}
"""The extras for users, and what each is for; others are for who develops the library."""

_REINSTALL = f"pip install --force-reinstall {DISTRIBUTION}"


@dataclass(frozen=True)
class Need:
    """A package that is asked for.

    Attributes
    ----------
    requirement : str
        As pip takes it: a name and versions.
    version : str or None
        Version that is installed; None for nothing.
    fits : bool
        Whether the version is one that was asked for.
    """

    requirement: str
    version: str | None
    fits: bool


def versions() -> dict[str, str]:
    """The versions that a report of a defect needs, by name; ``missing`` for a package that is not installed."""
    from ... import __version__

    names = ("apache-tvm", "apache-tvm-ffi")
    return {
        DISTRIBUTION: __version__,
        **{name: _version(name) or "missing" for name in names},
        "Python": platform.python_version(),
    }


def package_findings() -> list[Finding]:
    """Python and the packages that every installation needs."""
    try:
        needs = needs_of("")
    except metadata.PackageNotFoundError:
        about, fix = "a source tree that pip did not install: nothing says what it needs", "pip install --editable ."
        return [Finding("packages", DISTRIBUTION, "warning", about, fix)]
    except ImportError:
        return [Finding("packages", "packaging", "error", "missing: versions cannot be compared", _REINSTALL)]
    return [_python(), *(_package(need) for need in needs)]


def repairs() -> list[str]:
    """The commands that bring what every installation needs; that which installs all of it anew if none is amiss."""
    return [finding.fix for finding in broken(package_findings())] or [_REINSTALL]


def extra_findings() -> list[Finding]:
    """Findings about optional packages: whether each is there, and its use."""
    found = []
    for extra, purpose in EXTRAS.items():
        try:
            needs = needs_of(extra)
        except (metadata.PackageNotFoundError, ImportError):
            return []
        if needs:
            found.append(_extra(extra, purpose, needs))
    return found


def needs_of(extra: str) -> list[Need]:
    """Packages that an extra asks for on this machine; those of every installation for an empty name.

    Raises
    ------
    PackageNotFoundError
        relax_hetero was not installed.
    ImportError
        There is no ``packaging``.
    """
    requirements = _requirements(extra)
    return [_need(requirement) for requirement in requirements]


def _requirements(extra: str) -> Iterable[Requirement]:
    from packaging.requirements import Requirement

    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if always if not extra else not always and requirement.marker.evaluate({"extra": extra}):  # type: ignore[union-attr]
            yield requirement


def _need(requirement: Requirement) -> Need:
    version = _version(requirement.name)
    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
    return Need(f"{requirement.name}{requirement.specifier}", version, fits)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    from packaging.specifiers import SpecifierSet

    wanted, here = metadata.metadata(DISTRIBUTION)["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted or "").contains(here, prereleases=True):
        return Finding("packages", "Python", "ok", here)
    fix = "make an environment with a Python of these versions: python3.12 -m venv .venv"
    return Finding("packages", "Python", "error", f"{here}, expected {wanted}", fix)


def _package(need: Need) -> Finding:
    name = _name(need)
    if need.fits:
        return Finding("packages", name, "ok", need.version or "")
    about = f"{need.version or 'missing'}, expected {need.requirement.removeprefix(name)}"
    return Finding("packages", name, "error", about, f"pip install '{need.requirement}'")


def _extra(extra: str, purpose: str, needs: list[Need]) -> Finding:
    command = f"pip install '{DISTRIBUTION}[{extra}]'"
    wrong = [need for need in needs if need.version is not None and not need.fits]
    if wrong:
        about = ", ".join(f"{_name(need)} {need.version}, expected {need.requirement}" for need in wrong)
        return Finding("extras", extra, "warning", f"{purpose}: {about}", command)
    missing = [_name(need) for need in needs if need.version is None]
    if missing:
        return Finding("extras", extra, "absent", f"{purpose}: without {', '.join(missing)}", command)
    return Finding("extras", extra, "ok", f"{purpose}: {', '.join(f'{_name(n)} {n.version}' for n in needs)}")


def _name(need: Need) -> str:
    from packaging.requirements import Requirement

    return Requirement(need.requirement).name
