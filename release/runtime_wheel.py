"""Build the wheel relax-hetero-runtime: this package with TVM's run time, without TVM's compiler.

python release/runtime_wheel.py dist

TVM publishes one wheel with its run time (3 MB) and its compiler (259 MB), so the run time is taken from the installed
wheel of `apache-tvm`, at the version that pyproject.toml names, with its license. The package `relax_hetero` is the
same as in the wheel relax-hetero, and says what needs the compiler. Both wheels have the same packages, so that only
one of them can be installed in an environment.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
NAME = "relax-hetero-runtime"
TVM_MODULES = (
    *("__init__", "_version", "backend", "base", "driver", "error", "ir", "libinfo", "runtime", "script", "support"),
    *("sym", "target", "te", "tirx"),
)
"""Modules that ``import tvm`` imports without the compiler."""
TVM_LIBRARIES = ("libtvm_runtime.so", "libtvm_runtime_cuda.so", "libtvm_runtime_extra.so")
COMPILER_ONLY = ("apache-tvm", "onnx")
"""Dependencies that only compiling needs."""
EXTRAS = ("cuda", "llm", "nccl", "opencl", "serve")
"""Extras of pyproject.toml that make sense without the compiler."""


def files_of_package() -> Iterator[tuple[str, Path]]:
    """The files of `relax_hetero`, by their names in the wheel."""
    folder = ROOT / "python"
    for path in sorted((folder / "relax_hetero").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix(), path


def files_of_tvm(tvm: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """The files of TVM's run time, by their names in the wheel."""
    for file in sorted(tvm.files or (), key=str):
        top = file.parts[1].removesuffix(".py") if len(file.parts) > 1 else ""
        is_module = file.suffix == ".py" and top in TVM_MODULES
        is_library = top == "lib" and file.name in TVM_LIBRARIES
        if file.parts[0] == "tvm" and (is_module or is_library):
            yield file.as_posix(), Path(str(file.locate()))


def licenses(tvm: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Licenses and notices of both, by their names in the wheel."""
    yield "LICENSE", ROOT / "LICENSE"
    for path in sorted((ROOT / "python/relax_hetero/report/page/vendor").glob("*.[LN]*")):
        yield path.name, path
    for file in sorted(tvm.files or (), key=str):
        if file.parts[0].endswith(".dist-info") and "licenses" in file.parts:
            inside = file.parts[file.parts.index("licenses") + 1 :]
            yield "/".join(("tvm", *inside)), Path(str(file.locate()))


def metadata_text(version: str, project: dict, tvm: metadata.Distribution) -> str:
    """The wheel's METADATA."""
    needed: dict[str, str] = {}
    for line in [*project["dependencies"], *(line for line in tvm.requires or () if "extra ==" not in line)]:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if name not in COMPILER_ONLY:
            needed.setdefault(name, line)
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {NAME}",
        f"Version: {version}",
        "Summary: Run and serve exported models of relax-hetero, without TVM's compiler",
        f"Requires-Python: {project['requires-python']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        *(f"Requires-Dist: {line}" for line in needed.values()),
    ]
    for extra in EXTRAS:
        lines.append(f"Provides-Extra: {extra}")
        for line in project["optional-dependencies"][extra]:
            requirement, _, marker = line.partition(";")
            condition = f"({marker.strip()}) and " if marker else ""
            lines.append(f"Requires-Dist: {requirement.strip()}; {condition}extra == '{extra}'")
    description = (
        "Loads, runs and serves files that `Executable.export_library` of relax-hetero has written. It has the "
        "packages `relax_hetero` and `tvm` (the run time of Apache TVM, from its wheel): install it instead of "
        "relax-hetero and apache-tvm, not beside them."
    )
    return "\n".join(lines) + f"\nDescription-Content-Type: text/markdown\n\n{description}\n"


def build(folder: Path) -> Path:
    """Write the wheel into a folder; returns its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "python/relax_hetero/__init__.py").read_text(), re.M)[1]
    tvm = metadata.distribution("apache-tvm")
    if f"apache-tvm=={tvm.version}" not in project["dependencies"]:
        raise SystemExit(f"found apache-tvm {tvm.version} in this environment, expected what pyproject.toml names")
    tag = re.search(r"^Tag: (\S+)$", tvm.read_text("WHEEL"), re.M)[1]
    info = f"{NAME.replace('-', '_')}-{version}.dist-info"
    contents = {name: path.read_bytes() for name, path in [*files_of_package(), *files_of_tvm(tvm)]}
    contents |= {f"{info}/licenses/{name}": path.read_bytes() for name, path in licenses(tvm)}
    contents[f"{info}/METADATA"] = metadata_text(version, project, tvm).encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    contents[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME.replace('-', '_')}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # without the time, so that equal contents make equal wheels
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))
