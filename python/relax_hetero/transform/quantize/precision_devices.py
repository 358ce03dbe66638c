"""Which devices' products `ToMixedPrecision` rounds, and which values are on GPUs; the fastest type of a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from ...target.element_types import TF32
from ...target.native_target import native
from ...target.product_rates import product_rate
from ...target.vdevice import VDevice, VDeviceSpec, device_name, lookup, vdevice_index, vdevices_of
from ..ir.rewriting import tensor_types
from .precision_rules import WIDE_TYPE

_log = logging.getLogger("relax_hetero")

ERRORS = {WIDE_TYPE: 0.0, TF32: 2e-3, "bfloat16": 1e-2}
"""The largest error of a whole model's result, relative to the largest number in it, that each type was measured to
make (BERT-base and ResNet-50: half of that). Without float16, in which large activations are infinite."""


AUTO = "auto"


@dataclass(frozen=True)
class TypeChoice:
    """An element type, and the devices whose products are rounded to it; None: all, wherever they will be."""

    dtype: str
    devices: tuple[relax.VDevice, ...] | None


def choose_types(
    mod: tvm.IRModule, dtype: str, devices: Sequence[VDeviceSpec] | VDeviceSpec | None, accuracy: float
) -> list[TypeChoice]:
    """Choose the type that each device rounds to: the one asked for, or the fastest of the device.

    It is never bfloat16 on a device that multiplies it more slowly than float32.

    Devices are those of the module; this machine's CPU where it has none, as `rh.compile` has it.

    Raises
    ------
    VDeviceError
        For a device that the module does not have.
    """
    placed = vdevices_of(mod)
    known = placed or [VDevice(native("llvm"))]
    named = devices if isinstance(devices, (list, tuple)) else [devices]
    meant = known if devices is None else [lookup(device, known) for device in named]
    groups: dict[str, list[relax.VDevice]] = {}
    for vdevice in meant:
        chosen = _fastest_type(vdevice, accuracy) if dtype == AUTO else dtype
        if chosen == "bfloat16" and product_rate(vdevice.target, chosen) < 1:
            _log.info(
                "%s multiplies bfloat16 more slowly than float32: ToMixedPrecision rounds nothing there",
                device_name(vdevice, known),
            )
            chosen = WIDE_TYPE
        groups.setdefault(chosen, []).append(vdevice)
    if (devices is None or not placed) and len(groups) == 1:
        return [TypeChoice(chosen, None) for chosen in groups if chosen != WIDE_TYPE]
    return [TypeChoice(chosen, tuple(group)) for chosen, group in groups.items() if chosen != WIDE_TYPE]


def _fastest_type(vdevice: relax.VDevice, accuracy: float) -> str:
    """The element type whose products are fastest on a device, of those whose error is allowed."""
    allowed = [dtype for dtype, error in ERRORS.items() if error <= accuracy]
    return max(allowed, key=lambda dtype: product_rate(vdevice.target, dtype))


class PrecisionDevices:
    """The devices that are meant.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed, where `devices` are named.
    devices : sequence of str, tvm.runtime.Device or VDevice, or one of these, or None
        None: all.

    Raises
    ------
    VDeviceError
        For a device that the module does not have.
    """

    def __init__(self, mod: tvm.IRModule, devices: Sequence[VDeviceSpec] | VDeviceSpec | None) -> None:
        self._all = vdevices_of(mod)
        self._meant: set[int] | None = None
        if devices is not None:
            named = devices if isinstance(devices, (list, tuple)) else [devices]
            self._meant = {vdevice_index(lookup(device, self._all), self._all) for device in named}
        self._only_gpus = bool(self._all) and all("gpu" in vdevice.target.keys for vdevice in self._all)

    def has(self, var: relax.Var) -> bool:
        """Return whether a product with this result is meant."""
        if self._meant is None:
            return True
        vdevice = _vdevice(var)
        return vdevice is not None and vdevice_index(vdevice, self._all) in self._meant

    def is_gpu(self, var: relax.Var) -> bool:
        """Return whether a value is on a GPU: by its type, before placement where no other device is there."""
        vdevice = _vdevice(var)
        return self._only_gpus if vdevice is None else "gpu" in vdevice.target.keys


def _vdevice(var: relax.Var) -> relax.VDevice | None:
    return next((ty.vdevice for ty in tensor_types(var.ty)), None)
