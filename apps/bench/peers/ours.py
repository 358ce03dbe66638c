"""This library: ``rh.compile`` of the stock module, called through its virtual machine."""

from __future__ import annotations

import time

import tvm

import relax_hetero as rh

from .product import Contestant, Product
from .relax_module import native_target, relax_module, tensor


def matmul(product: Product, threads: int) -> Contestant:
    """``vm["main"](x)`` on a tensor; the machine allocates its result, as some of the peers do."""
    module = relax_module(product)
    module = rh.transform.RealizeVDevice()(rh.transform.UpdateVDevice(rh.VDevice(native_target(threads)))(module))
    begin = time.perf_counter()
    executable = rh.compile(module)
    seconds = time.perf_counter() - begin
    machine = rh.vm.VirtualMachine(executable)
    main = machine["main"]
    operands = [tensor(product.lhs)] + ([] if product.weight else [tensor(product.rhs)])
    results: list[tvm.runtime.Tensor] = []

    def call() -> None:
        results[:] = [main(*operands)]

    return Contestant(call, lambda: results[0].numpy(), f"compiled in {seconds:.2f} s")
