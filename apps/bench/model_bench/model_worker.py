"""One process of the model benchmark: loads a model into contestants, checks them, and takes turns on request.

Arguments come as JSON in ``argv``, requests as lines of JSON on standard input; each answer is a line of JSON
on the original standard output, and everything that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from isa import HELD

ENVIRONMENT = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
FLOAT32_ALLOWED = (1e-3, 1e-5)
"""Allowed error compared with ONNX Runtime: relative, and of the largest number of an output."""


@dataclass(frozen=True)
class Job:
    """The work of a worker on one model.

    Attributes
    ----------
    action : str
        ``compile``, ``reference``, ``memory``, ``profile`` or ``regions``, which answer once; or ``turns``, which loads
        the model and serves requests.
    model : str
        The ONNX file.
    peers : tuple of str
        Keys of `model_peers.PEERS`.
    files : dict of str to str
        Compiled files by peer.
    threads : int
    arrays : str
        A ``.npz`` file: inputs under ``in:NAME``, ONNX Runtime's results under ``out:INDEX``.
    seconds : float
        Duration of a turn.
    precision : str
        Precision of float products: a key of `model_peers.PRECISIONS`.
    allowed : pair of float
        Allowed error, as in `FLOAT32_ALLOWED`.
    isa : str
        Newest instructions, a key of `isa.HELD`.
    cpu_time : bool
        Whether turns are timed by the CPU time of the process.
    max_error : float
        Multiple of the allowed error up to which a contestant is timed.
    """

    action: str
    model: str
    peers: tuple[str, ...]
    files: dict[str, str]
    threads: int
    arrays: str
    seconds: float = 0.25
    precision: str = "float32"
    allowed: tuple[float, ...] = FLOAT32_ALLOWED
    isa: str = ""
    cpu_time: bool = False
    max_error: float = 1.0

    def command(self) -> list[str]:
        """The command line that runs it."""
        return [sys.executable, "-m", "model_bench.model_worker", json.dumps(asdict(self))]

    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        threads = dict.fromkeys(ENVIRONMENT, str(self.threads))
        benchmarks = str(pathlib.Path(__file__).resolve().parents[1])
        python_path = os.pathsep.join(filter(None, (benchmarks, os.environ.get("PYTHONPATH"))))
        return {**os.environ, **threads, **HELD[self.isa], "TVM_BIND_THREADS": "0", "PYTHONPATH": python_path}


def _setting(job: Job) -> Any:
    from model_peers import Setting

    return Setting(job.threads, job.precision, job.isa)


def _arrays(file: str, kind: str) -> dict[str, Any]:
    import numpy as np

    with np.load(file) as stored:
        return {name.split(":", 1)[1]: stored[name] for name in stored.files if name.startswith(kind + ":")}


def compile_models(job: Job) -> dict[str, Any]:
    """Let each peer write its file; seconds without imports of libraries."""
    from model_peers import PEERS, Unsupported

    rows: dict[str, Any] = {}
    for key in job.peers:
        peer = PEERS[key].load_module()
        begin = time.perf_counter()
        try:
            peer.compile_model(job.model, job.files[key], _arrays(job.arrays, "in"), _setting(job))
        except Unsupported as reason:
            rows[key] = {"unsupported": str(reason)}
        else:
            rows[key] = {"compile_seconds": time.perf_counter() - begin}
    return rows


def add_reference(job: Job) -> dict[str, Any]:
    """Add ONNX Runtime's results to the file of inputs."""
    import numpy as np
    from model_peers.onnx_runtime import session

    inputs = _arrays(job.arrays, "in")
    results = session(job.model, job.threads).run(None, inputs)
    arrays = {f"in:{name}": array for name, array in inputs.items()}
    np.savez(job.arrays, **arrays, **{f"out:{index}": array for index, array in enumerate(results)})
    return {"outputs": len(results)}


def error_of(results: list[Any], expected: dict[str, Any], bounds: tuple[float, ...] = FLOAT32_ALLOWED) -> float:
    """Largest difference from the reference over the allowed one: up to 1 is right; infinity for other shapes."""
    import numpy as np

    worst = 0.0
    if len(results) != len(expected):
        return float("inf")
    for index, result in enumerate(results):
        right = expected[str(index)].astype("float64")
        if result.shape != right.shape:
            return float("inf")
        if not result.size:
            continue
        difference = np.abs(result.astype("float64") - right)
        allowed = bounds[0] * np.abs(right) + bounds[1] * float(np.max(np.abs(right))) + np.finfo("float32").tiny
        largest = float(np.max(difference / allowed))
        worst = max(worst, largest if np.isfinite(largest) else float("inf"))
    return worst


def measure_memory(job: Job) -> dict[str, Any]:
    """Bytes above those after the imports: with the model loaded, at the peak, and after three calls."""
    from memory import Peak, resident
    from model_peers import PEERS

    (key,) = job.peers
    inputs = _arrays(job.arrays, "in")
    peer = PEERS[key].load_module()
    peak = Peak()
    session = peer.load(job.model, job.files.get(key, ""), inputs, _setting(job))
    loaded = peak.bytes()
    for _ in range(3):
        session.call()
    return {"loading": loaded, "running": peak.bytes(), "after": max(0, resident("VmRSS") - peak.before)}


def profile_dispatches(job: Job) -> dict[str, Any]:
    """Times of our kernels, and the peaks of the machine, measured in the same process."""
    from model_peers import OURS
    from model_peers.ours import tensors_of

    import relax_hetero as rh
    from model_bench.dispatches import dispatches_of, measured_roof

    machine, operands = rh.vm.VirtualMachine(rh.load(job.files[OURS])), tensors_of(_arrays(job.arrays, "in"))
    dispatches = [asdict(dispatch) for dispatch in dispatches_of(machine, operands)]
    return {"roof": asdict(measured_roof(job.threads)), "dispatches": dispatches}


def count_regions(job: Job) -> dict[str, Any]:
    """Command buffers of each of our peers and their contents, and whether all peers compute the same bits."""
    from model_peers.ours import load

    import relax_hetero as rh

    inputs = _arrays(job.arrays, "in")
    counts: dict[str, Any] = {}
    bits = set()
    for key in job.peers:
        regions = rh.load(job.files[key]).metadata.regions
        counts[key] = {"regions": len(regions), "commands": sum(len(region.commands) for region in regions)}
        session = load(job.model, job.files[key], inputs, _setting(job))
        session.call()
        bits.add(b"".join(result.tobytes() for result in session.results()))
    return {"peers": counts, "equal": len(bits) == 1}


def serve(job: Job, answer: Callable[[Any], None]) -> None:
    """Load, check and report every contestant; then take a turn for each request."""
    import gc

    from turns import Timing, take_turn

    expected, inputs = _arrays(job.arrays, "out"), _arrays(job.arrays, "in")
    sessions: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for key in job.peers:
        rows[key], session = _loaded(key, job, inputs, expected)
        if session is not None:
            sessions[key] = session
    answer(rows)
    timings = {key: Timing() for key in sessions}
    clock = time.process_time if job.cpu_time else time.perf_counter
    gc.disable()
    for line in sys.stdin:
        key = json.loads(line)
        before = len(timings[key].seconds)
        take_turn(sessions[key].call, timings[key], job.seconds, clock)
        answer(timings[key].seconds[before:])
    sys.stdout.flush()


def _loaded(key: str, job: Job, inputs: dict[str, Any], expected: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from model_peers import PEERS, Unsupported

    row: dict[str, Any] = {}
    try:
        peer = PEERS[key].load_module()
        begin = time.perf_counter()
        session = peer.load(job.model, job.files.get(key, ""), inputs, _setting(job))
        row["load_seconds"] = time.perf_counter() - begin
        row["products"] = dict(session.products)
        begin = time.perf_counter()
        session.call()
        row["first_seconds"] = time.perf_counter() - begin
        error = error_of(session.results(), expected, job.allowed)
    except Unsupported as reason:
        return {"unsupported": str(reason)}, None
    except ImportError as failure:  # installed, but it does not load here
        return {"unsupported": f"not usable: {first_line(failure)}"}, None
    except Exception as failure:  # whatever a library raises belongs in its row
        return {"failure": f"{type(failure).__name__}: {first_line(failure)}"}, None
    row.update(error=min(error, 1e30), note=session.note)
    if error > job.max_error:
        row["failure"] = f"wrong numbers: {error:.3g} times what is allowed"
        return row, None
    return row, session


def first_line(error: Exception) -> str:
    """The last line of an error's text that is not empty."""
    return shortened(next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), ""))


def shortened(text: str) -> str:
    """Beginning and end of a long message."""
    return text if len(text) <= 500 else f"{text[:200]} … {text[-300:]}"


ACTIONS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "compile": compile_models,
    "reference": add_reference,
    "memory": measure_memory,
    "profile": profile_dispatches,
    "regions": count_regions,
}


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    # Libraries print to standard output, also from C++: answers use a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(data: Any) -> None:
        print(json.dumps(data), file=answers, flush=True)

    if job.action == "turns":
        serve(job, answer)
    else:
        answer(ACTIONS[job.action](job))
    answers.flush()
    os._exit(0)  # threads of some libraries hang or crash at the interpreter's end


if __name__ == "__main__":
    main()
