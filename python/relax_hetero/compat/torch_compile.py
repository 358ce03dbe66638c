"""``torch.compile(model, backend="relax_hetero")``: graphs of TorchDynamo as compiled programs.

PyTorch finds `compile_graph` by the package's entry point. A graph is exported and compiled at its first call; one that
cannot be runs in PyTorch, and a log line says why.

TorchDynamo leaves LSTM, GRU and RNN layers out of graphs unless its setting ``allow_rnn`` is on, because other back
ends unroll them. It decides so before it calls a back end, thus loading this module turns the setting on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_hetero.driver.compile import compile
from relax_hetero.errors import HeteroError
from relax_hetero.frontend.from_torch import from_torch
from relax_hetero.vm.machine import VirtualMachine

log = logging.getLogger("relax_hetero.torch_compile")
_OPTIONS = ("placement", "vdevices")

if "torch" in sys.modules:
    sys.modules["torch"]._dynamo.config.allow_rnn = True


def compile_graph(
    graph: Any,  # graph with its parameters
    example_inputs: Sequence[Any],  # inputs, of which parameters and buffers become constants
    # ``vdevices`` and ``placement``, as `from_torch` takes them; by default the devices of the inputs.
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,  # mode of PyTorch's own compiler, which has no effect here; a log line says so
) -> Callable[..., Any]:
    """The function that replaces a graph (a backend of ``torch.compile``).

    Returns a function of the graph's inputs. Raises HeteroError for unknown options.
    """
    import torch

    unknown = [name for name in options or {} if name not in _OPTIONS]
    if unknown:
        raise HeteroError(f"torch.compile: options has {unknown[0]!r}, expected {' and '.join(_OPTIONS)}")
    if mode is not None:
        log.warning("torch.compile: mode=%r has no effect on the back end relax_hetero", mode)
    identifier = torch._guards.CompileContext.current_compile_id()
    return torch.compiler.disable(_GraphProgram(graph, f"graph {identifier}", dict(options or {})))


class _GraphProgram:
    """A graph, compiled at its first call, and again after its weights have been written to."""

    def __init__(
        self,
        graph: Any,
        name: str,  # name in messages
        options: dict[str, Any],  # options of the back end
    ) -> None:
        self._graph, self._name, self._options = graph, name, options
        self._machine: VirtualMachine | None = None
        self._is_refused = False
        self._tensors: list[int] = []
        self._numbers: set[int] = set()
        self._weights: list[Any] = []
        self._versions: list[int] = []

    def __call__(self, *args: Any) -> Any:
        import torch

        if self._is_refused:
            return self._graph(*args)
        trained = _input_with_gradient(self._graph, args) if torch.is_grad_enabled() else None
        if trained is not None:
            self._refuse(f"it is a training graph: {trained!r} needs a gradient; use torch.no_grad() for inference")
            return self._graph(*args)
        if self._machine is None or [weight._version for weight in self._weights] != self._versions:
            try:
                self._machine = self._compiled(args)
            except Exception as error:  # torch raises exceptions of any class
                self._refuse(str(error))
                return self._graph(*args)
        results = self._machine.call("main", tuple(args[index].detach() for index in self._tensors))
        values = results if isinstance(results, tuple) else (results,)
        return tuple(
            value.numpy().item() if index in self._numbers else torch.from_dlpack(value)
            for index, value in enumerate(values)
        )

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        log.warning("%s runs in PyTorch, because %s", self._name, reason)

    def _compiled(self, args: Sequence[Any]) -> VirtualMachine:
        import torch

        placeholders = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        _check_aliases(placeholders, self._graph.graph.output_node().args[0])
        is_weight = [_is_weight(node, value) for node, value in zip(placeholders, args, strict=True)]
        self._tensors = [
            index for index, value in enumerate(args) if isinstance(value, torch.Tensor) and not is_weight[index]
        ]
        axes, dynamic = _symbolic_axes(placeholders, self._tensors)
        weights = {index: value.detach() for index, value in enumerate(args) if is_weight[index]}
        self._weights = [weight for weight in weights.values() if not weight.is_inference()]
        self._versions = [weight._version for weight in self._weights]
        module = _module(self._graph, weights, self._tensors, _sizes(placeholders, args, axes))
        inputs = tuple(args[index].detach() for index in self._tensors)
        options = {"vdevices": _devices(args), **self._options}
        with torch.no_grad():
            mod = from_torch(
                module, inputs, dynamic_shapes={"tensors_of_call": tuple(dynamic)} if axes else None, **options
            )
        machine = VirtualMachine(compile(mod))
        signature = machine.executable.signature("main")
        results = self._graph.graph.output_node().args[0]
        self._numbers = {
            index for index, node in enumerate(results) if not isinstance(node.meta["example_value"], torch.Tensor)
        }
        if len(signature.inputs) != len(inputs) or len(signature.outputs) != len(results):
            raise HeteroError(
                f"it takes {len(inputs)} tensors and returns {len(results)} values, of which the program takes "
                f"{len(signature.inputs)} and returns {len(signature.outputs)}: others are numbers, or are written to"
            )
        return machine


def _input_with_gradient(graph: Any, args: Sequence[Any]) -> str | None:
    """The name of an input that needs a gradient, or None."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    needs = (name for name, value in zip(names, args, strict=True) if getattr(value, "requires_grad", False))
    return next(needs, None)


def _check_aliases(placeholders: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse a result that is a view of an input, because later code may write to it."""
    import torch

    def storage(node: Any) -> Any:
        value = node.meta.get("example_value") if hasattr(node, "meta") else None
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    inputs = {storage(node): node.name for node in placeholders}
    for node in results:
        if storage(node) is not None and storage(node) in inputs:
            raise HeteroError(f"its result {node.name!r} is a view of its input {inputs[storage(node)]!r}")


def _is_weight(node: Any, value: Any) -> bool:
    """Test for a parameter or buffer of a module, which has one address for all calls."""
    import torch

    is_static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return isinstance(value, torch.nn.Parameter) or (is_static and isinstance(value, torch.Tensor))


def _symbolic_axes(
    placeholders: Sequence[Any], tensors: Sequence[int]
) -> tuple[dict[str, tuple[int, int]], list[dict[int, Any]]]:
    """A tensor and axis for each symbol, and the dynamic axes of each tensor as `torch.export` takes them."""
    import torch

    axes: dict[str, tuple[int, int]] = {}
    dynamic: list[dict[int, Any]] = []
    for position, index in enumerate(tensors):
        entry: dict[int, Any] = {}
        for axis, size in enumerate(placeholders[index].meta["example_value"].shape):
            if not isinstance(size, int):
                entry[axis] = torch.export.Dim.AUTO
                axes.setdefault(str(size), (position, axis))
        dynamic.append(entry)
    return axes, dynamic


def _sizes(
    placeholders: Sequence[Any], args: Sequence[Any], axes: Mapping[str, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """The tensor and axis of each input that is a symbolic size."""
    sizes: dict[int, tuple[int, int]] = {}
    for index, (node, value) in enumerate(zip(placeholders, args, strict=True)):
        if isinstance(value, int | float | bool):
            symbol = str(node.meta["example_value"])
            if symbol not in axes:
                raise HeteroError(f"its input {node.name!r} is a number that is not the size of a tensor")
            sizes[index] = axes[symbol]
    return sizes


def _module(
    graph: Any, weights: Mapping[int, Any], tensors: Sequence[int], sizes: Mapping[int, tuple[int, int]]
) -> Any:
    """The module that takes tensors only: weights are its own, and sizes are those of the tensors."""
    import torch

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph
            for index, value in weights.items():
                self.register_buffer(f"weight_{index}", value)

        def forward(self, *tensors_of_call: Any) -> Any:
            values: dict[int, Any] = dict(zip(tensors, tensors_of_call, strict=True))
            values.update((index, getattr(self, f"weight_{index}")) for index in weights)
            values.update((index, tensors_of_call[at].shape[axis]) for index, (at, axis) in sizes.items())
            return self.graph(*(values[index] for index in sorted(values)))

    return Graph().eval()


def _devices(args: Sequence[Any]) -> list[str]:
    """The devices of the tensors; ``llvm`` for CPUs."""
    devices = {str(value.device) for value in args if hasattr(value, "device")}
    names = sorted("llvm" if device == "cpu" else device for device in devices)
    return names or ["llvm"]
