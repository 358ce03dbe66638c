"""Which devices' products `ToMixedPrecision` rounds, and which values are on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ...target.vdevice import VDeviceSpec, lookup, vdevice_index, vdevices_of
from ..ir.rewriting import tensor_types


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
        """Whether a product with this result is meant."""
        if self._meant is None:
            return True
        vdevice = _vdevice(var)
        return vdevice is not None and vdevice_index(vdevice, self._all) in self._meant

    def is_gpu(self, var: relax.Var) -> bool:
        """Whether a value is on a GPU: by its type, before placement where no other device is there."""
        vdevice = _vdevice(var)
        return self._only_gpus if vdevice is None else "gpu" in vdevice.target.keys


def _vdevice(var: relax.Var) -> relax.VDevice | None:
    return next((ty.vdevice for ty in tensor_types(var.ty)), None)
