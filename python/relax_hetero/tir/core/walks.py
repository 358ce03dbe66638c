"""Walks over programs of TIR and Relax: the nodes of some kinds, a test of them, and other values for variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import VisitInterrupt, structural_map, structural_walk


def nodes(root: Any, *kinds: type) -> list[Any]:
    """The nodes of some classes in a statement, an expression or a type, in order."""
    occurring: list[Any] = []
    structural_walk(root, (kinds, occurring.append))
    return occurring


def any_node(root: Any, kind: type | tuple[type, ...], test: Callable[[Any], bool]) -> bool:
    """Return whether a node of a class, or of one of several, meets a test."""
    return structural_walk(root, (kind, lambda node: VisitInterrupt(node) if test(node) else None)) is not None


def binds_threads(root: tirx.Stmt | tirx.PrimFunc) -> bool:
    """Return whether a loop in a statement or a kernel is bound to threads of a GPU."""
    return any_node(root, tirx.For, lambda loop: loop.kind == tirx.ForKind.THREAD_BINDING)


def replaced(root: Any, values: Mapping[Any, Any], kind: type = tvm.ir.Var) -> Any:
    """A statement, an expression, a type or a function with other values for some variables, or global variables."""
    return structural_map(root, (kind, lambda var: values.get(var, var))) if values else root
