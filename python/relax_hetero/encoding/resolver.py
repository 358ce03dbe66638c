"""Resolvers, found by target, turn an encoding into a layout.

A resolver is asked three things about a target that it was registered for: how an operand is stored (`resolve`), how
many bytes that takes (`storage_size`), and what computes on operands so stored (`kernel`). "None" to the first means
"no layout here", and the encoding is cancelled. Others register theirs without touching ours::

    register_resolver(MyResolver(), kind="llvm", features=["sve2"], priority=10)
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tvm
from tvm import tirx

from ..errors import EncodingError
from ..target.backend import Backend, backend_of
from ..target.cpu_target import cpu_target_of
from .block_weights import BlockLayout
from .encoding import Encoding
from .packed_layout import PackedLayout
from .problem import Problem, QuantizedMatmulProblem


class EncodingResolver(ABC):
    """Layouts and kernels of a target; subclasses have no other public names than these.

    Attributes
    ----------
    name : str
        Name in messages and reports.
    problems : tuple of type
        Classes of problems that `kernel` solves, besides products, convolutions and elementwise ones.
    appends_in_own_kernel : bool
        Whether keys and values of a chunk are written into their pages by a kernel of its own.
    cache_key : str, optional
        Text that changes whenever the answers do. Without it no module for devices of a third party's resolver is kept
        in the compile cache.
    """

    name = ""
    problems: tuple[type, ...] = ()
    appends_in_own_kernel = False
    cache_key: str | None = None

    @abstractmethod
    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Choose the layout of an operand, identity included; None: cancel the encoding.

        Asked for each of the three operands of a product or convolution (``encoding.moves`` is not None); None for
        one of them cancels all.

        Parameters
        ----------
        encoding : Encoding
            Op, element types and extents that the operand takes part in.
        target : tvm.target.Target
            Target of the device that computes the op.
        """

    @abstractmethod
    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """Write the code that solves `problem` on this target; parameters as the problem's class says.

        Parameters
        ----------
        problem : Problem
            Problem with the shapes and layouts of its operands.
        target : tvm.target.Target
            Target of the device that runs the kernel.
        """

    def storage_size(self, encoding: Encoding, shape: Sequence[Any], target: tvm.target.Target) -> Any:
        """Bytes of a tensor of `shape` (extents may be PrimExprs) under its layout: an int or a PrimExpr.

        Parameters
        ----------
        encoding : Encoding
            Encoding of the tensor.
        shape : sequence of object
            Logical extents.
        target : tvm.target.Target
            Target of the device that holds the tensor.
        """
        layout = self.resolve(encoding, target) or PackedLayout.identity(len(shape))
        return layout.storage_bytes(shape, encoding.element_type)

    def resolve_activation(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Choose the layout of an operand that is not a constant, and so would be laid out anew in every call.

        Parameters
        ----------
        encoding, target
            As `resolve` takes them.
        """
        return self.resolve(encoding, target)

    def convolution_form(self, encoding: Encoding, target: tvm.target.Target, weight: PackedLayout) -> str:
        """Algorithm of a convolution whose weight has this layout, and why; empty where there is one alone.

        Parameters
        ----------
        encoding : Encoding
            Encoding of the convolution.
        target : tvm.target.Target
            Target of the device that computes it.
        weight : PackedLayout
            Layout of the weight.
        """
        return ""

    def attention_types(self, target: tvm.target.Target, width: int) -> frozenset[str]:
        """Element types that one attention kernel computes no slower than its products and softmax would.

        Parameters
        ----------
        target : Target
            Target of the device that computes it.
        width : int
            Largest size of a head's query, key or value.
        """
        return frozenset()

    def group_columns(self, target: tvm.target.Target, dtype: str) -> int:
        """Channels that fill a tile: smaller groups of a convolution join up to them; 0: groups stay.

        Parameters
        ----------
        target : tvm.target.Target
            Target of the device that computes the convolution.
        dtype : str
            Element type of the operands.
        """
        return 0

    def block_layout(self, target: tvm.target.Target) -> BlockLayout | None:
        """Layout of block-quantized weights; None where no kernel reads them.

        Parameters
        ----------
        target : tvm.target.Target
            Target of the device that holds the weights.
        """
        return None

    def unpacked_layout(self, problem: QuantizedMatmulProblem, target: tvm.target.Target) -> PackedLayout | None:
        """Layout of the dequantized ``(k, n)`` weights for a product of many rows; None: it reads the bits.

        Parameters
        ----------
        problem : QuantizedMatmulProblem
            Product with block-quantized weights.
        target : tvm.target.Target
            Target of the device that computes it.
        """
        return None

    def page_order(self, target: tvm.target.Target) -> str:
        """Order of keys in the pages of a cache: one of `encoding.pages.ORDERS`.

        Parameters
        ----------
        target : tvm.target.Target
            Target of the device that holds the cache.
        """
        return "rows"


class _NoResolver(EncodingResolver):
    """Cancels every encoding of a target that nobody answers for."""

    name = "none"

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        return None

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        raise EncodingError(f"no resolver for target {target}")


_NO_RESOLVER = _NoResolver()


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
        Target kind: "llvm", "c", ...
    features : sequence of str
        LLVM features a target must have ("avx512f"); a target's tag, its keys and "isa=" with the
        name of its row of `INSTRUCTION_SETS` count as features too.
    priority : int
        The highest that fits answers; among equals the one with more features, then the latest. Ours have 0.

    Returns
    -------
    Callable
        Takes the registration back.

    Raises
    ------
    EncodingError
        If `resolver` does not derive from `EncodingResolver`, or has a public name that `EncodingResolver` lacks.
    """
    if not isinstance(resolver, EncodingResolver):
        raise EncodingError(f"found the resolver {resolver!r}, expected an object of a class of EncodingResolver")
    known = [name for name in dir(EncodingResolver) if not name.startswith("_")]
    for name in dir(resolver):
        if not name.startswith("_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "names of your own begin with '_'"
            raise EncodingError(
                f"{resolver.name!r} has {name!r}, expected names of EncodingResolver: {', '.join(known)}; {hint}"
            )
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
    entries = [*_own_entries(backend_of(target)), *_entries]
    fitting = [
        (entry.priority, len(entry.features), position)
        for position, entry in enumerate(entries)
        if entry.kind == target.kind.name and known.issuperset(entry.features)
    ]
    return entries[max(fitting)[2]].resolver if fitting else None


def answers_of(target: tvm.target.Target) -> EncodingResolver:
    """The resolver of a target; one that cancels every encoding where there is none."""
    return resolver_for(target) or _NO_RESOLVER


def resolver_key(target: tvm.target.Target) -> str | None:
    """A text that changes with the answers of a target's resolver; None where it has none, as others' may."""
    resolver = resolver_for(target)
    kind = type(resolver)
    if resolver is None or kind.__module__.startswith(_OURS):
        return kind.__qualname__
    key = resolver.cache_key
    return None if key is None else f"{kind.__module__}.{kind.__qualname__} {key}"


@cache
def _own_entries(backend: Backend) -> tuple[_Entry, ...]:
    return tuple(_Entry(resolver, backend.kind, frozenset(features), 0) for resolver, features in backend.resolvers())


def _features(target: tvm.target.Target) -> frozenset[str]:
    cpu = cpu_target_of(target)
    return cpu.features | frozenset(map(str, target.keys)) | {f"isa={cpu.isa.name}", str(target.tag)}


def _take_back(entry: _Entry) -> None:
    # By identity: equal registrations are different ones.
    _entries[:] = [other for other in _entries if other is not entry]
