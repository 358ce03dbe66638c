"""The outcome of one case, and the function that runs a case in this process."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .backends import CONFIGURATIONS, BuiltOnly
from .cases import Case, load_case, mismatch

PASSED = "passed"
WRONG = "wrong"
REFUSED = "refused"
RAISED = "raised"
NOT_RUN = "not run"
CRASHED = "crashed"
STATUSES = (PASSED, WRONG, REFUSED, RAISED, NOT_RUN, CRASHED)
"""refused: a HeteroError; raised: any other exception; crashed: the process died, ran out of memory or of time."""


@dataclass
class Outcome:
    """One case in one configuration.

    Attributes
    ----------
    ops : list of str
        The op types of the graph, sorted; the first level only.
    detail : str
        Empty for a pass, else one line about the failure.
    seconds : float
        Wall time of import, build and run.
    """

    name: str
    status: str
    ops: list[str]
    detail: str = ""
    seconds: float = 0.0
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def _is_hetero_error(error: BaseException) -> bool:
    """True if `error` is a HeteroError; does not import the package, which (a) does not use."""
    return any(cls.__name__ == "HeteroError" for cls in type(error).__mro__)


def _last_frames(error: BaseException, count: int = 3) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-count:]
    return " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def run_case(name: str, configuration: str) -> Outcome:
    """Run one case in this process and never raise, whatever the backend does."""
    case = load_case(name)
    outcome = Outcome(name, PASSED, sorted({node.op_type for node in case.model.graph.node}))
    if configuration == "a" and not case.has_only_tensors:
        outcome.status, outcome.detail = NOT_RUN, "sequence or optional graph input or output"
        return outcome
    start = time.perf_counter()
    try:
        problem = _run(case, configuration)
        if problem is not None:
            outcome.status, outcome.detail = WRONG, problem
    except BuiltOnly:
        outcome.detail = "compiled, not run"
    except Exception as error:  # every failure of a backend is a result here
        outcome.status = REFUSED if _is_hetero_error(error) else RAISED
        outcome.detail = f"{type(error).__name__}: {error}"[:2000]
        outcome.where = _last_frames(error)
    outcome.seconds = round(time.perf_counter() - start, 3)
    return outcome


def _run(case: Case, configuration: str) -> str | None:
    backend = CONFIGURATIONS[configuration].prepare(case.model, inputs=case.data_sets[0][0])
    assert backend is not None
    for inputs, expected in case.data_sets:
        outputs = backend.run(inputs)
        if case.is_random:
            expected = [_as_drawn(value, want) for value, want in zip(outputs, expected, strict=True)]
        problem = mismatch(expected, outputs, case.rtol, case.atol)
        if problem is not None:
            return problem
    return None


def _as_drawn(output: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The expected draws, replaced by elements of `output` that are 0 or 1."""
    return np.where(np.isin(output, (0, 1)), output, draws) if output.shape == draws.shape else draws
