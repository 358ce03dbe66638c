"""relax_hetero: one TVM Relax model over several devices.

Names are resolved on first use, so that a process with only TVM's runtime can still load and run an
executable: nothing here imports the compiler before a compiler name is asked for.

Importing this package makes TVMScript look vdevices up strictly, whenever TVM is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .providers import provide
from .watch_tvmscript import watch_tvmscript

__version__ = "0.1.0"

# Public name -> (module, attribute); attribute None means the module itself.
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "HeteroError": (".errors", "HeteroError"),
    "VDeviceError": (".errors", "VDeviceError"),
    "PlacementError": (".errors", "PlacementError"),
    "EncodingError": (".errors", "EncodingError"),
    "FrontendError": (".errors", "FrontendError"),
    "BuildError": (".errors", "BuildError"),
    "BindingError": (".errors", "BindingError"),
    "MemoryLimitError": (".errors", "MemoryLimitError"),
    "HostError": (".errors", "HostError"),
    "VDevice": (".target.vdevice", "VDevice"),
    "native": (".target.vdevice", "native"),
    "encoding": (".encoding", None),
    "op": (".op", None),
    "transform": (".transform", None),
    "vm": (".vm", None),
    "from_gguf": (".frontend.from_gguf", "from_gguf"),
    "from_onnx": (".frontend.from_onnx", "from_onnx"),
    "from_torch": (".frontend.from_torch", "from_torch"),
    "place": (".frontend.place", "place"),
    "onnx_report": (".frontend.onnx_report", "onnx_report"),
    "ImportLimits": (".frontend", "ImportLimits"),
    "PagedCache": (".frontend", "PagedCache"),
    "show": (".report.shown_module", "show"),
    "compile": (".driver", "compile"),
    "get_pipeline": (".driver", "get_pipeline"),
    "load": (".vm", "load"),
    "cluster": (".cluster", None),
    "CacheError": (".errors", "CacheError"),
    "llm": (".llm", None),
}

__all__ = ["__version__", *_EXPORTS]


if TYPE_CHECKING:  # what checkers and editors see: a test compares these names with those of _EXPORTS
    from . import cluster as cluster
    from . import encoding as encoding
    from . import llm as llm
    from . import op as op
    from . import transform as transform
    from . import vm as vm
    from .driver.compile import compile as compile
    from .driver.pipeline import get_pipeline as get_pipeline
    from .errors import BindingError as BindingError
    from .errors import BuildError as BuildError
    from .errors import CacheError as CacheError
    from .errors import EncodingError as EncodingError
    from .errors import FrontendError as FrontendError
    from .errors import HeteroError as HeteroError
    from .errors import HostError as HostError
    from .errors import MemoryLimitError as MemoryLimitError
    from .errors import PlacementError as PlacementError
    from .errors import VDeviceError as VDeviceError
    from .frontend.from_gguf import from_gguf as from_gguf
    from .frontend.from_onnx import from_onnx as from_onnx
    from .frontend.from_torch import from_torch as from_torch
    from .frontend.import_limits import ImportLimits as ImportLimits
    from .frontend.onnx_report import onnx_report as onnx_report
    from .frontend.paged_cache import PagedCache as PagedCache
    from .frontend.place import place as place
    from .report.shown_module import show as show
    from .target.native_target import native as native
    from .target.vdevice import VDevice as VDevice
    from .vm.file.load import load as load

else:  # a name that is not among them is an error to checkers

    def __getattr__(name: str) -> Any:
        try:
            module_name, attribute = _EXPORTS[name]
        except KeyError:
            raise AttributeError(f"module 'relax_hetero' has no attribute {name!r}") from None
        try:
            module = importlib.import_module(module_name, __name__)
        except Exception as error:  # TVM's own modules fail in many ways without the compiler
            if not _runtime_only():
                raise
            from .errors import HeteroError

            raise HeteroError(f"relax_hetero.{name} needs TVM's compiler: found TVM's runtime only") from error
        value = module if attribute is None else getattr(module, attribute)
        globals()[name] = value
        return value


def _runtime_only() -> bool:
    from tvm import base

    return bool(base._RUNTIME_ONLY)


def __dir__() -> list[str]:
    return sorted(__all__)


provide("backends", f"{__name__}.backends", "BACKENDS")
provide("compile_commands", f"{__name__}.driver.commands.compile_commands", "compile_commands")
provide("explain", f"{__name__}.tools.explanation", "explain")
provide("explanation_of", f"{__name__}.tools.explanation", "explanation_of")
provide("report", f"{__name__}.report.written_report", "write_report")
for _what, _where in {
    "executable": "executables",
    "memory_plan": "memory",
    "function_use": "memory",
    "profile": "runs",
    "trace": "runs",
    "pass_trace": "passes",
}.items():
    provide(f"{_what}_html", f"{__name__}.report.html_of_{_where}", f"{_what}_html")
provide("pass_trace_page", f"{__name__}.report.html_of_passes", "pass_trace_page")
provide("pipeline_passes", f"{__name__}.driver.pipeline", "pipeline_passes")
provide("show_onnx_report", f"{__name__}.tools.onnx_report_tables", "show_onnx_report")
watch_tvmscript()
