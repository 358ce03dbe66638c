"""Build the wheels and source distributions of all parts in `dist` from the last commit, twice, and compare the bytes.

Anyone can build the same bytes from the same commit: file times are that of the commit, and names are sorted. The files
are checked as a package index does. `make dist` runs this with fixed versions of build, setuptools and twine.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (".",)
"""Folders of the distributions: one row for each ``pyproject.toml``."""


def main() -> None:
    """Build into the folder that is the first argument, by default ``dist``, which is emptied."""
    output = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    if changed := _git("status", "--porcelain", "--untracked-files=no"):
        print(f"Not in these packages, because it is not committed:\n{changed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build(Path(folder, name)) for name in ("first", "second"))
        for one, other in zip(first, second, strict=True):
            if one.name != other.name or one.read_bytes() != other.read_bytes():
                sys.exit(f"{one.name}: two builds of one commit differ; compare them with diffoscope")
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        for path in first:
            shutil.copy(path, output)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    _run(sys.executable, "-m", "twine", "check", "--strict", *sorted(map(str, output.iterdir())))


def build(folder: Path) -> list[Path]:
    """Build all parts from a checkout of the last commit in a new folder; returns the files."""
    checkout, built = folder / "checkout", folder / "built"
    archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(checkout, filter="data")
    seconds = int(_git("log", "-1", "--format=%ct"))
    for part in PARTS:
        _build("--sdist", checkout / part, built / part, seconds)
        (source,) = (built / part).glob("*.tar.gz")
        normalize(source, seconds)
        with tarfile.open(source) as tar:
            tar.extractall(folder / "source" / part, filter="data")
        _build("--wheel", folder / "source" / part / source.name.removesuffix(".tar.gz"), built / part, seconds)
    return sorted(path for path in built.rglob("*") if path.is_file())


def normalize(path: Path, seconds: int) -> None:
    """Rewrite a source distribution, whose bytes then depend on its files only.

    Parameters
    ----------
    seconds : int
        Time of all files, in seconds since 1970.
    """
    with tarfile.open(path) as tar:
        files = [(member, tar.extractfile(member).read()) for member in tar.getmembers() if member.isfile()]
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in sorted(files, key=lambda pair: pair[0].name):
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mtime = len(data), seconds
            entry.mode = 0o755 if member.mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=seconds))


def _build(kind: str, source: Path, output: Path, seconds: int) -> None:
    """Build one kind of file; without isolation, because the environment has the fixed versions."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
    words = ["-m", "build", "--no-isolation", kind, "--outdir", str(output), str(source)]
    _run(sys.executable, *words, environment=environment)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


if __name__ == "__main__":
    main()
