"""Execution providers and devices: a provider names a kind of TVM device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tvm
from tvm.target import Target

from relax_hetero.compat.options import warn_once
from relax_hetero.target.native_target import native

_CPU = "CPUExecutionProvider"
KINDS = {"CUDAExecutionProvider": "cuda", _CPU: "llvm"}
"""Kind of the device that each provider names, in ONNX Runtime's order of preference."""
DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # device types of DLPack by ONNX Runtime's names


def get_all_providers() -> list[str]:
    """The providers that this library has devices for."""
    return list(KINDS)


def get_available_providers() -> list[str]:
    """The providers whose devices this computer has."""
    return [name for name, kind in KINDS.items() if kind == "llvm" or tvm.device(kind, 0).exist]


def get_device() -> str:
    """Kind of the default device, "GPU" or "CPU"."""
    return "CPU" if get_available_providers() == [_CPU] else "GPU"


def normalized(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> dict[str, dict[str, str]]:
    """The options of each available provider, in order; warns of others, as ONNX Runtime does.

    The CPU is always the last: it computes what no other device does.
    """
    available = get_available_providers()
    if providers is None or len(providers) == 0:
        providers, provider_options = available, None
    if isinstance(providers, str) or not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    pairs = [entry if isinstance(entry, tuple) else (entry, {}) for entry in providers]
    if provider_options is not None:
        if len(providers) != len(provider_options):
            raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
        pairs = list(zip(providers, provider_options, strict=True))
    chosen: dict[str, dict[str, str]] = {}
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], dict):
            raise ValueError("'providers' values must be either strings or (string, dict) tuples.")
        name, options = pair
        if name not in available:
            text = "', '".join(available)
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names."
                f"Available providers: '{text.replace(chr(39), '')}'",
                stacklevel=4,
            )
        elif name in chosen:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=4)
        else:
            chosen[name] = {str(key): str(value) for key, value in options.items()}
    chosen.setdefault(_CPU, {})
    return chosen


def vdevices_of(
    chosen: dict[str, dict[str, str]],  # options by provider, as `normalized` returns them
    threads: int,  # number of threads of the CPU; 0 for all cores
) -> list[Any]:
    """The devices that the module is placed over, the first being the default."""
    devices: list[Any] = []
    for name, options in chosen.items():
        kind = KINDS[name]
        for key in options.keys() - {"device_id"}:
            warn_once(f"option {key!r} of {name} has no effect here")
        device_id = int(options.get("device_id", 0))
        devices.append(_cpu_target(threads) if kind == "llvm" else f"{kind}:{device_id}")
    return devices


def _cpu_target(threads: int) -> Any:
    return "llvm" if not threads else Target({**dict(native("llvm").export()), "num-cores": threads})


class OrtDevice:
    """A device.

    Parameters
    ----------
    device_type : int
        Device type: 0 for CPUs, 1 for GPUs.
    memory_type : int
        Kind of memory, 0.
    device_id : int
        Number of the device.
    """

    def __init__(self, device_type: int, memory_type: int = 0, device_id: int = 0) -> None:
        self._type, self._memory, self._id = device_type, memory_type, device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """The device of a name, "cpu" or "cuda"."""
        return OrtDevice(list(DEVICE_TYPES).index(ort_device_name), 0, device_id)

    @staticmethod
    def cpu() -> int:
        """Device type of CPUs."""
        return 0

    @staticmethod
    def cuda() -> int:
        """Device type of GPUs."""
        return 1

    @staticmethod
    def default_memory() -> int:
        """The usual kind of memory."""
        return 0

    def device_type(self) -> str:
        """Name of the device's type."""
        return list(DEVICE_TYPES)[self._type]

    def device_id(self) -> int:
        """Number of the device."""
        return self._id

    def device_mem_type(self) -> int:
        """Kind of memory."""
        return self._memory
