"""The memory bandwidth of the CPU, measured by a loop that sums data too large for caches."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_hetero.target.cpu_target import cpu_target_of

from .peak import Peak
from .relax_module import native_target

# Several times the last cache of any of these CPUs.
_BYTES = 512 << 20
_CHAINS = 8


def read_bandwidth(threads: int) -> Peak:
    """The loop; its "operations" are the bytes that a run reads."""
    target = native_target(threads)
    lanes = cpu_target_of(target).lanes("float32")
    step = lanes * _CHAINS
    steps = _BYTES // 4 // step // threads
    executable = tvm.compile(tvm.IRModule({"read": _loop(threads, lanes, steps)}), target=target)
    data = tvm.runtime.tensor(np.ones(threads * steps * step, "float32"))
    sums = tvm.runtime.tensor(np.zeros((threads, step), "float32"))
    loop = executable["read"]
    return Peak(lambda: loop(data, sums), threads * steps * step * 4, executable.mod.inspect_source("asm"))


def _loop(threads: int, lanes: int, steps: int) -> tirx.PrimFunc:
    step = lanes * _CHAINS
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("read")
        T.func_attr({"tirx.noalias": True, "global_symbol": "read"})
        data = T.arg("data", T.buffer((threads * steps * step,), "float32"))
        sums = T.arg("sums", T.buffer((threads, step), "float32"))
        with T.sblock("root"), T.parallel(threads) as thread:
            chain = [T.alloc_buffer((lanes,), "float32", scope="global") for _ in range(_CHAINS)]
            vector = T.ramp(0, 1, lanes)
            for register in chain:
                T.buffer_store(register, T.broadcast(T.float32(0), lanes), [vector])
            with T.serial(steps) as number:
                for index, register in enumerate(chain):
                    begin = (thread * steps + number) * step + index * lanes
                    T.buffer_store(register, register[vector] + data[T.ramp(begin, 1, lanes)], [vector])
            for index, register in enumerate(chain):
                T.buffer_store(sums, register[vector], [thread, T.ramp(index * lanes, 1, lanes)])
    return builder.get()
