"""Compiled programs of a session: one for symbolic shapes, or one for each shape of inputs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_hetero.compat.errors import NotImplemented, as_errors_of_onnxruntime
from relax_hetero.compat.graph import Graph
from relax_hetero.compat.options import log
from relax_hetero.driver.compile import compile
from relax_hetero.errors import HeteroError
from relax_hetero.frontend.from_onnx import from_onnx
from relax_hetero.frontend.onnx.survey import NO_CONVERTER
from relax_hetero.frontend.onnx_report import onnx_report
from relax_hetero.transform.ir.module_attrs import DEFAULTS
from relax_hetero.vm.machine import VirtualMachine

_MAX_PROGRAMS = 32  # programs of one session; the oldest one is dropped

_Key = tuple[Any, ...]


class Programs:
    """Virtual machines of one model, made when they are needed."""

    def __init__(
        self,
        graph: Graph,
        vdevices: list[Any],  # devices, the first being the default
        per_shape: bool,  # whether each shape of inputs gets a program of its own
        threads: dict[str, Any],  # threads of the machines: `threads` and `spin` of `VirtualMachine`
    ) -> None:
        self._graph = graph
        self._threads = threads
        self._vdevices = None if vdevices == ["llvm"] else vdevices
        self._machines: OrderedDict[_Key, VirtualMachine] = OrderedDict()
        self._lock = threading.Lock()
        self._per_shape = per_shape and graph.is_dynamic
        if not self._per_shape:
            self._make_symbolic()

    @property
    def symbolic(self) -> VirtualMachine | None:
        """The machine for all shapes, or None."""
        return self._machines.get((False, None))

    def machine_for(self, feed: Mapping[str, Any]) -> VirtualMachine:
        """The machine for a call with these arguments."""
        overrides = any(arg.name in feed for arg in self._graph.overridable)
        omits = any(arg.name not in feed for arg in self._graph.inputs)
        shapes = self._shapes(feed) if self._per_shape or omits else None
        key: _Key = (overrides, shapes and tuple((name, str(shape)) for name, shape in shapes.items()))
        machine = self._machines.get(key)
        return machine if machine is not None else self._make(key, shapes)

    def _shapes(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        return {arg.name: _shape(feed[arg.name]) if arg.name in feed else None for arg in self._graph.inputs}

    def _make_symbolic(self) -> None:
        """Make the program for all shapes; if the model cannot have one, programs will be made shape by shape."""
        try:
            with as_errors_of_onnxruntime(NotImplemented):
                self._make((False, None), None)
        except HeteroError as error:
            if not self._graph.is_dynamic or _lacks_ops(self._graph):
                raise
            log.warning("a program for each shape of inputs, compiled at its first call, because: %s", error)
            self._per_shape = True

    def _make(self, key: _Key, shapes: dict[str, Any] | None) -> VirtualMachine:
        with self._lock:
            machine = self._machines.get(key)
            if machine is not None:
                return machine
            kinds = "all shapes" if shapes is None else f"the shapes {shapes}"
            log.info("compiling for %s, unless the compile cache has the program", kinds)
            begin = time.perf_counter()
            mod = from_onnx(self._graph.source, vdevices=self._vdevices, shapes=shapes)
            overrides = key[0]
            defaults = None if overrides else dict((mod["main"].attrs or {}).get(DEFAULTS, {}))
            machine = VirtualMachine(compile(mod, params=defaults or None), **self._threads)
            log.info("the program for %s is ready after %.1f s", kinds, time.perf_counter() - begin)
            self._machines[key] = machine
            if len(self._machines) > _MAX_PROGRAMS:
                self._machines.popitem(last=False)
            return machine


def _shape(value: Any) -> Any:
    return [_shape(element) for element in value] if isinstance(value, list) else list(np.shape(value))


def _lacks_ops(graph: Graph) -> bool:
    """Test for a node with no converter, so that no shapes would help."""
    try:
        return any(NO_CONVERTER in node.reason for node in onnx_report(graph.source).nodes)
    except HeteroError:
        return False
