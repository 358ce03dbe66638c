"""Bindings that an importer emits, and the node that owns each: what loops and branches need of an importer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import relax

from ..joined_sizes import known_sizes
from .control_flow.subgraphs import ImportedLoop
from .node_names import NodeInfo


class OwnedBindings:
    """A part of an importer, which makes the builder and the two collections."""

    bb: relax.BlockBuilder
    loops: list[ImportedLoop]
    _owners: dict[relax.Var, NodeInfo]

    @contextmanager
    def block(self, info: NodeInfo) -> Iterator[list[relax.Binding]]:
        """`_collected`; the node owns the bindings, unless a node inside it does. Sizes found inside are forgotten."""
        with known_sizes().scope(), self._collected() as bindings:
            yield bindings
        for binding in bindings:
            self._own(binding, info)

    @contextmanager
    def trial(self) -> Iterator[Callable[[], None]]:
        """Forget, when left, loops, owners and sizes of bindings made inside, unless what this yields was called."""
        owners, loops = len(self._owners), len(self.loops)
        with known_sizes().trial() as kept:
            try:
                yield lambda: kept.append(True)
            finally:
                if not kept[-1]:
                    del self.loops[loops:]
                    while len(self._owners) > owners:
                        self._owners.popitem()

    def adopt(self, bindings: list[relax.Binding], info: NodeInfo) -> None:
        """Emit bindings again where the builder stands; a node owns them unless an inner node does."""
        for binding in bindings:
            self._own(binding, info)
            self.bb.emit_normalized(binding)

    @contextmanager
    def _collected(self) -> Iterator[list[relax.Binding]]:
        """Collect what is emitted inside into the list this yields, complete once the block is left."""
        bindings: list[relax.Binding] = []
        self.bb._begin_binding_block()
        try:
            yield bindings
        finally:
            bindings.extend(self.bb._end_block().bindings)

    def _own(self, binding: relax.Binding, info: NodeInfo) -> None:
        if binding.var not in self._owners:
            self._owners[binding.var] = info
            self._note_owned(binding, info)

    def _note_owned(self, binding: relax.Binding, info: NodeInfo) -> None:
        """Told of each binding that gets an owner."""
