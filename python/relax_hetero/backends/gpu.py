"""GPUs that TVM has a code generator for, and this library only loops."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import VDeviceError
from ..target.backend import Backend

if TYPE_CHECKING:
    import tvm


class GpuBackend(Backend):
    """A device of blocks and threads."""

    is_gpu = True

    def schedule(self, kernel: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
        """Blocks and threads by the rules of `tir.cuda.loops`, which need no instruction of CUDA alone."""
        from ..target.gpu_target import gpu_target_of
        from ..tir.cuda.loops import schedule

        return schedule(kernel, gpu_target_of(kernel.attrs["target"]))


class RocmBackend(GpuBackend):
    """GPUs of AMD."""

    def __init__(self) -> None:
        words = "amd amdgpu radeon hip gfx90a mi250 mi300 rocmexecutionprovider migraphx migraphxexecutionprovider"
        super().__init__("rocm", 10, "", "an AMD GPU", words)

    def native_target(self, index: int) -> tvm.target.Target:
        """As TVM detects it; without a GPU TVM would warn thirty times, and assume one of 2017."""
        import tvm

        if not tvm.runtime.device(self.kind, index).exist:
            example = json.dumps({"kind": self.kind, "mcpu": "gfx90a"})
            raise VDeviceError(
                f"{self.kind!r}: there is no such device on this machine whose architecture could be asked: "
                f"expected a target that says it, such as {example}, or another device ('llvm' is this CPU)"
            )
        return super().native_target(index)
