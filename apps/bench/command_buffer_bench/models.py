"""Whole models with and without command buffers, and in ONNX Runtime: in one process, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from model_bench.model_worker import Job
from model_bench.runs import at_once, prepare, time_models
from model_peers import OURS
from model_zoo import random_inputs

from command_buffer_bench.model_report import REFERENCE, WITHOUT

MODELS = (
    "minilm",
    "squeezenet",
    "shufflenet",
    "shufflenet_v2",
    "mobilenet_v2",
    "mobilenet_v3",
    "densenet121",
    "efficientnet_b0",
    "gpt2",
)
COMPILE_LIMIT, CAP = 300.0, 2.0


def measure_models(
    models: Sequence[tuple[str, Path]],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
    folder: Path,
    seed: int,
    compile_only: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a result for each model and thread count when it is measured.

    Parameters
    ----------
    models : sequence of (str, Path)
        Names and ONNX files.
    threads : sequence of int
    rounds : int
        Number of turns of each contestant.
    seconds : float
        Time for which each is measured, in all its turns.
    folder : Path
        Folder in which compiled files are kept and reused.
    seed : int
        Seed of inputs and turns.
    compile_only : bool
        If true, compile and time nothing.

    Raises
    ------
    RuntimeError
        If ONNX Runtime does not run the model.
    """
    for name, path in models:
        arrays = folder / f"{name}.npz"
        np.savez(arrays, **{f"in:{key}": array for key, array in random_inputs(path, {}, seed).items()})
        job = Job("reference", str(path), (), {}, max(threads), str(arrays), seconds / max(rounds, 1))
        reference = at_once(job)
        if "failure" in reference:
            raise RuntimeError(f"{name}: no reference by ONNX Runtime: {reference['failure']}")
        for count in threads:
            ready = replace(job, action="turns", peers=(OURS, WITHOUT, REFERENCE), threads=count)
            ready, rows = prepare(ready, folder, name, COMPILE_LIMIT)
            if not compile_only:
                time_models(ready, rows, rounds, CAP, False, seed)
            files = tuple(key for key in (OURS, WITHOUT) if key in ready.peers)
            yield {
                "model": name,
                "threads": count,
                "rows": rows,
                **at_once(replace(ready, action="regions", peers=files)),
            }
