"""Resolvers, found by target, turn an encoding into a layout.

A resolver is asked three things about a target that it was registered for: how an operand is stored (`resolve`), how
many bytes that takes (`storage_size`), and what computes on operands so stored (`kernel`). "None" to the first means
"no layout here", and the encoding is cancelled. Others register theirs without touching ours::

    register_resolver(MyResolver(), kind="llvm", features=["sve2"], priority=10)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import tvm
from tvm import tirx

from ..errors import EncodingError
from ..providers import provided
from ..target.cpu_target import cpu_target_of
from ..target.element_types import HALVES
from .block_weights import BlockLayout, Panels, panel_columns
from .encoding import Encoding
from .packed_layout import PackedLayout
from .problem import AttentionProblem, BlockProductProblem, Problem


@runtime_checkable
class EncodingResolver(Protocol):
    """Layouts and kernels of a target.

    A resolver may have a fourth method, ``resolve_activation``, with the parameters of `resolve`: how an operand is
    stored that is no constant, and so would be laid out anew in every call. Without it, `resolve` answers for all.
    It may have an attribute ``problems``, the classes of further problems that its `kernel` solves (see `solves`), a
    method ``block_layout`` of the target, which says how weights in blocks are stored (panels without it), a method
    ``page_order`` of the target, which says how keys lie in pages of a cache ("rows" without it), an attribute
    ``appends_apart`` (see the function `appends_apart`), a method ``unpacked_layout`` of a product with weights in
    blocks and the target (see the function `unpacked_layout`), a method
    ``attention_types`` of the target and a width (see the function `attention_types`), a method ``group_columns`` of
    the target and an element type (see the function `group_columns`), a method ``convolution_form`` of an encoding, a
    target and the weight's layout (see the function `convolution_form`), and an attribute ``cache_key``, a text that
    changes whenever its answers do: without it no module for its devices is kept in the compile cache.

    Attributes
    ----------
    name : str
        Name that reports and messages use.
    """

    name: str

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """How the operand is stored on this target, identity included; None: not at all, cancel the encoding.

        Asked for each of the three operands of a product or convolution (``encoding.moves`` is not None); None for
        one of them cancels all.

        Parameters
        ----------
        encoding : Encoding
            Op, element types and extents that the operand takes part in.
        target : tvm.target.Target
            Target of the device that computes the op.
        """

    def storage_size(self, encoding: Encoding, shape: Sequence[Any], target: tvm.target.Target) -> Any:
        """Bytes of a tensor of `shape` (extents may be PrimExprs) under its layout; an int or a PrimExpr.

        Parameters
        ----------
        encoding : Encoding
            Encoding of the tensor.
        shape : sequence of object
            Logical extents.
        target : tvm.target.Target
            Target of the device that holds the tensor.
        """

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """The code that solves `problem` on this target; parameters as the problem's class says.

        Parameters
        ----------
        problem : Problem
            Problem with the shapes and layouts of its operands.
        target : tvm.target.Target
            Target of the device that runs the kernel.
        """


@dataclass(frozen=True)
class _Entry:
    resolver: EncodingResolver
    kind: str
    features: frozenset[str]
    priority: int


_entries: list[_Entry] = []
"""Resolvers that others have registered, the latest last."""
# Their answers change with the sources of this library only.
_OURS = f"{__name__.partition('.')[0]}."


def register_resolver(
    resolver: EncodingResolver, kind: str, features: Sequence[str] = (), priority: int = 0
) -> Callable[[], None]:
    """Register a resolver for targets of a kind that have all of some LLVM features.

    Parameters
    ----------
    resolver : EncodingResolver
        Resolver with the methods of `EncodingResolver`.
    kind : str
        Target kind: "llvm", "c", "cuda", ...
    features : sequence of str
        LLVM features a target must have ("avx512f"); a target's tag, its keys and "isa=" with the
        name of its row of `INSTRUCTION_SETS` count as features too.
    priority : int
        The highest that fits answers; among equals the one with more features, then the latest. Ours have 0.

    Returns
    -------
    Callable
        Takes the registration back.
    """
    for method in ("resolve", "storage_size", "kernel"):
        if not callable(getattr(resolver, method, None)):
            raise EncodingError(f"resolver {resolver!r} has no method {method!r}; see EncodingResolver")
    entry = _Entry(resolver, kind, frozenset(features), priority)
    _entries.append(entry)
    return lambda: _take_back(entry)


def resolver_for(target: tvm.target.Target | str) -> EncodingResolver | None:
    """The resolver that answers for a target, None if there is none.

    Parameters
    ----------
    target : tvm.target.Target or str
        Target or its text.
    """
    target = tvm.target.Target(target)
    known = _features(target)
    entries = [*_own_entries(), *_entries]
    fitting = [
        (entry.priority, len(entry.features), position)
        for position, entry in enumerate(entries)
        if entry.kind == target.kind.name and known.issuperset(entry.features)
    ]
    return entries[max(fitting)[2]].resolver if fitting else None


def solves(target: tvm.target.Target, problem: type) -> bool:
    """True if the resolver of a target writes kernels for a class of problems, other than products and elementwise."""
    return problem in getattr(resolver_for(target), "problems", ())


def attention_types(target: tvm.target.Target, width: int) -> frozenset[str]:
    """Element types of which a target has attention in one kernel that is no slower than its parts; perhaps none.

    Parameters
    ----------
    width : int
        Maximum width of a head's query, key or value.
    """
    if not solves(target, AttentionProblem):
        return frozenset()
    choose = getattr(resolver_for(target), "attention_types", None)
    return frozenset(("float32", *HALVES)) if choose is None else frozenset(choose(target, width))


def group_columns(target: tvm.target.Target, dtype: str) -> int:
    """Channels that fill a target's tiles: smaller groups of a convolution join up to them; 0: groups stay."""
    choose = getattr(resolver_for(target), "group_columns", None)
    return 0 if choose is None else int(choose(target, dtype))


def convolution_form(target: tvm.target.Target, encoding: Encoding, weight: PackedLayout | None) -> str:
    """How a target computes a convolution whose weight is stored so, and why; empty where it has one form."""
    tell = getattr(resolver_for(target), "convolution_form", None)
    return "" if tell is None or weight is None else str(tell(encoding, target, weight))


def page_order(target: tvm.target.Target) -> str:
    """How keys lie in the pages of a cache on a target: one of `encoding.pages.ORDERS`."""
    choose = getattr(resolver_for(target), "page_order", None)
    return "rows" if choose is None else str(choose(target))


def appends_apart(target: tvm.target.Target) -> bool:
    """Return whether a target writes the keys and values of a chunk into their pages by a kernel of its own."""
    return bool(getattr(resolver_for(target), "appends_apart", False))


def unpacked_layout(target: tvm.target.Target, problem: BlockProductProblem) -> PackedLayout | None:
    """How the weights of a product of many rows are laid out as numbers of ``(k, n)``; None: it takes their bits."""
    choose = getattr(resolver_for(target), "unpacked_layout", None)
    return None if choose is None else choose(problem, target)


def block_layout(target: tvm.target.Target) -> BlockLayout | None:
    """How a target's kernels read weights in blocks; None where it has no kernels for them."""
    if not solves(target, BlockProductProblem):
        return None
    choose = getattr(resolver_for(target), "block_layout", None)
    return Panels(panel_columns(cpu_target_of(target))) if choose is None else choose(target)


def resolver_key(target: tvm.target.Target) -> str | None:
    """A text that changes with the answers of a target's resolver; None where it has none, as others' may."""
    resolver = resolver_for(target)
    kind = type(resolver)
    if resolver is None or kind.__module__.startswith(_OURS):
        return kind.__qualname__
    key = getattr(resolver, "cache_key", None)
    return None if key is None else f"{kind.__module__}.{kind.__qualname__} {key}"


@functools.cache
def _own_entries() -> tuple[_Entry, ...]:
    own = provided("own_resolvers")()
    return tuple(_Entry(resolver, kind, frozenset(features), 0) for resolver, kind, features in own)


def _features(target: tvm.target.Target) -> frozenset[str]:
    cpu = cpu_target_of(target)
    return cpu.features | frozenset(map(str, target.keys)) | {f"isa={cpu.isa.name}", str(target.tag)}


def _take_back(entry: _Entry) -> None:
    # By identity: equal registrations are different ones.
    _entries[:] = [other for other in _entries if other is not entry]
