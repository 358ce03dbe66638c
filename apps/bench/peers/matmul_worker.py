"""One process of the matmul benchmark: every product at one thread count.

Thread counts of some libraries are fixed when a process starts, so `matmul.py` starts a worker for each count. Its
arguments come as JSON in ``argv``; each result is a line of JSON on the original standard output, and everything
that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from dataclasses import asdict, dataclass
from typing import Any

ENVIRONMENT = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """The work of a worker.

    Attributes
    ----------
    kinds, shapes, peers : tuple of str
        Keys of `peers.product.KINDS`, texts of `Shape`, names of packages (none: all installed ones).
    threads, rounds, seed : int
    no_weight : bool
        If true, both operands are activations.
    """

    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    peers: tuple[str, ...]
    threads: int
    rounds: int
    no_weight: bool
    seed: int = 0

    def command(self) -> list[str]:
        """The command line that runs it."""
        return [sys.executable, "-m", "peers.matmul_worker", json.dumps(asdict(self))]

    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        threads = dict.fromkeys(ENVIRONMENT, str(self.threads))
        benchmarks = str(pathlib.Path(__file__).resolve().parents[1])
        python_path = os.pathsep.join(filter(None, (benchmarks, os.environ.get("PYTHONPATH"))))
        return {**os.environ, **threads, "TVM_BIND_THREADS": "0", "PYTHONPATH": python_path}


def measure(job: Job, kind: str, shape_text: str) -> dict[str, Any]:
    """Make, verify and time all contestants of one product; returns a row of the report as JSON data."""
    from turns import take_turns

    from peers import OURS, Product, installed
    from peers.peak import peak
    from peers.shape import Shape, Unsupported

    shape = Shape.parse(shape_text)
    product = Product(shape, kind, weight=not (job.no_weight or shape.batch), seed=job.seed)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[Any, Any] = {}
    contestants = []  # they keep the buffers of their results alive
    for peer in [OURS, *installed(job.peers)]:
        row = rows[peer.name] = {}
        try:
            contestant = peer.make(product, job.threads)
            contestants.append(contestant)
            contestant.call()
            error = product.error(contestant.result())
            row.update(note=contestant.note, compile_seconds=contestant.compile_seconds)
            row["error"] = error if math.isfinite(error) else None  # JSON has no infinity
        except Unsupported as reason:
            row["unsupported"] = str(reason)
        except ImportError as error:  # installed, but it does not load here
            row["unsupported"] = f"not usable: {_first_line(error)}"
        except Exception as error:  # whatever a library raises belongs in its row
            row["failure"] = f"{type(error).__name__}: {_first_line(error)}"
        else:
            if error > 1:
                row["failure"] = f"wrong numbers: {error:.3g} times what is allowed"
            else:
                calls[peer.name] = contestant.call
                if contestant.kernel is not None:
                    calls[peer.name, "kernel"] = contestant.kernel
    full = str(shape)
    result = {
        "kind": kind,
        "shape": shape_text,
        "full_shape": full,
        "threads": job.threads,
        "weight": product.weight,
        "rows": rows,
    }
    operations = {name: shape.operations for name in calls}
    try:
        calls["peak"] = peak(kind, job.threads)
        operations["peak"] = calls["peak"].operations
        result["peak"] = rows["peak"] = {}
    except Unsupported:
        pass
    for name, timing in take_turns(calls, job.rounds, job.seed).items():
        row = rows[name] if isinstance(name, str) else rows[name[0]].setdefault("kernel", {})
        speeds = {"median": timing.median, "fastest": timing.fastest}
        row.update({f"{key}_gops": operations[name] / seconds / 1e9 for key, seconds in speeds.items()})
        row.update(calls=len(timing.seconds), restless=timing.restless)
    rows.pop("peak", None)
    return result


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")[:200]


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    # Libraries print to standard output, also from C++: results use a descriptor of their own.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for kind in job.kinds:
        for shape in job.shapes:
            print(json.dumps({"begins": f"{kind} {shape}"}), file=results, flush=True)
            print(json.dumps(measure(job, kind, shape)), file=results, flush=True)


if __name__ == "__main__":
    main()
