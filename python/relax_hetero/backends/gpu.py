"""Back ends of GPUs for which TVM generates code and this library only schedules loops."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import VDeviceError
from ..target.backend import Backend

if TYPE_CHECKING:
    import tvm


class GpuBackend(Backend):
    """Back end of a GPU."""

    is_gpu = True

    def schedule(self, kernel: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
        """Bind loops to blocks and threads (`tir.cuda.loops`, which is not specific to CUDA)."""
        from ..target.gpu_target import gpu_target_of
        from ..tir.cuda.loops import schedule

        return schedule(kernel, gpu_target_of(kernel.attrs["target"]))


class RocmBackend(GpuBackend):
    """Back end of AMD GPUs."""

    counted_by_ray = True

    def __init__(self) -> None:
        words = "amd amdgpu radeon hip gfx90a mi250 mi300 rocmexecutionprovider migraphx migraphxexecutionprovider"
        super().__init__("rocm", 10, "", "an AMD GPU", words)

    def native_target(self, index: int) -> tvm.target.Target:
        """The target that TVM detects; VDeviceError without a GPU, because TVM would assume one of 2017."""
        import tvm

        if not tvm.runtime.device(self.kind, index).exist:
            example = json.dumps({"kind": self.kind, "mcpu": "gfx90a"})
            raise VDeviceError(
                f"{self.kind!r}: there is no such device on this machine whose architecture could be asked: "
                f"expected a target that says it, such as {example}, or another device ('llvm' is this CPU)"
            )
        return super().native_target(index)
