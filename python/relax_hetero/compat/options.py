"""Options of sessions and of runs. A row of `UNSUPPORTED` says what happens to an option that has no effect here."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from relax_hetero.compat.errors import Fail, InvalidArgument, NotImplemented

log = logging.getLogger("relax_hetero.compat")


class GraphOptimizationLevel(IntEnum):
    """Levels of graph optimization."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Order of independent nodes."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Order of nodes."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


DEFAULTS: dict[str, Any] = {
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "enable_mem_reuse": True,
    "enable_profiling": False,
    "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
    "execution_order": ExecutionOrder.DEFAULT,
    "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
    "inter_op_num_threads": 0,
    "intra_op_num_threads": 0,
    "log_severity_level": -1,
    "log_verbosity_level": 0,
    "logid": "",
    "optimized_model_filepath": "",
    "profile_file_prefix": "onnxruntime_profile_",
    "use_deterministic_compute": False,
    "use_per_session_threads": True,
}
"""Attributes of `SessionOptions` and their defaults."""

_NO_ARENA = "memory is planned when the model is compiled, and one pool for each device holds the rest"
UNSUPPORTED: dict[str, str] = {
    "enable_cpu_mem_arena": _NO_ARENA,
    "enable_mem_pattern": _NO_ARENA,
    "enable_mem_reuse": _NO_ARENA,
    "execution_mode": "the nodes of one call run in order on each device; run_async overlaps calls",
    "execution_order": "the compiler chooses the order",
    "graph_optimization_level": "the compiler always runs all passes",
    "log_verbosity_level": "messages have no levels of verbosity",
    "use_per_session_threads": "threads belong to the calling thread",
}
"""Attributes without effect, and why; a value other than the default is said once."""

_REFUSED_ENTRIES = {
    "session.set_denormal_as_zero": "1",
    "session.load_model_format": "ORT",
    "session.save_model_format": "ORT",
    "ep.context_enable": "1",
    "session.disable_cpu_ep_fallback": "1",
}
"""Configuration entries that change results, or what a program may rely on, and the value that is refused."""
_SPINNING = "session.intra_op.allow_spinning"
"""Configuration entry of whether waiting threads spin before they sleep; "1" is the default."""
PER_SHAPE = "relax_hetero.compile_per_shape"
"""Configuration entry of this library: "1" compiles a program for each shape of inputs instead of a symbolic one."""

_warned: set[str] = set()


def warn_once(text: str, severity: int = 2) -> None:
    """Warn of an option that has no effect, once in this process, unless the log level hides warnings."""
    if severity <= 2 and text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


class _Entries:
    """Configuration entries, text by text."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _add_entry(self, key: str, value: str) -> None:
        self._entries[str(key)] = str(value)

    def _get_entry(self, key: str) -> str:
        if key not in self._entries:
            raise RuntimeError(f"Session config entry with name {key!r} is not set")
        return self._entries[key]


class SessionOptions(_Entries):
    """Options of a session, with ONNX Runtime's attributes and defaults (`DEFAULTS`)."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(DEFAULTS)
        self._dimensions: dict[str, int] = {}
        self._denotations: dict[str, int] = {}
        self._initializers: dict[str, Any] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in DEFAULTS:
            raise AttributeError(f"SessionOptions has no option {name!r}, expected one of {', '.join(DEFAULTS)}")
        if name in DEFAULTS:
            kind = type(DEFAULTS[name])
            value = os.fspath(value) if kind is str else kind(value)
        super().__setattr__(name, value)

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Fix the dimensions that have a name."""
        self._dimensions[name] = int(value)

    def add_free_dimension_override_by_denotation(self, denotation: str, value: int) -> None:
        """Fix the dimensions that have a denotation."""
        self._denotations[denotation] = int(value)

    def add_initializer(self, name: str, value: Any) -> None:
        """Replace an initializer by an `OrtValue`."""
        self._initializers[name] = value.numpy()

    def add_external_initializers(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Replace initializers by `OrtValue` objects."""
        for name, value in zip(names, values, strict=True):
            self.add_initializer(name, value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Set a configuration entry; InvalidArgument for one that would change results."""
        if _REFUSED_ENTRIES.get(key) == str(value):
            raise InvalidArgument.of(f"session config entry {key!r} is {value!r}, which is not supported here; omit it")
        self._add_entry(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """The value of a configuration entry."""
        return self._get_entry(key)

    def register_custom_ops_library(self, path: str) -> None:
        """Refused: such libraries are ONNX Runtime's own."""
        raise NotImplemented.of(
            f"{path}: libraries of custom ops need ONNX Runtime; expected each op as a Python function before the "
            "session is made: @rh.frontend.register_op(domain, op_type), with infer= for a numpy function"
        )

    def _threads(self) -> dict[str, Any]:
        """Threads of the session's machines, as `VirtualMachine` takes them."""
        return {"threads": self.intra_op_num_threads or None, "spin": self._entries.get(_SPINNING) != "0"}

    def has_providers(self) -> bool:
        """False: providers are arguments of the session."""
        return False

    def say_unsupported(self) -> None:
        """Warn, once each, of options that have no effect."""
        for name, reason in UNSUPPORTED.items():
            value = getattr(self, name)
            if value != DEFAULTS[name]:
                warn_once(f"SessionOptions.{name} = {value!r} has no effect: {reason}", self.log_severity_level)
        for key in self._entries.keys() - {PER_SHAPE, _SPINNING} - _REFUSED_ENTRIES.keys():
            warn_once(f"session config entry {key!r} has no effect here", self.log_severity_level)


class RunOptions(_Entries):
    """Options of one run.

    Attributes
    ----------
    log_severity_level, log_verbosity_level, logid : int, int, str
        Accepted: a run writes no messages.
    terminate : bool
        Whether runs with these options are refused.
    only_execute_path_to_fetches : bool
        Whether to skip the nodes of outputs that are not requested; without effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_severity_level = 2
        self.log_verbosity_level = 0
        self.logid = ""
        self.terminate = False
        self.only_execute_path_to_fetches = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Set a configuration entry."""
        self._add_entry(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """The value of a configuration entry."""
        return self._get_entry(key)

    def add_active_adapter(self, adapter: Any) -> None:
        """Refused: weights are part of the compiled model."""
        raise NotImplemented.of("adapters change weights, which are compiled here; export the model with them")

    def check(self) -> None:
        """Refuse a terminated run, and warn of options that have no effect."""
        if self.terminate:
            raise Fail.of("Exiting due to terminate flag being set to true.")
        if self.only_execute_path_to_fetches:
            warn_once("RunOptions.only_execute_path_to_fetches has no effect: all outputs are computed")
        for key in self._entries:
            warn_once(f"run config entry {key!r} has no effect here")
