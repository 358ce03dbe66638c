"""Processes of the model benchmark, which compile, load and time contestants in turns."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from model_peers import PEERS

from .model_worker import Job, shortened


class Worker:
    """A process that loads a model into contestants and takes turns on request."""

    def __init__(self, job: Job) -> None:
        self.keys = job.peers
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            job.command(), env=job.environment(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def answer(self) -> Any:
        """The next answer; EOFError if the process died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"its process ended with status {self._process.wait()}")
        return json.loads(line)

    def turn(self, key: str) -> list[float]:
        """Seconds of the calls of one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(key) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = self.answer()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def file_stem(text: str) -> str:
    """A label as the beginning of a file's name."""
    return re.sub(r"[^\w.]+", "-", text)


def at_once(job: Job, limit: float | None = None) -> dict[str, Any]:
    """Run a job with one answer; a failure is under ``failure``."""
    try:
        process = subprocess.run(job.command(), env=job.environment(), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {limit:.0f} s"}
    if process.returncode or not process.stdout:
        stderr = next((line.strip() for line in reversed(process.stderr.splitlines()) if line.strip()), "")
        return {"failure": f"status {process.returncode}: {shortened(stderr)}"}
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def prepare(
    job: Job, folder: Path, label: str, limit: float, family: str = ""
) -> tuple[Job, dict[str, dict[str, Any]]]:
    """Let the contestants that compile ahead of time do so, each in a process of its own.

    Existing files are reused. Returns the job with its files, and a row for each contestant; one that failed has the
    reason in its row and is not in the job.

    Parameters
    ----------
    job : Job
    folder : Path
        Folder of the files.
    label : str
        Prefix of their names.
    limit : float
        Time limit in seconds.
    family : str
        Prefix for files that serve all sizes; default: `label`.
    """
    rows: dict[str, dict[str, Any]] = {key: {} for key in job.peers}
    files: dict[str, str] = {}
    for key in job.peers:
        peer = PEERS[key]
        if not peer.installed:
            rows[key] = {"unsupported": f"{peer.package} is not installed"}
            continue
        if not peer.suffix:
            continue
        stem = file_stem(f"{family or label if peer.any_size else label} {job.threads} {key}")
        file, facts = (folder / f"{stem}{end}" for end in (peer.suffix, ".json"))
        files[key] = str(file)
        if not (file.exists() and facts.exists()):
            compiling = replace(job, action="compile", peers=(key,), files=files)
            answer = at_once(compiling, limit)
            facts.write_text(json.dumps(answer.get(key, answer)))
        rows[key] = json.loads(facts.read_text())
        if rows[key].keys() & {"failure", "unsupported"}:
            facts.unlink()
    able = tuple(key for key in job.peers if not rows[key].keys() & {"failure", "unsupported"})
    return replace(job, peers=able, files=files), rows


def time_models(job: Job, rows: dict[str, dict[str, Any]], rounds: int, cap: float, isolate: bool, seed: int) -> None:
    """Load the contestants of a job and time them in rounds; results go to their rows."""
    groups = [(key,) for key in job.peers] if isolate else [job.peers] if job.peers else []
    workers: dict[str, Worker] = {}
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for group in groups:
            worker = Worker(replace(job, peers=group))
            stack.callback(worker.close)
            try:
                loaded = worker.answer()
            except EOFError as error:
                loaded = {key: {"failure": str(error)} for key in group}
            for key, row in loaded.items():
                rows[key].update(row)
                if "failure" in row or "unsupported" in row:
                    continue
                workers[key] = worker
                seconds[key] = []
                if row["first_seconds"] > cap:
                    seconds[key] = [row["first_seconds"]]
                    del workers[key]
        order, shuffle = list(workers), random.Random(seed)
        for _ in range(rounds):
            shuffle.shuffle(order)
            for key in order:
                if workers[key] is not None:
                    seconds[key] += workers[key].turn(key)
    for key, seconds_of_peer in seconds.items():
        if seconds_of_peer:
            milliseconds = np.array(seconds_of_peer) * 1e3
            rows[key].update(median_ms=float(np.median(milliseconds)), fastest_ms=float(milliseconds.min()))
            rows[key].update(calls=len(seconds_of_peer))


def add_memory(job: Job, rows: dict[str, dict[str, Any]]) -> None:
    """Load and run each contestant of a job in a fresh process; bytes go to its row."""
    for key in job.peers:
        if not rows[key].keys() & {"failure", "unsupported"}:
            rows[key]["memory"] = at_once(replace(job, action="memory", peers=(key,)))
