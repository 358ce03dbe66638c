"""Kernels that send values through a mailbox, and that receive them (`artifact.mailboxes`), on both devices.

Each has the mailbox as its first operand. A sender's result is a token, which the device's next receiver takes: it
keeps the order of the two, and has no contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as _instructions
from tvm.script.ir_builder import tirx as T

from ...artifact.mailboxes import DATA, VALUE_ALIGNMENT
from ...target.element_types import bytes_of
from ..core.builder import Function, load_lanes, loop, store_lanes, when
from ..cuda.core import ptx
from ..cuda.core.launch import enable_pdl, launch, local
from .command_list import ADDRESS, ADDRESS_TEXT

WORD = 4  # values are copied in words; the bytes of each are a multiple of it

_THREADS = 1024
_LANES = 16  # words of a vector on CPUs

_SPINS = 1 << 28  # number of times that a CPU reads the flag of a mailbox before it asks whether the GPU works

_AWAIT, _SET = "relax_hetero.await_flag", "relax_hetero.set_flag"
AWAIT_SLOWLY = "relax_hetero.await_mailbox"
"""Packed function of a mailbox's address and a flag that a CPU calls when its flag stays another one for long."""

_TEXT = f"""
define linkonce_odr hidden i32 @{_AWAIT}(ptr %flag, i32 %wanted) alwaysinline {{
entry:
  br label %poll
poll:
  %count = phi i64 [ 0, %entry ], [ %next, %again ]
  %value = load atomic volatile i32, ptr %flag acquire, align 4
  %found = icmp eq i32 %value, %wanted
  br i1 %found, label %done, label %again
again:
  %next = add i64 %count, 1
  %late = icmp eq i64 %next, {_SPINS}
  br i1 %late, label %done, label %poll
done:
  %result = phi i32 [ 1, %poll ], [ 0, %again ]
  ret i32 %result
}}
define linkonce_odr hidden i32 @{_SET}(ptr %flag, i32 %value) alwaysinline {{
  store atomic i32 %value, ptr %flag release, align 4
  ret i32 0
}}
"""
"""LLVM IR of what TIR cannot express: ordered accesses of the flag."""


class Values:
    """Values of a mailbox, and their positions in it.

    Parameters
    ----------
    shapes : sequence of (tuple of int, str)
        Shape and element type of each value.

    Attributes
    ----------
    offsets : list of int
        Position of each value in the mailbox, in bytes.
    nbytes : int
        Bytes of all values, with gaps.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], str]]) -> None:
        self.shapes = list(shapes)
        self.sizes = [prod(shape) * bytes_of(dtype) for shape, dtype in shapes]
        self.offsets, self.nbytes = [], 0
        for size in self.sizes:
            self.offsets.append(DATA + self.nbytes)
            self.nbytes += -(-size // VALUE_ALIGNMENT) * VALUE_ALIGNMENT


def mailbox_kernel(
    values: Values,  # values of the mailbox
    # Whether it sends; its result is a token. A receiver's results are the values.
    is_sender: bool,
    on_gpu: bool,  # whether it is a kernel of a GPU
    has_token: bool,  # whether it takes a token
) -> tirx.PrimFunc:
    """A kernel of a mailbox, of the values that are sent if there are some, a token if there is one, and results."""
    name = "send" if is_sender else "receive"
    with Function(name, registers="local" if on_gpu else "global") as function:
        mailbox = function.argument("mailbox", [tirx.IntImm("int64", DATA)], "uint8")
        tensors: list[Any] = []
        if is_sender:
            tensors = _arguments(function, values)
        for token in [*(["before"] if has_token else []), *(["token"] if is_sender else [])]:
            function.argument(token, [tirx.IntImm("int64", 1)], "int32")
        if not is_sender:
            tensors = _arguments(function, values)
        with function.body():
            copies = [
                _Copy(mailbox, offset, tensor, size, is_sender)
                for offset, tensor, size in zip(values.offsets, tensors, values.sizes, strict=True)
            ]
            (_on_gpu if on_gpu else _on_cpu)(mailbox, copies, is_sender)
    # The other device writes the memory, which the compiler must read where the code does.
    kernel = function.result.without_attr("global_symbol").with_attr("tirx.noalias", False)
    return enable_pdl(kernel).with_attr("tirx.is_scheduled", True) if on_gpu else kernel


def _arguments(function: Function, values: Values) -> list[Any]:
    return [
        function.argument(f"value{i}", [tirx.IntImm("int64", extent) for extent in shape], dtype)
        for i, (shape, dtype) in enumerate(values.shapes)
    ]


class _Copy:
    """A copy between a tensor and its place in a mailbox, both as words.

    Attributes
    ----------
    first_source, first_target : int
        Index of the first word of each.
    """

    def __init__(self, mailbox: Any, offset: int, tensor: Any, size: int, is_sender: bool) -> None:
        self.words = size // WORD
        first = offset // WORD
        place = T.decl_buffer((tirx.IntImm("int64", first + self.words),), "uint32", data=mailbox.data)
        elements = T.decl_buffer((tirx.IntImm("int64", self.words),), "uint32", data=tensor.data)
        ends = [(elements, 0), (place, first)]
        (self.source, self.first_source), (self.target, self.first_target) = ends if is_sender else ends[::-1]


def _on_cpu(mailbox: Any, copies: Sequence[_Copy], is_sender: bool) -> None:
    with T.attr(0, "pragma_import_llvm", ADDRESS_TEXT + _TEXT):
        # A value of the last call may still be there, which the GPU has to read first.
        wanted = T.int32(int(not is_sender))
        with when(tirx.EQ(tirx.call_extern("int32", _AWAIT, mailbox.data, wanted), 0)):
            T.evaluate(tirx.call_packed(AWAIT_SLOWLY, tirx.call_extern("int64", ADDRESS, mailbox.data), wanted))
        for copy in copies:
            whole = copy.words // _LANES
            if whole:
                with loop(whole) as i:
                    vector = load_lanes(copy.source, i * _LANES + copy.first_source, _LANES)
                    store_lanes(copy.target, i * _LANES + copy.first_target, vector, _LANES)
            if copy.words % _LANES:
                with loop(copy.words % _LANES) as i:
                    word = copy.source[i + whole * _LANES + copy.first_source]
                    T.buffer_store(copy.target, word, [i + whole * _LANES + copy.first_target])
        T.evaluate(tirx.call_extern("int32", _SET, mailbox.data, T.int32(int(is_sender))))


def _on_gpu(mailbox: Any, copies: Sequence[_Copy], is_sender: bool) -> None:
    flag = T.decl_buffer((tirx.IntImm("int64", 1),), "uint32", data=mailbox.data)
    with launch(1, _THREADS) as place:
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()
        thread = T.bind(T.Cast("int64", place.thread))
        if not is_sender:
            with when(tirx.EQ(place.thread, 0)):
                found = local(1, "uint32")
                T.evaluate(
                    _instructions.cuda.wait_until(
                        found, T.address_of(flag[0]), lambda value: tirx.NE(value, T.uint32(0)), scope="sys"
                    )
                )
            ptx.block_barrier()
        for copy in copies:
            _copy_on_gpu(copy, thread)
        ptx.block_barrier()
        with when(tirx.EQ(place.thread, 0)):
            ptx.store_for_host(T.address_of(flag[0]), T.uint32(int(is_sender)))


def _copy_on_gpu(copy: _Copy, thread: Any) -> None:
    """Copy with all threads of the block, as many words at once as fit."""
    lanes = 4 if copy.words % 4 == 0 else 1
    for first in range(0, copy.words, _THREADS * lanes):
        index = T.bind(thread * lanes + first)
        with when(True if first + _THREADS * lanes <= copy.words else index < copy.words):
            words = local(lanes, "uint32")
            registers = [words[i] for i in range(lanes)]
            source = T.address_of(copy.source[index + copy.first_source])
            ptx.load_global(registers, source, is_constant=False)
            ptx.store_global(T.address_of(copy.target[index + copy.first_target]), registers)
