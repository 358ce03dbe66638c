"""Copies between plain and pinned memory of the host in LLVM's language, as a GPU copies from and to the pinned memory.

Threads meet in a *job*, each with buffers and a stream of its own: they take parts of it by a counter until none is
left. A caller lays its job on a *desk* and wakes the helpers that wait there; they never return to Python, whose lock
they would have to wait for. A helper that comes too late finds no job, or no part.

C's memcpy leaves pinned memory in the caches, where the GPU finds it: stores past the caches were measured no faster
from many threads, and half as fast from few.
"""

from __future__ import annotations

TEXT = r"""
declare i32 @relax_hetero.workers.stage(ptr, ptr, ptr)
declare i32 @relax_hetero.workers.help(ptr, ptr)

; See `relax_hetero.vm.device.pinned_staging.Job`.
;             next part, parts, offsets, host, device, to host, buffers, stream, event of its begin, context,
%stage.job = type { i64, i64, ptr, ptr, i64, i64, i64, ptr, ptr, ptr,
;             driver: context, synchronize, record, wait, copy; status, function that failed
  ptr, ptr, ptr, ptr, ptr, i64, i64 }
;             address, event, offset and bytes of what arrives there; before the buffers: a stream, an event of its end
%stage.buffer = type { ptr, ptr, i64, i64 }

; Note the first failure of a function of the driver; whether there is one.
define internal i1 @stage.fails(ptr %job, i32 %status, i64 %function) {
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %note, label %out
note:
  %status_at = getelementptr %stage.job, ptr %job, i64 0, i32 15
  %function_at = getelementptr %stage.job, ptr %job, i64 0, i32 16
  %wide = sext i32 %status to i64
  %pair = cmpxchg ptr %status_at, i64 0, i64 %wide seq_cst seq_cst, align 8
  %is_first = extractvalue { i64, i1 } %pair, 1
  br i1 %is_first, label %name, label %out
name:
  store i64 %function, ptr %function_at
  br label %out
out:
  ret i1 %failed
}

; Wait until the GPU has copied from or to a buffer; what has arrived goes on to the host's memory. Whether that fails.
define internal i1 @stage.settle(ptr %job, ptr %buffer) {
  %synchronize_at = getelementptr %stage.job, ptr %job, i64 0, i32 11
  %synchronize = load ptr, ptr %synchronize_at
  %event_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 1
  %offset_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 2
  %bytes_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 3
  %bytes = load i64, ptr %bytes_at
  store i64 0, ptr %bytes_at
  %event = load ptr, ptr %event_at
  %status = call i32 %synchronize(ptr %event)
  %failed = call i1 @stage.fails(ptr %job, i32 %status, i64 1)
  %is_empty = icmp eq i64 %bytes, 0
  %none = or i1 %failed, %is_empty
  br i1 %none, label %out, label %land
land:
  %host_at = getelementptr %stage.job, ptr %job, i64 0, i32 3
  %host = load ptr, ptr %host_at
  %offset = load i64, ptr %offset_at
  %to = getelementptr i8, ptr %host, i64 %offset
  %from = load ptr, ptr %buffer
  call ptr @memcpy(ptr %to, ptr %from, i64 %bytes)
  br label %out
out:
  ret i1 %failed
}

define internal void @stage.take_part(ptr %job, ptr %lane) {
entry:
  %parts_at = getelementptr %stage.job, ptr %job, i64 0, i32 1
  %offsets_at = getelementptr %stage.job, ptr %job, i64 0, i32 2
  %host_at = getelementptr %stage.job, ptr %job, i64 0, i32 3
  %device_at = getelementptr %stage.job, ptr %job, i64 0, i32 4
  %to_host_at = getelementptr %stage.job, ptr %job, i64 0, i32 5
  %count_at = getelementptr %stage.job, ptr %job, i64 0, i32 6
  %stream_at = getelementptr %stage.job, ptr %job, i64 0, i32 7
  %begin_at = getelementptr %stage.job, ptr %job, i64 0, i32 8
  %context_at = getelementptr %stage.job, ptr %job, i64 0, i32 9
  %use_at = getelementptr %stage.job, ptr %job, i64 0, i32 10
  %record_at = getelementptr %stage.job, ptr %job, i64 0, i32 12
  %wait_at = getelementptr %stage.job, ptr %job, i64 0, i32 13
  %copy_at = getelementptr %stage.job, ptr %job, i64 0, i32 14
  %status_at = getelementptr %stage.job, ptr %job, i64 0, i32 15
  %parts = load i64, ptr %parts_at
  %offsets = load ptr, ptr %offsets_at
  %host = load ptr, ptr %host_at
  %device = load i64, ptr %device_at
  %to_host = load i64, ptr %to_host_at
  %count = load i64, ptr %count_at
  %stream = load ptr, ptr %stream_at
  %begun = load ptr, ptr %begin_at
  %context = load ptr, ptr %context_at
  %use = load ptr, ptr %use_at
  %record = load ptr, ptr %record_at
  %wait = load ptr, ptr %wait_at
  %copy = load ptr, ptr %copy_at
  %buffers = getelementptr %stage.buffer, ptr %lane, i64 1
  %end_event_at = getelementptr %stage.buffer, ptr %lane, i64 0, i32 1
  %own = load ptr, ptr %lane
  %ended = load ptr, ptr %end_event_at
  %receives = icmp ne i64 %to_host, 0
  %used = call i32 %use(ptr %context)
  %unused = call i1 @stage.fails(ptr %job, i32 %used, i64 0)
  br label %take
take:
  %turn = phi i64 [ 0, %entry ], [ %following, %done ]
  %status = load atomic i64, ptr %status_at acquire, align 8
  %is_lost = icmp ne i64 %status, 0
  br i1 %is_lost, label %finish, label %number
number:
  %taken = atomicrmw add ptr %job, i64 1 seq_cst
  %none = icmp sge i64 %taken, %parts
  br i1 %none, label %finish, label %some
some:
  %is_first = icmp eq i64 %turn, 0
  br i1 %is_first, label %follow, label %part
follow:
  %waited = call i32 %wait(ptr %own, ptr %begun, i32 0)
  %unordered = call i1 @stage.fails(ptr %job, i32 %waited, i64 3)
  br i1 %unordered, label %finish, label %part
part:
  ; The first parts of what goes to the GPU are small; of what comes, the last.
  %others = sub i64 %parts, %taken
  %before = sub i64 %others, 1
  %index = select i1 %receives, i64 %before, i64 %taken
  %first_at = getelementptr i64, ptr %offsets, i64 %index
  %end_at = getelementptr i64, ptr %first_at, i64 1
  %begin = load i64, ptr %first_at
  %end = load i64, ptr %end_at
  %bytes = sub i64 %end, %begin
  %which = urem i64 %turn, %count
  %buffer = getelementptr %stage.buffer, ptr %buffers, i64 %which
  %event_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 1
  %offset_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 2
  %bytes_at = getelementptr %stage.buffer, ptr %buffer, i64 0, i32 3
  %memory = load ptr, ptr %buffer
  %pinned = ptrtoint ptr %memory to i64
  %event = load ptr, ptr %event_at
  %there = add i64 %device, %begin
  %failed = call i1 @stage.settle(ptr %job, ptr %buffer)
  br i1 %failed, label %finish, label %way
way:
  br i1 %receives, label %receive, label %send
send:
  %from = getelementptr i8, ptr %host, i64 %begin
  call ptr @memcpy(ptr %memory, ptr %from, i64 %bytes)
  %sent = call i32 %copy(i64 %there, i64 %pinned, i64 %bytes, ptr %own)
  br label %copied
receive:
  %came = call i32 %copy(i64 %pinned, i64 %there, i64 %bytes, ptr %own)
  store i64 %begin, ptr %offset_at
  store i64 %bytes, ptr %bytes_at
  br label %copied
copied:
  %issued = phi i32 [ %sent, %send ], [ %came, %receive ]
  %not_copied = call i1 @stage.fails(ptr %job, i32 %issued, i64 4)
  br i1 %not_copied, label %finish, label %mark
mark:
  %recorded = call i32 %record(ptr %event, ptr %own)
  %not_recorded = call i1 @stage.fails(ptr %job, i32 %recorded, i64 2)
  br i1 %not_recorded, label %finish, label %done
done:
  %following = add i64 %turn, 1
  br label %take
finish:
  %did_nothing = icmp eq i64 %turn, 0
  %is_settled = or i1 %receives, %did_nothing
  br i1 %is_settled, label %each, label %order
order:
  ; Work that the copy's stream gets later comes after this thread's parts.
  %marked = call i32 %record(ptr %ended, ptr %own)
  %unmarked = call i1 @stage.fails(ptr %job, i32 %marked, i64 2)
  %joined = call i32 %wait(ptr %stream, ptr %ended, i32 0)
  %unjoined = call i1 @stage.fails(ptr %job, i32 %joined, i64 3)
  br label %over
each:
  %step = phi i64 [ 0, %finish ], [ %later, %settled ]
  %is_over = icmp uge i64 %step, %count
  br i1 %is_over, label %over, label %last
last:
  ; In the order in which they were asked for.
  %place = add i64 %turn, %step
  %rest = urem i64 %place, %count
  %waiting = getelementptr %stage.buffer, ptr %buffers, i64 %rest
  %left_at = getelementptr %stage.buffer, ptr %waiting, i64 0, i32 3
  %left = load i64, ptr %left_at
  %is_empty = icmp eq i64 %left, 0
  br i1 %is_empty, label %settled, label %land
land:
  %ignored = call i1 @stage.settle(ptr %job, ptr %waiting)
  br label %settled
settled:
  %later = add i64 %step, 1
  br label %each
over:
  ret void
}

;                job number, job, helpers at work
%stage.desk = type { i64, [56 x i8], ptr, i64 }

; A copy, of this thread and of all helpers that come in time. Without a job, the helpers end.
define internal i32 @BODY.stage(ptr %desk, ptr %job, ptr %lane) {
entry:
  %is_end = icmp eq ptr %job, null
  br i1 %is_end, label %dismiss, label %post
dismiss:
  call void @workers.dismiss(ptr %desk)
  ret i32 0
post:
  %job_at = getelementptr %stage.desk, ptr %desk, i64 0, i32 2
  %helpers_at = getelementptr %stage.desk, ptr %desk, i64 0, i32 3
  store atomic ptr %job, ptr %job_at seq_cst, align 8
  atomicrmw add ptr %desk, i64 1 seq_cst
  call void @workers.wake(ptr %desk, i32 2147483647, i32 -1)
  call void @stage.take_part(ptr %job, ptr %lane)
  store atomic ptr null, ptr %job_at seq_cst, align 8
  br label %wait
wait:
  %helpers = load atomic i64, ptr %helpers_at seq_cst, align 8
  %is_none = icmp eq i64 %helpers, 0
  br i1 %is_none, label %out, label %spin
spin:
  %changed = call i1 @workers.changes(ptr %helpers_at, i64 %helpers, i64 1000000)
  br label %wait
out:
  ret i32 0
}

; A helper's life.
define internal i32 @BODY.help(ptr %desk, ptr %lane) {
entry:
  %sleepers = alloca i32
  %job_at = getelementptr %stage.desk, ptr %desk, i64 0, i32 2
  %helpers_at = getelementptr %stage.desk, ptr %desk, i64 0, i32 3
  br label %look
look:
  %last = phi i64 [ 0, %entry ], [ %number, %left ]
  %slept = call i1 @workers.await(ptr %desk, i64 %last, i64 50000, i32 -1, ptr %sleepers)
  %number = load atomic i64, ptr %desk acquire, align 8
  %is_end = icmp eq i64 %number, -1
  br i1 %is_end, label %out, label %take
take:
  atomicrmw add ptr %helpers_at, i64 1 seq_cst
  %job = load atomic ptr, ptr %job_at seq_cst, align 8
  %is_late = icmp eq ptr %job, null
  br i1 %is_late, label %left, label %work
work:
  call void @stage.take_part(ptr %job, ptr %lane)
  br label %left
left:
  atomicrmw sub ptr %helpers_at, i64 1 seq_cst
  br label %look
out:
  ret i32 0
}

define internal i64 @BODY.stage_address() {
  ret i64 ptrtoint (ptr @relax_hetero.workers.stage to i64)
}

define internal i64 @BODY.help_address() {
  ret i64 ptrtoint (ptr @relax_hetero.workers.help to i64)
}
"""
