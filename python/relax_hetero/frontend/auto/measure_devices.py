"""Figures of the devices of this machine, measured by the library's own kernels: a few seconds, once per machine.

Products of each element type, a sum over large tensors, chains of small kernels, and copies between every two devices.
Operands are weights and tensors that lie on the device already, as in a model, so that the figures are those of whole
models: what command buffers, graphs and queues cost is in them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ... import __version__
from ...artifact.cache_folder import folder_of
from ...artifact.kept_figures import find_figures, keep_figures
from ...driver.compile import compile as compile_module
from ...errors import HeteroError
from ...target.cpu_cores import num_cores
from ...target.element_types import numpy_dtype
from ...target.vdevice import device_name, is_cpu
from ...vm.machine import VirtualMachine

_log = logging.getLogger("relax_hetero")

TYPES = ("float32", "float16", "bfloat16")
"""Element types of the products that are measured."""

_FORM = 1  # of what is kept: another number for other kernels or meanings
_CHAIN = 4  # products of a call, each on the result of the one before
_KERNELS = 32  # small kernels of a call
_CROSSINGS = 8  # of a call that goes to and fro
_SMALL = 64
_LINK_BYTES = 64 << 20
_SECONDS = 0.06  # of a figure, unless one call takes longer


@dataclass(frozen=True)
class DeviceFigures:
    """A device, measured.

    Attributes
    ----------
    products : dict of str to float
        Operations per second of large matrix products, by element type.
    bandwidth : float
        Bytes per second to and from its memory.
    launch : float
        Seconds that a small kernel takes among others.
    """

    products: dict[str, float]
    bandwidth: float
    launch: float


@dataclass(frozen=True)
class LinkFigures:
    """A link, measured: bytes per second of large copies, seconds of a small one, seconds from step to step of a call.

    `crossing` is what it costs to go on there with a small result, when a call has steps on both devices.
    """

    bandwidth: float
    latency: float
    crossing: float


@dataclass(frozen=True)
class Figures:
    """Devices by their position in the list of vdevices, links by pairs of positions."""

    devices: tuple[DeviceFigures, ...]
    links: dict[tuple[int, int], LinkFigures] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        links = [[a, b, asdict(link)] for (a, b), link in self.links.items()]
        return {"devices": [asdict(device) for device in self.devices], "links": links}

    @classmethod
    def from_json(cls, data: Any) -> Figures:
        """From what `to_json` gave; ValueError, TypeError or KeyError for anything else."""
        devices = tuple(DeviceFigures(**device) for device in data["devices"])
        figures = cls(devices, {(int(a), int(b)): LinkFigures(**link) for a, b, link in data["links"]})
        numbers = [x for d in devices for x in (*d.products.values(), d.bandwidth, d.launch)]
        numbers += [x for link in figures.links.values() for x in asdict(link).values()]
        if not all(isinstance(x, float) and 0 < x < float("inf") for x in numbers):
            raise ValueError("no figures")
        return figures


def are_here(vdevices: Sequence[relax.VDevice]) -> bool:
    """Whether all these devices are on this machine: CPU code has to be for this very CPU."""
    return all(_is_here(vdevice) for vdevice in vdevices)


def figures_of(vdevices: Sequence[relax.VDevice], again: bool = False) -> Figures | None:
    """What was measured of these devices, on this machine; measured now where nothing is kept.

    Kept in the folder of the compile cache, and in this process where there is none.

    Parameters
    ----------
    vdevices: The devices, all of them here.
    again: Measure anew.

    Returns
    -------
    Figures: None where a kernel of the measurement fails.
    """
    key = _key(vdevices)
    if again:
        _measured.pop(key, None)
    elif key in _measured:
        return _measured[key]
    folder = folder_of()
    data = None if again or folder is None else find_figures(folder, key)
    if data is not None:
        try:
            return _measured.setdefault(key, Figures.from_json(data))
        except (ValueError, TypeError, KeyError) as error:
            _log.debug("measured figures are read no more: %s", error)
    try:
        found = _measure(vdevices)
    except HeteroError as error:
        _log.warning("the devices cannot be measured, so that placement goes by tables: %s", error)
        return None
    _measured[key] = found
    if folder is not None:
        keep_figures(folder, key, found.to_json())
    return found


_measured: dict[str, Figures] = {}


def _is_here(vdevice: relax.VDevice) -> bool:
    kind = vdevice.target.kind.name
    if is_cpu(vdevice):
        return kind == "llvm" and str(vdevice.target.attrs.get("mcpu", "")) == _native_cpu()
    device = tvm.runtime.device(kind, int(vdevice.vdevice_id))
    return bool(tvm.runtime.enabled(kind) and device.exist)


@cache
def _native_cpu() -> str:
    from ...target.native_target import native

    return str(native("llvm").attrs["mcpu"])


def _key(vdevices: Sequence[relax.VDevice]) -> str:
    parts: list[Any] = [_FORM, __version__, tvm.__version__, num_cores(), _cpu_model()]
    for vdevice in vdevices:
        device = tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)) if not is_cpu(vdevice) else None
        name = str(device.device_name) if device is not None and device.exist else ""
        parts += [str(vdevice.target), int(vdevice.vdevice_id), name]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


@cache
def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _measure(vdevices: Sequence[relax.VDevice]) -> Figures:
    _log.info("measuring %s, once on this machine", ", ".join(device_name(v, list(vdevices)) for v in vdevices))
    known: list[tuple[relax.VDevice, DeviceFigures]] = []
    for vdevice in vdevices:
        found = next((figures for other, figures in known if str(other.target) == str(vdevice.target)), None)
        known.append((vdevice, found or _measure_device(vdevice)))
    links = {}
    for a, first in enumerate(vdevices):
        for b, second in enumerate(vdevices):
            if a < b and not (is_cpu(first) and is_cpu(second)):
                links[a, b], links[b, a] = _measure_links(first, second)
    return Figures(tuple(figures for _, figures in known), links)


def _measure_device(vdevice: relax.VDevice) -> DeviceFigures:
    extent, stream = (1024, 16 << 20) if is_cpu(vdevice) else (4096, 128 << 20)
    builder = relax.BlockBuilder()
    for dtype in TYPES:
        _add_products(builder, dtype, vdevice, dtype, extent, _CHAIN)
    _add_products(builder, "one", vdevice, "float32", _SMALL, 1)
    _add_products(builder, "many", vdevice, "float32", _SMALL, 1 + _KERNELS)
    x = relax.Var("x", relax.TensorType((stream,), "float32", vdevice))
    with builder.function("stream", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(result)
    vm = _machine(builder, [vdevice])
    device = vm.devices[0]

    def seconds(name: str, shape: tuple[int, ...], dtype: str = "float32") -> float:
        array = _numbers(shape, dtype)
        tensor = tvm.runtime.tensor(array, device)
        return _seconds(lambda: vm[name](tensor), [device])

    operations = 2.0 * extent**3 * _CHAIN
    products = {dtype: operations / seconds(dtype, (extent, extent), dtype) for dtype in TYPES}
    one, many = (seconds(name, (_SMALL, _SMALL)) for name in ("one", "many"))
    return DeviceFigures(products, 8.0 * stream / seconds("stream", (stream,)), max((many - one) / _KERNELS, 1e-8))


def _add_products(
    builder: relax.BlockBuilder, name: str, vdevice: relax.VDevice, dtype: str, extent: int, count: int
) -> None:
    """A function of `count` products, each of the result before with a weight."""
    x = relax.Var("x", relax.TensorType((extent, extent), dtype, vdevice))
    numbers = tvm.runtime.tensor(_numbers((extent, extent), dtype))
    weight = relax.const(numbers, relax.TensorType((extent, extent), dtype, vdevice))
    with builder.function(name, [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for _ in range(count):
                value = builder.emit(relax.op.matmul(value, weight))
            result = builder.emit_output(value)
        builder.emit_func_output(result)


def _measure_links(first: relax.VDevice, second: relax.VDevice) -> tuple[LinkFigures, LinkFigures]:
    """From the first to the second, and back."""
    ends = [first, second]
    builder = relax.BlockBuilder()
    elements = _LINK_BYTES // 4
    for name, source, length in (("there", 0, elements), ("back", 1, elements), ("there1", 0, 16), ("back1", 1, 16)):
        x = relax.Var("x", relax.TensorType((length,), "float32", ends[source]))
        with builder.function(name, [x]):
            with builder.dataflow():
                result = builder.emit_output(relax.op.to_vdevice(x, ends[1 - source]))
            builder.emit_func_output(result)
    x = relax.Var("x", relax.TensorType((16,), "float32", first))
    with builder.function("cross", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for number in range(_CROSSINGS):
                value = builder.emit(relax.op.to_vdevice(relax.op.negative(value), ends[1 - number % 2]))
            result = builder.emit_output(relax.op.negative(value))
        builder.emit_func_output(result)
    vm = _machine(builder, ends)

    def seconds(name: str, length: int, end: int) -> float:
        array = _numbers((length,), "float32")
        given = array if is_cpu(ends[end]) else tvm.runtime.tensor(array, vm.devices[end])
        return _seconds(lambda: vm[name](given), vm.devices)

    crossing = seconds("cross", 16, 0) / _CROSSINGS
    found = []
    for end, name in enumerate(("there", "back")):
        latency = seconds(f"{name}1", 16, end)
        whole = seconds(name, elements, end)
        found.append(LinkFigures(_LINK_BYTES / max(whole - latency, 1e-9), latency, crossing))
    return found[0], found[1]


def _machine(builder: relax.BlockBuilder, vdevices: Sequence[relax.VDevice]) -> VirtualMachine:
    mod = builder.get()
    mod.update_global_info("vdevice", list(vdevices))
    return VirtualMachine(compile_module(mod))


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape, "float32") * 0.01).astype(numpy_dtype(dtype))


def _seconds(call: Callable[[], Any], devices: Sequence[tvm.runtime.Device]) -> float:
    """The median time of a call, devices idle before and after."""

    def once() -> float:
        start = time.perf_counter()
        kept = call()
        for device in devices:
            device.sync()
        taken = time.perf_counter() - start
        del kept
        return taken

    once()
    times = [once()]
    while sum(times) < _SECONDS and len(times) < 200:
        times.append(once())
    return statistics.median(times)
