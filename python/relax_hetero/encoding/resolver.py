"""Resolvers: the objects that turn an encoding into a layout and a problem into a kernel, and their registry by target.

A resolver answers three questions about a target that it was registered for: the layout of an operand (`resolve`), its
bytes (`storage_size`), and the kernel that computes on operands in these layouts (`kernel`). "None" as a layout means
"no layout here", and the encoding is cancelled. Other libraries register their own resolvers::

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
from .problem import CachedAttentionProblem, ExpertOrderProblem, MatmulProblem, Problem, QuantizedMatmulProblem


class EncodingResolver(ABC):
    """Layouts and kernels of a target; subclasses add no further public names.

    Attributes
    ----------
    name : str
        Name in messages and reports.
    problems : tuple of type
        Classes of problems that `kernel` solves, besides products, convolutions and elementwise ones.
    fuses_elementwise : bool
        Whether kernels of products and convolutions compute the elementwise ops that follow (`Epilogue`). If not, these
        ops are kernels of their own (`ElementwiseProblem`).
    cache_key : str, optional
        Text that changes whenever the answers do. Without it, modules for devices of a third party's resolver are not
        stored in the compile cache.
    """

    name = ""
    problems: tuple[type, ...] = ()
    fuses_elementwise = True
    cache_key: str | None = None

    @abstractmethod
    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Choose the layout of an operand, identity included; None: cancel the encoding.

        Called for each of the three operands of a product or convolution (``encoding.conv`` is not None); None for
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
        """Write the code that solves `problem` on this target; the problem's class documents its parameters.

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
        """Choose the layout of an operand that is not a constant, and so would be packed again in every call.

        Parameters
        ----------
        encoding, target
            See `resolve`.
        """
        return self.resolve(encoding, target)

    def convolution_form(self, encoding: Encoding, target: tvm.target.Target, weight: PackedLayout) -> str:
        """Algorithm of a convolution whose weight has this layout, and the reason; empty if there is only one.

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
        """Element types for which one attention kernel is at least as fast as separate products and softmax.

        Parameters
        ----------
        target : Target
            Target of the device that computes it.
        width : int
            Largest size of a head's query, key or value.
        """
        return frozenset()

    def group_columns(self, target: tvm.target.Target, dtype: str) -> int:
        """Channels that fill a tile: smaller groups of a convolution are merged up to it; 0: groups are not merged.

        Parameters
        ----------
        target : tvm.target.Target
            Target of the device that computes the convolution.
        dtype : str
            Element type of the operands.
        """
        return 0

    def block_layout(self, target: tvm.target.Target) -> BlockLayout | None:
        """Layout of block-quantized weights; None without a kernel that reads them.

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

    def sends_sum(self, problem: MatmulProblem | QuantizedMatmulProblem, target: tvm.target.Target) -> bool:
        """Return whether the kernel of a product can send its result to the GPUs that add it, and it saves time.

        Parameters
        ----------
        problem : MatmulProblem or QuantizedMatmulProblem
            Product without `sent`.
        target : tvm.target.Target
            Target of the device that computes it.
        """
        return False

    def multiplies_pairs(self, problem: MatmulProblem, target: tvm.target.Target) -> bool:
        """Return whether the kernel of a product can compute a second one of the same rows (`MatmulProblem.second`).

        Parameters
        ----------
        problem : MatmulProblem
            Product without `second`.
        target : tvm.target.Target
            Target of the device that computes it.
        """
        return False

    def expert_order(self, problem: QuantizedMatmulProblem, target: tvm.target.Target) -> ExpertOrderProblem | None:
        """Order of pairs of tokens and experts that a product with experts reads; None: it reads their numbers.

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

    def general_problem(self, problem: CachedAttentionProblem, target: tvm.target.Target) -> CachedAttentionProblem:
        """A problem with symbolic rows whose kernel is as fast, so that functions of several batch sizes share it.

        Parameters
        ----------
        problem : CachedAttentionProblem
            Problem of a call.
        target : tvm.target.Target
            Target of the device that computes it.

        Returns
        -------
        CachedAttentionProblem
            The same problem if there is none.
        """
        return problem

    def appends_in_own_kernel(self, problem: CachedAttentionProblem) -> bool:
        """Return whether a separate kernel writes new keys and values into their pages.

        Parameters
        ----------
        problem : CachedAttentionProblem
            Problem of a call.

        Returns
        -------
        bool
            False if the kernel of the attention writes them.
        """
        return False


class _NoResolver(EncodingResolver):
    """Resolver of a target without one: cancels every encoding."""

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
"""Resolvers that other libraries have registered, the latest last."""
# The answers of this library's resolvers change with its sources only.
_OWN_PACKAGE = f"{__name__.partition('.')[0]}."


def register_resolver(
    resolver: EncodingResolver, kind: str, features: Sequence[str] = (), priority: int = 0
) -> Callable[[], None]:
    """Register a resolver for targets of a kind that have all of the given features.

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
        The highest that fits answers; among equals the one with more features, then the latest. Built-in ones have 0.

    Returns
    -------
    Callable
        Removes the registration.

    Raises
    ------
    EncodingError
        If `resolver` does not derive from `EncodingResolver`, or has a public name that `EncodingResolver` lacks.
    """
    _check_resolver(resolver)
    entry = _Entry(resolver, kind, frozenset(features), priority)
    _entries.append(entry)
    return lambda: _unregister(entry)


def resolver_for(target: tvm.target.Target | str) -> EncodingResolver | None:
    """The resolver that answers for a target; None without one.

    Parameters
    ----------
    target : tvm.target.Target or str
        Target or its text.
    """
    target = tvm.target.Target(target)
    features = _features(target)
    entries = [*_own_entries(backend_of(target)), *_entries]
    matches = [
        (entry.priority, len(entry.features), position)
        for position, entry in enumerate(entries)
        if entry.kind == target.kind.name and features.issuperset(entry.features)
    ]
    return entries[max(matches)[2]].resolver if matches else None


def resolver_or_default(target: tvm.target.Target) -> EncodingResolver:
    """The resolver of a target; without one, a resolver that cancels every encoding."""
    return resolver_for(target) or _NO_RESOLVER


def resolver_key(target: tvm.target.Target) -> str | None:
    """A text that changes with the answers of a target's resolver; None if a third party's resolver lacks one."""
    if not _entries and _is_own(backend_of(target)):
        return ""  # this library's resolvers need not be imported
    resolver = resolver_for(target)
    if resolver is None or _is_own(resolver):
        return ""
    key, kind = resolver.cache_key, type(resolver)
    return None if key is None else f"{kind.__module__}.{kind.__qualname__} {key}"


def _is_own(value: object) -> bool:
    return type(value).__module__.startswith(_OWN_PACKAGE)


def _check_resolver(resolver: EncodingResolver) -> None:
    if not isinstance(resolver, EncodingResolver):
        raise EncodingError(f"found the resolver {resolver!r}, expected an object of a class of EncodingResolver")
    names = [name for name in dir(EncodingResolver) if not name.startswith("_")]
    for name in dir(resolver):
        if not name.startswith("_") and name not in names:
            matches = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {matches[0]!r}?" if matches else "names of your own begin with '_'"
            raise EncodingError(
                f"{resolver.name!r} has {name!r}, expected names of EncodingResolver: {', '.join(names)}; {hint}"
            )


@cache
def _own_entries(backend: Backend) -> tuple[_Entry, ...]:
    resolvers = backend.resolvers()
    if not _is_own(backend):
        for resolver, _ in resolvers:
            _check_resolver(resolver)
    return tuple(_Entry(resolver, backend.kind, frozenset(features), 0) for resolver, features in resolvers)


def _features(target: tvm.target.Target) -> frozenset[str]:
    cpu = cpu_target_of(target)
    return cpu.features | frozenset(map(str, target.keys)) | {f"isa={cpu.isa.name}", str(target.tag)}


def _unregister(entry: _Entry) -> None:
    # Equal registrations are different ones: compare by identity.
    _entries[:] = [registered for registered in _entries if registered is not entry]
