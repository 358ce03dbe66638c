"""Mistakes of a user that type checkers must find: one on each line that says ``error``."""

from __future__ import annotations

import relax_hetero as rh


def mistakes(exe: rh.vm.Executable) -> None:
    rh.compil(exe)  # error
    rh.transform.FormRow()  # error
    rh.llm.Engin  # error
    rh.cluster.Clusters  # error
    rh.op.atention  # error
    rh.compile(exe, chekcs="strict")  # error
    rh.vm.VirtualMachine()  # error
    rh.native(numa_node="zero")  # error
    rh.load(3)  # error
    exe.export_librari("model.so")  # error
    rh.transform.FormRows(True, 4)  # error
