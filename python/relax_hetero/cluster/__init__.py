"""Clusters of hosts: one module over several machines, on Ray (extra ``relax-hetero[cluster]``).

Names are resolved on first use, so that a host's process sets the number of its threads before TVM is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "CALL": ".call_plan",
    "CallPlan": ".call_plan",
    "Cluster": ".cluster",
    "Program": ".call_plan",
    "Source": ".call_plan",
    "Step": ".call_plan",
    "compile": ".cut.compiled_program",
    "load": ".cut.compiled_program",
}
_ATTRIBUTES = {"compile": "compile_program", "load": "load_program"}

__all__ = ["CALL", "CallPlan", "Cluster", "Program", "Source", "Step", "compile", "load"]


if TYPE_CHECKING:  # what checkers and editors see: a test compares these names with those of _EXPORTS
    from .call_plan import CALL as CALL
    from .call_plan import CallPlan as CallPlan
    from .call_plan import Program as Program
    from .call_plan import Source as Source
    from .call_plan import Step as Step
    from .cluster import Cluster as Cluster
    from .cut.compiled_program import compile_program as compile
    from .cut.compiled_program import load_program as load

else:  # a name that is not among them is an error to checkers

    def __getattr__(name: str) -> Any:
        if name not in _EXPORTS:
            raise AttributeError(f"module 'relax_hetero.cluster' has no attribute {name!r}")
        value = getattr(importlib.import_module(_EXPORTS[name], __name__), _ATTRIBUTES.get(name, name))
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
