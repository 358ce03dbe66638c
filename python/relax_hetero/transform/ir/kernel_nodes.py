"""Which nodes of the model's graph each kernel call computes.

Values keep their names through the passes, and a pass that stores a value in another form adds an ending: "n2_encoded"
is the value "n2". So the results of most kernels name a node of the graph (`AnnotateGraph`). A kernel computes that
node, and all before it that lie behind no result of another kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from ...artifact.model_graph import CONSTANT, INPUT, KINDS, OP, OUTPUT, FunctionGraph, ModelGraph
from ...op.quantized_matmul import DEQUANTIZE_BLOCKS
from .blocks import used_vars
from .kernels import called_prim_func
from .op_names import HINT, TRANSFER
from .rewriting import op_name, walk_bindings

# Endings of a value in another form: encoded, in rows, with scratch memory beside it, cast, on a device, as a field.
_SAME_VALUE = re.compile(
    r"encoded|plain|packed|scratch|rows|attended|whole|made|product|sum|own|shared|constant|taken|numbers|phases|wide"
    r"|part\d*|float\d+|bfloat16|int\d+|uint\d+|llvm|cuda|\d+"
)
# Names that passes give where they have none; the model may have the same ones for something else.
_FRESH = re.compile(r"(lv|gv)\d*")


def kernel_nodes(
    mod: tvm.IRModule,
    named: tuple[str, relax.Function],
    graph: ModelGraph | None,
    aliases: Mapping[str, Sequence[str]],
    inside: Mapping[str, Sequence[str]],
) -> dict[relax.Var, tuple[int, ...]]:
    """The nodes of each kernel call of a function whose dispatches are formed.

    Parameters
    ----------
    mod : tvm.IRModule
    named : tuple of str and relax.Function
        A function with its name.
    graph : ModelGraph or None
        Graph of the placed module.
    aliases : mapping of str to sequence of str
        Variable to the values that it is, or holds side by side.
    inside : mapping of str to sequence of str
        Variable to the values that a fused kernel computes on its way to it.

    Returns
    -------
    dict of relax.Var to tuple of int
        Nodes by the variable of each kernel call; a node belongs to one kernel at most, those that only rearrange or
        check have none.
    """
    for function in graph.functions if graph is not None else ():
        if graph is not None and function.name == named[0]:
            return _Kernels(mod, function, graph.texts, aliases, inside).nodes_of(named[1])
    return {}


class _Kernels:
    """The kernels of one function, and the nodes that their results are: their heads."""

    def __init__(
        self,
        mod: tvm.IRModule,
        graph: FunctionGraph,
        texts: tuple[str, ...],
        aliases: Mapping[str, Sequence[str]],
        inside: Mapping[str, Sequence[str]],
    ) -> None:
        self._mod, self._aliases, self._inside, self._nodes = mod, aliases, inside, graph.nodes
        self._kinds = [KINDS[node.kind] for node in graph.nodes]
        self._names: dict[str, int] = {}
        twice: set[str] = set()
        for index, node in enumerate(graph.nodes):
            if self._kinds[index] not in (CONSTANT, OUTPUT):
                name = texts[node.name]
                twice.update([name] * (name in self._names))
                self._names[name] = index
        for name in twice:  # two values: nobody can say which
            del self._names[name]
        self._before = self._ancestors()
        # What depends on neither was computed at compile time; blocks of weights are unpacked by who reads them.
        varying = sum(
            1 << index
            for index, node in enumerate(graph.nodes)
            if self._kinds[index] == INPUT or texts[node.op] == DEQUANTIZE_BLOCKS
        )
        self._is_computed = [bool(before & varying) for before in self._before]
        self._heads: dict[relax.Var, set[int]] = {}
        self._stands: dict[relax.Var, frozenset[int]] = {}

    def _ancestors(self) -> list[int]:
        """For each node a bit for every node that it depends on, itself included."""
        found: list[int] = []
        for index, node in enumerate(self._nodes):
            bits = 1 << index
            for read, _ in node.pairs():
                bits |= found[read]
            found.append(bits)
        return found

    def nodes_of(self, func: relax.Function) -> dict[relax.Var, tuple[int, ...]]:
        for param in func.params:
            self._stands[param] = frozenset(self._named(param.name))
        makers: dict[relax.Var, relax.Var] = {}
        for binding in walk_bindings(func):
            var, value = binding.var, binding.value
            reads = self._reads(value)
            named = self._fitting(self._named(var.name), reads, var.name)
            if called_prim_func(self._mod, value) is not None:
                makers[var] = var
                # Its result may be one of its values, laid out for whoever reads it.
                within = [] if named else map(self._named, reversed(self._inside.get(var.name, ())))
                named = next(filter(None, within), named)
                self._heads[var] = set() if named & reads else set(named)
            else:
                # A field of a kernel's result, or a view of it, may have the name that the result has not.
                maker = next((makers[used] for used in used_vars(value) if used in makers), None)
                is_open = maker is not None and not self._heads[maker] and not named & reads
                if maker is not None and op_name(value) not in (TRANSFER, HINT):
                    makers[var] = maker
                    if is_open:
                        self._heads[maker] |= named
            self._stands[var] = frozenset(named or reads)
        return self._claimed()

    def _named(self, name: str) -> set[int]:
        """The nodes of a variable, whose name may have endings."""
        while True:
            if name in self._names:
                return {self._names[name]}
            if name in self._aliases:
                return {self._names[each] for each in self._aliases[name] if each in self._names}
            name, _, ending = name.rpartition("_")
            if not name or not _SAME_VALUE.fullmatch(ending):
                return set()

    def _fitting(self, named: set[int], reads: frozenset[int], name: str) -> set[int]:
        """The nodes, unless the name is one that anything may have and they do not depend on what is read."""
        fits = all(any(self._before[node] >> read & 1 for node in named) for read in reads)
        return named if fits or not _FRESH.match(name) else set()

    def _reads(self, value: relax.Expr) -> frozenset[int]:
        return frozenset(node for var in used_vars(value) for node in self._stands.get(var, ()))

    def _claimed(self) -> dict[relax.Var, tuple[int, ...]]:
        """Each head, and what lies before it up to other heads, inputs and transfers."""
        owners: dict[int, relax.Var] = {}
        for var, heads in self._heads.items():  # where several kernels make one value, the last completes it
            owners.update((head, var) for head in heads if self._kinds[head] == OP)
        claimed: dict[relax.Var, list[int]] = {var: [] for var in self._heads}
        for head, var in owners.items():
            claimed[var].append(head)
        taken = set(owners)
        for var in self._heads:
            waiting = list(claimed[var])
            while waiting:
                for read, _ in self._nodes[waiting.pop()].pairs():
                    if read not in taken and self._kinds[read] == OP and self._is_computed[read]:
                        taken.add(read)
                        claimed[var].append(read)
                        waiting.append(read)
        return {var: tuple(sorted(nodes)) for var, nodes in claimed.items()}
