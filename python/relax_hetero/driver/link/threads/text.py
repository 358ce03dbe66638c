"""The text of all functions of the threads, and those that the rest is made of: time, spinning, sleeping.

LLVM's language has words for atomics and threads; see `worker_threads` for how it becomes code.
"""

from __future__ import annotations

from ....artifact import worker_threads as names
from . import apart_text, pool_text, staging_text

BODY = "relax_hetero.workers.body."
"""How the names of the functions that PrimFuncs call begin."""


def text_for(triple: str) -> str | None:
    """The functions for a target; None for an operating system or a processor that they are not written for."""
    arch, _, rest = triple.partition("-")
    found = _ARCHITECTURES.get(arch)
    if found is None or "linux" not in rest:
        return None
    text = _TEXT + pool_text.TEXT + apart_text.TEXT + staging_text.TEXT
    limits = {"MOST_THREADS": str(names.MOST_THREADS), "MOST_CPUS": str(names.MOST_CPUS)}
    for name, value in {**found, **limits}.items():
        text = text.replace(name, value)
    return text.replace("BODY.", BODY)


# The number of Linux' futex call, the instruction that a thread spins with, and its declaration.
_ARCHITECTURES = {
    "x86_64": {
        "FUTEX": "202",
        "declare PAUSE": "declare void @llvm.x86.sse2.pause()",
        "call PAUSE": "call void @llvm.x86.sse2.pause()",
    },
    "aarch64": {
        "FUTEX": "98",
        "declare PAUSE": "declare void @llvm.aarch64.hint(i32)",
        "call PAUSE": "call void @llvm.aarch64.hint(i32 1)",
    },
}

_TEXT = r"""
declare ptr @memset(ptr, i32, i64)
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)
declare PAUSE
declare ptr @memcpy(ptr, ptr, i64)

define internal i64 @workers.now() {
  %time = alloca { i64, i64 }
  call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %at = getelementptr { i64, i64 }, ptr %time, i64 0, i32 1
  %rest = load i64, ptr %at
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %rest
  ret i64 %now
}

; Whether a word becomes another than `old` while this spins, for `limit` nanoseconds.
define internal i1 @workers.changes(ptr %word, i64 %old, i64 %limit) {
entry:
  br label %poll
poll:
  %count = phi i64 [ 0, %entry ], [ %next, %pause ], [ 0, %clock ]
  %start = phi i64 [ 0, %entry ], [ %start, %pause ], [ %began, %clock ]
  %value = load atomic i64, ptr %word acquire, align 8
  %differs = icmp ne i64 %value, %old
  br i1 %differs, label %yes, label %pause
pause:
  call PAUSE
  %next = add i64 %count, 1
  %more = icmp ult i64 %next, 32
  br i1 %more, label %poll, label %clock
clock:
  %now = call i64 @workers.now()
  %is_first = icmp eq i64 %start, 0
  %began = select i1 %is_first, i64 %now, i64 %start
  %passed = sub i64 %now, %began
  %over = icmp ugt i64 %passed, %limit
  br i1 %over, label %no, label %poll
yes:
  ret i1 true
no:
  ret i1 false
}

; Sleep until woken by one of the bits of `mask`, unless the low half of the word is no longer that of `old`.
define internal void @workers.sleep(ptr %word, i64 %old, i32 %mask) {
  %low = trunc i64 %old to i32
  call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i32 137, i32 %low, ptr null, ptr null, i32 %mask)
  ret void
}

define internal void @workers.wake(ptr %word, i32 %count, i32 %mask) {
  call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i32 138, i32 %count, ptr null, ptr null, i32 %mask)
  ret void
}

; Wait until a word is another than `old`: spin for `limit` nanoseconds, then sleep, counted among the `sleepers`, until
; woken by one of the bits of `mask`. Whether this slept.
define internal i1 @workers.await(ptr %word, i64 %old, i64 %limit, i32 %mask, ptr %sleepers) {
entry:
  br label %look
look:
  %has_slept = phi i1 [ false, %entry ], [ true, %sleep ]
  %is_there = call i1 @workers.changes(ptr %word, i64 %old, i64 %limit)
  br i1 %is_there, label %out, label %sleep
sleep:
  atomicrmw add ptr %sleepers, i32 1 seq_cst
  call void @workers.sleep(ptr %word, i64 %old, i32 %mask)
  atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %look
out:
  ret i1 %has_slept
}

; Have all that wait for a word leave: they find -1.
define internal void @workers.dismiss(ptr %word) {
  atomicrmw xchg ptr %word, i64 -1 seq_cst
  call void @workers.wake(ptr %word, i32 2147483647, i32 -1)
  ret void
}
"""
