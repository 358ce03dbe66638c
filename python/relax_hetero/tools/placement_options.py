"""Options for devices, placement and shapes, which most commands share."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..artifact.cache_folder import parse_size
from .installation.doctor import device_choices

F = TypeVar("F", bound=Callable[..., Any])


class VDeviceParam(click.ParamType):
    """``llvm``, ``cuda:1``, or a TVM target as a JSON object."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | dict[str, Any]:
        """Return the string, or the object if it is JSON."""
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            return value  # type: ignore[no-any-return]
        try:
            return json.loads(value)  # type: ignore[no-any-return]
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete devices of this machine."""
        return [CompletionItem(device) for device in device_choices() if device.startswith(incomplete)]


class PairParam(click.ParamType):
    """Two texts, split at the last ``=``: names of nodes may contain others.

    `name`: kinds of both texts, such as ``device=bytes``; `example`: example for the error message.
    """

    def __init__(self, name: str, example: str) -> None:
        self.name, self.example = name, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return both texts."""
        if isinstance(value, tuple):
            return value
        first, divider, second = value.rpartition("=")
        if not divider or not first or not second:
            self.fail(f"{value!r} is not {self.name.upper()}, such as {self.example}", param, ctx)
        return first, second

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete devices of this machine, if the second text is a device."""
        first, divider, second = incomplete.rpartition("=")
        if not divider or not self.name.endswith("=device"):
            return []
        return [CompletionItem(f"{first}={device}") for device in device_choices(":0") if device.startswith(second)]


class ShapeParam(click.ParamType):
    """``NAME=1x128``; ``NAME=`` is a scalar."""

    name = "name=shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, list[int]]:
        """Return the name and the extents."""
        if isinstance(value, tuple):
            return value
        name, divider, extents = value.rpartition("=")
        try:
            shape = [int(extent) for extent in extents.split("x")] if extents else []
        except ValueError:
            shape = [-1]
        if not divider or not name or any(extent < 0 for extent in shape):
            self.fail(f"{value!r} is not NAME=SHAPE, such as input_ids=1x128 or batch=8", param, ctx)
        return name, shape


class BytesParam(click.ParamType):
    """A number of bytes, such as ``500M`` or ``4G``."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        size = value if isinstance(value, int) else parse_size(value)
        if size is None:
            self.fail(f"{value!r} is not a number of bytes, such as 500M or 4G", param, ctx)
        return size


@dataclass(frozen=True)
class PlacementOptions:
    """Values of the options for devices, placement and shapes."""

    vdevices: tuple[str | dict[str, Any], ...]  # values of ``--vdevice``; empty for the native CPU
    rules: tuple[tuple[str, str], ...]  # values of ``--place``: pattern of node names or op types, and device
    auto: bool  # whether the cost model places the nodes
    objective: str | None  # ``--objective``: latency or throughput; None for the default
    # Values of ``--shape``: name of an input or of a symbolic dimension, and extents.
    shapes: tuple[tuple[str, list[int]], ...]
    # Values of ``--memory-limit``: device, and maximum number of bytes for ``--place-auto``.
    memory_limit: tuple[tuple[str, str], ...]
    optional: tuple[str, ...]  # values of ``--optional``: devices of the model that a computer may lack
    # ``--max-nodes`` and ``--max-computed``, limits of the import; None for the defaults.
    max_nodes: int | None
    max_computed: int | None

    @property
    def is_given(self) -> bool:
        """True if any option was used that does not apply to a compiled library."""
        return bool(self.vdevices or self.rules or self.auto or self.optional)

    def import_options(self, inputs: Collection[str] = ()) -> dict[str, Any]:
        """Keyword arguments for ``rh.from_onnx``; names of shapes that are not in `inputs` are dimensions."""
        placement = "auto" if self.auto else dict(self.rules) or None
        shapes: dict[str, list[int] | int] = {}
        for name, extents in self.shapes:
            shapes[name] = extents[0] if name not in inputs and len(extents) == 1 else extents
        devices = list(self.vdevices) or ["llvm"]
        options: dict[str, Any] = {"vdevices": devices, "placement": placement, "shapes": shapes or None}
        limits = {"nodes": self.max_nodes, "computed_bytes": self.max_computed}
        limit_values = {name: value for name, value in limits.items() if value is not None}
        if limit_values:
            from ..frontend import ImportLimits

            options["limits"] = ImportLimits(**limit_values)
        if self.memory_limit:
            options["memory_limit"] = dict(self.memory_limit)
        return options if self.objective is None else {**options, "objective": self.objective}


def _import_ops(ctx: click.Context, param: click.Parameter, modules: tuple[str, ...]) -> None:
    """Import modules that register ops; those of files are named after the file."""
    for name in modules:
        path = Path(name)
        try:
            if path.suffix != ".py":
                importlib.import_module(name)
                continue
            spec = importlib.util.spec_from_file_location(f"relax_hetero_ops_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look there for the module of a class
            spec.loader.exec_module(module)
        except Exception as error:  # the module is the user's
            raise click.UsageError(
                f"--ops {name}: {type(error).__name__}: {error}; expected the name of a module, or a .py file, that "
                "calls rh.frontend.register_op"
            ) from error


vdevice_option = click.option(
    "--vdevice",
    "vdevices",
    multiple=True,
    type=VDeviceParam(),
    metavar="DEVICE",
    help="Run the model on this device: llvm (this CPU), cuda:1, or a TVM target as JSON. Repeatable; "
    "the default is llvm.",
)


def memory_limit_option(auto: str, example: str) -> Callable[[F], F]:
    """``--memory-limit``, which implies the option `auto`."""
    return click.option(
        "--memory-limit",
        multiple=True,
        type=PairParam("device=bytes", example),
        metavar="DEVICE=BYTES",
        help=f"Place by cost, as {auto}, with at most this much memory on a device, such as {example}. Repeatable.",
    )


_OPTIONS = (
    click.option(
        "--ops",
        multiple=True,
        metavar="MODULE",
        expose_value=False,
        callback=_import_ops,
        help="Import a Python module, or a .py file, that registers ops with rh.frontend.register_op. Repeatable.",
    ),
    click.option(
        "--max-computed",
        type=BytesParam(),
        metavar="BYTES",
        help="Refuse a model that computes more bytes of constants when it is imported; the default is 640M.",
    ),
    click.option(
        "--max-nodes",
        type=click.IntRange(min=0),
        metavar="N",
        help="Refuse a model that becomes more nodes when it is imported; the default is 200,000.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        type=ShapeParam(),
        metavar="NAME=1x128",
        help="Give an input this shape, or a symbolic dimension this size (batch=8). Repeatable.",
    ),
    memory_limit_option("--place-auto", "cuda:0=4GB"),
    click.option(
        "--objective",
        type=click.Choice(["latency", "throughput"]),
        help="Minimize, with --place-auto, the time of one call (latency, the default), or the time between several "
        "calls in flight (throughput).",
    ),
    click.option("--place-auto", "auto", is_flag=True, help="Let the cost model place every node."),
    click.option(
        "--place",
        "rules",
        multiple=True,
        type=PairParam("pattern=device", "'/encoder/*=cuda:0'"),
        metavar="PATTERN=DEVICE",
        help="Put the nodes whose name or op type matches a glob pattern on a device; the first that matches "
        "decides, other nodes go to the first device. Repeatable.",
    ),
    click.option(
        "--optional",
        multiple=True,
        metavar="DEVICE",
        help="Let a machine lack this device (cuda:0), whose work then runs on the last CPU device. Repeatable, "
        "the most important first.",
    ),
    vdevice_option,
)
"""In reverse order of ``--help``."""


def placement_options(function: F) -> F:
    """Add ``--vdevice``, ``--place``, ``--shape`` and others to a command, which gets one `PlacementOptions`."""

    @functools.wraps(function)
    def collect(**options: Any) -> None:
        placing = PlacementOptions(**{each.name: options.pop(each.name) for each in fields(PlacementOptions)})
        if placing.rules and placing.auto:
            raise click.UsageError("--place and --place-auto exclude each other")
        if placing.objective is not None and not placing.auto:
            raise click.UsageError("--objective needs --place-auto")
        check_unique("--place", [pattern for pattern, _ in placing.rules])
        check_unique("--shape", [name for name, _ in placing.shapes])
        if placing.memory_limit and placing.rules:
            raise click.UsageError("--memory-limit bounds --place-auto: it excludes --place")
        check_unique("--memory-limit", [device for device, _ in placing.memory_limit])
        function(placing=replace(placing, auto=placing.auto or bool(placing.memory_limit)), **options)

    for option in _OPTIONS:
        option(collect)
    return collect  # type: ignore[return-value]


def check_unique(option: str, keys: list[str]) -> None:
    """Refuse an option that names something twice."""
    for key in keys:
        if keys.count(key) > 1:
            raise click.UsageError(f"{option} names {key!r} twice")
