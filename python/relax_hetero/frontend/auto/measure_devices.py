"""Figures of the devices of this machine, measured by the library's own kernels: a few seconds, once per machine.

Products of each element type, a sum over large tensors, chains of small kernels, and copies between every two devices.
Operands are weights and tensors that lie on the device already, as in a model, so that the figures are those of whole
models: what command buffers, graphs and queues cost is in them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

import numpy as np
import tvm
from tvm import relax

from ... import __version__
from ...artifact.cache_folder import folder_of
from ...artifact.figure_cache import load_figures, store_figures
from ...driver.compile import compile as compile_module
from ...errors import HeteroError
from ...target.backend import backend_of
from ...target.cpu_cores import CpuWatch, num_cores
from ...target.element_types import numpy_dtype
from ...target.hosts import host_of
from ...target.vdevice import is_cpu
from ...vm.device.memory_limit import clear_pools
from ...vm.machine import VirtualMachine

_log = logging.getLogger("relax_hetero")

F = TypeVar("F")

TYPES = ("float32", "float16", "bfloat16")
"""Element types of the products that are measured."""

_FORM = 2  # of what is kept: another number for other kernels or meanings
_CHAIN = 4  # products of a call, each on the result of the one before
_KERNELS = 32  # small kernels of a call
_CROSSINGS = 8  # of a call that goes to and fro
_SMALL = 64
_LINK_BYTES = 64 << 20
_SECONDS = 0.06  # of a figure, unless one call takes longer
_MAX_OTHER_WORK_SHARE = 0.15  # of the CPUs, beyond which figures are not kept
_REMEASURE_SECONDS = 300.0  # until figures of a busy machine are measured again


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
    call : float
        Seconds of a call of one small kernel, from an array to an array.
    """

    products: dict[str, float]
    bandwidth: float
    launch: float
    call: float


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
    """Devices by their position in the list of vdevices, links by pairs of positions; none between two CPUs.

    `others` is the share of the CPUs that other work took while the figures were measured, 0 where it was too little to
    matter.
    """

    devices: tuple[DeviceFigures, ...]
    links: dict[tuple[int, int], LinkFigures]
    others: float = 0.0


def are_present(vdevices: Sequence[relax.VDevice]) -> bool:
    """Return whether all these devices are on this machine: CPU code has to be for this very CPU."""
    return all(host_of(vdevice) is None and _is_present(vdevice) for vdevice in vdevices)


def figures_of(vdevices: Sequence[relax.VDevice], remeasure: bool = False) -> Figures | None:
    """Measurements of these devices, on this machine; taken now where nothing is kept.

    Kept in the folder of the compile cache, and in this process where there is none. What was measured while other work
    took much of the CPUs is kept for some minutes in this process alone, and measured again later.

    Parameters
    ----------
    vdevices : sequence of relax.VDevice
        The devices, all of them here.
    remeasure : bool
        Measure anew.

    Returns
    -------
    Figures
        None where a kernel of the measurement fails.
    """
    keys: list[str] = []
    try:
        devices = tuple(_cached(_DEVICE, [vdevice], remeasure, keys) for vdevice in vdevices)
        links = {}
        for a, b in itertools.combinations(range(len(vdevices)), 2):
            if not (is_cpu(vdevices[a]) and is_cpu(vdevices[b])):
                links[a, b], links[b, a] = _cached(_LINKS, [vdevices[a], vdevices[b]], remeasure, keys)
    except HeteroError as error:
        _log.warning("the devices cannot be measured, so that placement goes by tables: %s", error)
        return None
    return Figures(devices, links, max((_rough[key][0] for key in keys if key in _rough), default=0.0))


class _Kind(Generic[F]):
    """A kind of figures: how they are measured, and read from JSON data (ValueError or TypeError for other data)."""

    def __init__(self, name: str, measure: Callable[..., F], read: Callable[[Any], F]) -> None:
        self.name, self.measure, self.read = name, measure, read


def _cached(kind: _Kind[F], vdevices: Sequence[relax.VDevice], remeasure: bool, keys: list[str]) -> F:
    """Figures as they are kept, or measured now; `keys` gets their key, and `remeasure` measures each key once."""
    key = _key(kind.name, vdevices)
    remeasure = remeasure and key not in keys
    keys.append(key)
    if key in _rough and time.monotonic() > _rough[key][1]:
        del _rough[key], _measured[key]
    if key in _measured and not remeasure:
        return cast("F", _measured[key])
    folder = folder_of()
    if not remeasure and folder is not None:
        try:
            found = kind.read(load_figures(folder, key))
            _measured[key] = found
            return found
        except (TypeError, ValueError) as error:
            _log.debug("nothing was measured before: %s", error)
    _log.info("measuring %s", ", ".join(str(vdevice.target.kind.name) for vdevice in vdevices))
    watch = CpuWatch()
    found = kind.measure(*vdevices)
    others = watch.others()
    clear_pools()  # of the memory that measuring took
    _measured[key] = found
    _rough.pop(key, None)
    if others > _MAX_OTHER_WORK_SHARE:
        _rough[key] = others, time.monotonic() + _REMEASURE_SECONDS
        _log.warning(
            "%s: measured while other work took %.0f %% of the CPUs, so the figures are rough; they are not kept, and "
            "measured again later",
            ", ".join(str(vdevice.target.kind.name) for vdevice in vdevices),
            100 * others,
        )
    elif folder is not None:
        data = [asdict(part) for part in found] if isinstance(found, tuple) else asdict(found)  # type: ignore[call-overload]
        store_figures(folder, key, data)
    return found


_measured: dict[str, object] = {}
_rough: dict[str, tuple[float, float]] = {}
"""Figures of a busy machine: the share of the CPUs that other work took, and when they are to be measured again."""


def _is_present(vdevice: relax.VDevice) -> bool:
    kind = vdevice.target.kind.name
    if is_cpu(vdevice):
        return kind == "llvm" and str(vdevice.target.attrs.get("mcpu", "")) == _native_cpu()
    backend = backend_of(vdevice.target)
    return backend.load() and bool(tvm.runtime.device(backend.type_name, int(vdevice.vdevice_id)).exist)


@cache
def _native_cpu() -> str:
    from ...target.native_target import native

    return str(native("llvm").attrs["mcpu"])


def _key(kind: str, vdevices: Sequence[relax.VDevice]) -> str:
    threads = [os.environ.get(name, "") for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS")]
    parts: list[Any] = [kind, _FORM, __version__, tvm.__version__, num_cores(), *threads, cpu_model()]
    for vdevice in vdevices:
        device = tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)) if not is_cpu(vdevice) else None
        name = str(device.device_name) if device is not None and device.exist else ""
        # CPU devices of one target are the same cores.
        parts += [str(vdevice.target), int(vdevice.vdevice_id) if device is not None else 0, name]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


@cache
def cpu_model() -> str:
    """The name of this CPU; empty where the system does not say it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _measure_device(vdevice: relax.VDevice) -> DeviceFigures:
    extent, stream = (1024, 16 << 20) if is_cpu(vdevice) else (4096, 128 << 20)
    builder = relax.BlockBuilder()
    for dtype in TYPES:
        _add_products(builder, dtype, vdevice, dtype, extent, _CHAIN)
    _add_products(builder, "one", vdevice, "float32", _SMALL, 1, rows=1)
    _add_products(builder, "many", vdevice, "float32", _SMALL, 1 + _KERNELS, rows=1)
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
    one, many = (seconds(name, (1, _SMALL)) for name in ("one", "many"))
    row = _numbers((1, _SMALL), "float32")
    whole = _seconds(lambda: np.asarray(vm["one"](row)), [])
    bandwidth = 8.0 * stream / seconds("stream", (stream,))
    return DeviceFigures(products, bandwidth, max((many - one) / _KERNELS, 1e-8), whole)


def _add_products(
    builder: relax.BlockBuilder, name: str, vdevice: relax.VDevice, dtype: str, extent: int, count: int, rows: int = 0
) -> None:
    """A function of `count` products, each of the result before with a weight; of so many rows, or as many as columns.

    Kernels of one row are not divided among threads, so that their time is that of a kernel.
    """
    x = relax.Var("x", relax.TensorType((rows or extent, extent), dtype, vdevice))
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
    """The time of a call that a quarter of the calls do not exceed, devices idle before and after.

    What else runs on the machine makes calls slower, nothing makes them faster.
    """

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
    return sorted(times)[len(times) // 4]


def _read_device(data: Any) -> DeviceFigures:
    figures = DeviceFigures(**data)
    _check([*figures.products.values(), figures.bandwidth, figures.launch, figures.call])
    if set(figures.products) != set(TYPES):
        raise ValueError("products of other types")
    return figures


def _read_links(data: Any) -> tuple[LinkFigures, LinkFigures]:
    there, back = (LinkFigures(**link) for link in data)
    _check([*asdict(there).values(), *asdict(back).values()])
    return there, back


def _check(numbers: Sequence[Any]) -> None:
    if not all(isinstance(number, float) and 0 < number < float("inf") for number in numbers):
        raise ValueError("expected positive numbers")


_DEVICE = _Kind("device", _measure_device, _read_device)
_LINKS = _Kind("links", _measure_links, _read_links)
