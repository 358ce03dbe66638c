"""Random models under valgrind's memcheck: ``python tests/python/fuzz/under_valgrind.py --models 60``.

The models are compiled and exported here, for a CPU with AVX2 (valgrind knows no AVX-512), and called in one process of
valgrind with TVM's runtime only. Reads and writes of memory that nobody has allocated are findings; what valgrind says
of values that nobody has written is not, because an interpreter of a release build has many of them. Exits with 1 if
something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).parents[1])]

CPU = {"kind": "llvm", "mcpu": "haswell"}

CALLS = """
import os, pickle, sys
import relax_hetero as rh

for path in sys.argv[1:]:
    with open(path + ".calls", "rb") as file:
        calls = pickle.load(file)
    vm = rh.vm.VirtualMachine(rh.load(path))
    for inputs in calls:
        print("call", path, {name: value.shape for name, value in inputs.items()}, file=sys.stderr, flush=True)
        try:
            vm["main"](**inputs)
        except rh.HeteroError:
            pass
os._exit(0)
"""

_OF_THE_LINKER = ("_dl_map_object", "_dl_catch_exception", "_dl_relocate_object")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.seed, options.make)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        paths = _exported(options.models, options.seed, Path(folder))
        log = Path(folder) / "valgrind.log"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONMALLOC": "malloc",
            "TVM_NUM_THREADS": "2",
            "TVM_USE_RUNTIME_LIB": "1",
        }
        script = Path(folder) / "calls.py"
        script.write_text(CALLS)
        command = ["valgrind", "--undef-value-errors=no", "--error-limit=no", f"--log-file={log}", sys.executable]
        code = subprocess.run([*command, str(script), *map(str, paths)], env=environment, check=False).returncode
        errors = complaints(log.read_text())
    print(f"{len(paths)} models called under valgrind, exit status {code}, {len(errors)} findings")
    print("\n\n".join(errors))
    return int(bool(errors) or code != 0)


def _exported(count: int, seed: int, folder: Path) -> list[Path]:
    """Export models into a folder, as many as asked for, each with its calls.

    They are made in other processes, because ONNX Runtime, which the generator asks for shapes, dies of some models.
    """
    paths: list[Path] = []
    while len(paths) < count:
        subprocess.run([sys.executable, __file__, "--make", str(folder), "--seed", str(seed)], check=False)
        paths = sorted(folder.glob("*.so"))
        seed += 1
    return paths[:count]


def make(seed: int, folder: Path) -> None:
    """Up to ten models."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    import relax_hetero as rh
    from fuzz.onnx_graphs import problems

    counter = itertools.count()

    @seeded(seed)
    @settings(
        max_examples=10, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(problems())
    def export(problem: tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]) -> None:
        model, calls = problem
        path = folder / f"{seed}_{next(counter)}.so"
        Path(f"{path}.calls").write_bytes(pickle.dumps(calls))
        with contextlib.suppress(rh.HeteroError):
            rh.compile(rh.from_onnx(model, vdevices=[CPU])).export_library(str(path))

    export()


def complaints(log: str) -> list[str]:
    """Invalid accesses in a log of valgrind, except those of the dynamic linker."""
    blocks = re.split(r"\n==\d+== \n", log)
    bad = re.compile(r"Invalid (read|write|free)|overlap in|Process terminating")
    return [block for block in blocks if bad.search(block) and not any(name in block for name in _OF_THE_LINKER)]


if __name__ == "__main__":
    sys.exit(main())
