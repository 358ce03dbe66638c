"""Programs of modules: the one place where the cut of a module by hosts and its run meet."""

from __future__ import annotations

from ..errors import HeteroError
from .call_plan import Program


def program_of(found: object) -> Program:
    """The program of a module, or a program as it is; HeteroError for anything else."""
    if isinstance(found, Program):
        found.check()
        return found
    raise HeteroError(f"a cluster runs a program, found {type(found).__name__}")
