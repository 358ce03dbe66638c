"""Base class of importers: the emitted bindings and the node that owns each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import relax

from ..joined_sizes import known_sizes
from .control_flow.subgraphs import ImportedLoop
from .node_names import NodeInfo


class OwnedBindings:
    """Emitted bindings and their owners. The importer creates the builder, `loops` and `_owners`."""

    bb: relax.BlockBuilder
    loops: list[ImportedLoop]
    _owners: dict[relax.Var, NodeInfo]

    @contextmanager
    def block(self, info: NodeInfo) -> Iterator[list[relax.Binding]]:
        """Collect bindings that `info` or inner nodes own; sizes learnt inside are forgotten afterwards."""
        with known_sizes().scope(), self._collect_bindings() as bindings:
            yield bindings
        for binding in bindings:
            self._own(binding, info)

    @contextmanager
    def trial(self) -> Iterator[Callable[[], None]]:
        """Roll back loops, owners and sizes of bindings on exit, unless the yielded function was called."""
        owners, loops = len(self._owners), len(self.loops)
        with known_sizes().trial() as keep:
            try:
                yield lambda: keep.append(True)
            finally:
                if not keep[-1]:
                    del self.loops[loops:]
                    while len(self._owners) > owners:
                        self._owners.popitem()

    def adopt(self, bindings: list[relax.Binding], info: NodeInfo) -> None:
        """Emit bindings at the builder's position; `info` owns those that no inner node owns."""
        for binding in bindings:
            self._own(binding, info)
            self.bb.emit_normalized(binding)

    @contextmanager
    def _collect_bindings(self) -> Iterator[list[relax.Binding]]:
        """Collect emitted bindings into the yielded list, which is complete on exit."""
        bindings: list[relax.Binding] = []
        self.bb._begin_binding_block()
        try:
            yield bindings
        finally:
            bindings.extend(self.bb._end_block().bindings)

    def _own(self, binding: relax.Binding, info: NodeInfo) -> None:
        if binding.var not in self._owners:
            self._owners[binding.var] = info
            self._record_owned(binding, info)

    def _record_owned(self, binding: relax.Binding, info: NodeInfo) -> None:
        """Hook, called for each binding that gets an owner."""
