"""Transfers of encoded tensors between layouts: the relayout runs on the cheaper device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.packed_layout import PackedLayout
from ...op import encoded as ops
from ...target.cpu_target import cpu_target_of
from ...target.hosts import NETWORK_BYTES_PER_SECOND, host_of
from ...target.vdevice import on_one_device
from ..ir.rewriting import with_vdevice
from .encoded_values import extents_of
from .replaced_bindings import Replacement

# Throughput of a relayout on a GPU, on one core with vectors and without, and of a copy between two memories. Only
# their ratios matter. (Sources: memory of GPUs since 2020 gives 0.7 to 5 TB/s; packing kernels measured at 10 to
# 40 GB/s a core from memory, scalar loops at about 1; host memory copied at 20 GB/s, PCIe 4 x16 at 25.)
GPU_BYTES_PER_SECOND = 1000e9
VECTOR_BYTES_PER_SECOND = 20e9
SCALAR_BYTES_PER_SECOND = 1e9
LINK_BYTES_PER_SECOND = 20e9
_SYMBOLIC_EXTENT = 128  # assumed extent of a symbolic dimension, where the bytes of two layouts are compared


@dataclass(frozen=True)
class Crossing:
    """A transfer of an encoded tensor between two layouts."""

    encoding: Encoding
    ty: relax.TensorType  # logical type at the source
    source: relax.VDevice
    destination: relax.VDevice
    # Layouts at the source and at the destination.
    from_layout: PackedLayout
    to_layout: PackedLayout

    @property
    def is_relayout_at_source(self) -> bool:
        """True if a relayout at the source and the transfer take no longer than the transfer and a relayout after it.

        GPUs do not compute compensation and transformed windows; the CPU at the destination does.
        """
        if (self.to_layout.compensation or self.to_layout.winograd) and _is_gpu(self.source):
            return False
        old, new = self._bytes(self.from_layout), self._bytes(self.to_layout)
        at_source = (old + new) / _bytes_per_second(self.source) + self._transfer_seconds(new)
        at_destination = self._transfer_seconds(old) + (old + new) / _bytes_per_second(self.destination)
        return at_source <= at_destination

    def _transfer_seconds(self, size: int) -> float:
        if on_one_device(self.source, self.destination):
            return 0.0
        return size / (
            LINK_BYTES_PER_SECOND if host_of(self.source) == host_of(self.destination) else NETWORK_BYTES_PER_SECOND
        )

    def _bytes(self, layout: PackedLayout) -> int:
        extents = [int(e) if isinstance(e, tvm.tirx.IntImm) else _SYMBOLIC_EXTENT for e in extents_of(self.ty)]
        return int(layout.storage_bytes(extents, str(self.ty.dtype)))


def _bytes_per_second(vdevice: relax.VDevice) -> float:
    if _is_gpu(vdevice):
        return GPU_BYTES_PER_SECOND
    cpu = cpu_target_of(vdevice.target)
    return cpu.threads * (VECTOR_BYTES_PER_SECOND if cpu.isa.vector_bytes else SCALAR_BYTES_PER_SECOND)


def _is_gpu(vdevice: relax.VDevice) -> bool:
    return "gpu" in vdevice.target.keys


def transferred(value: relax.Expr, crossing: Crossing, out: Replacement) -> list[relax.Binding]:
    """Bindings that move an encoded `value` from the source to `out.var` at the destination, in its layout."""
    ty = with_vdevice(crossing.ty, crossing.destination)
    arguments = (crossing.encoding, crossing.to_layout, crossing.from_layout)
    transfer: Any = relax.op.to_vdevice
    if crossing.from_layout == crossing.to_layout:
        return out.finish(out.bind(transfer(value, crossing.destination), ty, "there"))
    if crossing.is_relayout_at_source:
        value = out.bind(ops.relayout(value, *arguments), crossing.ty, "laid_out")
        return out.finish(out.bind(transfer(value, crossing.destination), ty, "there"))
    value = out.bind(transfer(value, crossing.destination), ty, "there")
    return out.finish(out.bind(ops.relayout(value, *arguments), ty, "laid_out"))
