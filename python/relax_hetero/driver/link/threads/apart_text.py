"""Worker threads that stay apart, in LLVM's language: each on a core that neither its caller nor another worker uses.

Linux may leave two threads on one CPU beside an idle one, where two threads are as fast as one. Pinning every thread
to a CPU of its own is no way out: the caller's CPUs are not the library's to choose, and a pinned thread waits behind
another process while other CPUs are idle. Here a worker is kept off the cores of the others, and only once it has been
seen to be late: it did not begin a task for a while, or did it on the caller's own CPU. It may run on every other CPU
that the caller may use, and the caller's own affinity stays as it is.

Cores, not CPUs, are kept apart while there are enough of them: the hyper-threads of one core share its arithmetic
units. With more threads than CPUs all are left free.
"""

from __future__ import annotations

TEXT = r"""
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @pthread_setaffinity_np(i64, i64, ptr)

@workers.cores = internal global ptr null
@workers.cpus = internal global i64 0

; A worker runs: note its CPU.
define internal void @workers.is_here(ptr %slot) {
  %cpu_at = getelementptr %slot, ptr %slot, i64 0, i32 4
  %late_at = getelementptr %slot, ptr %slot, i64 0, i32 5
  %noted = call i64 @workers.here()
  store atomic i64 %noted, ptr %cpu_at monotonic, align 8
  store atomic i64 0, ptr %late_at monotonic, align 8
  ret void
}

; This thread's CPU, as workers note theirs.
define internal i64 @workers.here() {
  %cpu = call i32 @sched_getcpu()
  %wide = sext i32 %cpu to i64
  %noted = add i64 %wide, 1
  ret i64 %noted
}

; Have a worker leave if it did its last task on this thread's CPU.
define internal void @workers.part(ptr %pool, ptr %slot, i64 %here) {
entry:
  %cpu_at = getelementptr %slot, ptr %slot, i64 0, i32 4
  %noted = load atomic i64, ptr %cpu_at monotonic, align 8
  %is_same = icmp eq i64 %noted, %here
  br i1 %is_same, label %part, label %out
part:
  call void @workers.apart(ptr %pool, ptr %slot)
  br label %out
out:
  ret void
}

; A worker has not begun its task. It may still be waking up; later it waits for a CPU, perhaps for this one.
define internal void @workers.late(ptr %pool, ptr %slot) {
entry:
  %late_at = getelementptr %slot, ptr %slot, i64 0, i32 5
  %since = load atomic i64, ptr %late_at monotonic, align 8
  %now = call i64 @workers.now()
  %is_first = icmp eq i64 %since, 0
  br i1 %is_first, label %note, label %wait
note:
  store atomic i64 %now, ptr %late_at monotonic, align 8
  ret void
wait:
  %passed = sub i64 %now, %since
  %is_long = icmp sgt i64 %passed, 200000
  br i1 %is_long, label %part, label %out
part:
  call void @workers.apart(ptr %pool, ptr %slot)
  br label %out
out:
  ret void
}

; Of a set of CPUs, those on cores that none of `others` (CPUs, of which more than there are stand for none) is on;
; `by_core` false: those that none is. Whether there are any.
define internal i1 @workers.untaken(ptr %cores, i64 %cpus, ptr %allowed, ptr %others, i64 %count, i1 %by_core,
                                       ptr %found) {
entry:
  %taken = alloca [MOST_CPUS x i8], align 8
  call ptr @memset(ptr %taken, i32 0, i64 MOST_CPUS)
  call ptr @memset(ptr %found, i32 0, i64 128)
  br label %all
all:
  %number = phi i64 [ 0, %entry ], [ %next, %other ]
  %more = icmp ult i64 %number, %count
  br i1 %more, label %look, label %each
look:
  %next = add i64 %number, 1
  %cpu_at = getelementptr i64, ptr %others, i64 %number
  %cpu = load i64, ptr %cpu_at
  %is_known = icmp ult i64 %cpu, %cpus
  br i1 %is_known, label %take, label %other
take:
  %its_core_at = getelementptr i32, ptr %cores, i64 %cpu
  %its_core = load i32, ptr %its_core_at
  %its_wide = zext i32 %its_core to i64
  %its_unit = select i1 %by_core, i64 %its_wide, i64 %cpu
  %its_taken_at = getelementptr i8, ptr %taken, i64 %its_unit
  store i8 1, ptr %its_taken_at
  br label %other
other:
  br label %all
each:
  %at = phi i64 [ 0, %all ], [ %after, %test ]
  %any = phi i1 [ false, %all ], [ %some, %test ]
  %is_left = icmp ult i64 %at, %cpus
  br i1 %is_left, label %test, label %out
test:
  %core_at = getelementptr i32, ptr %cores, i64 %at
  %core = load i32, ptr %core_at
  %wide = zext i32 %core to i64
  %unit = select i1 %by_core, i64 %wide, i64 %at
  %taken_at = getelementptr i8, ptr %taken, i64 %unit
  %is_taken = load i8, ptr %taken_at
  %byte = lshr i64 %at, 3
  %bit = and i64 %at, 7
  %short = trunc i64 %bit to i8
  %power = shl i8 1, %short
  %allowed_at = getelementptr i8, ptr %allowed, i64 %byte
  %allows = load i8, ptr %allowed_at
  %own_bit = and i8 %allows, %power
  %may = icmp ne i8 %own_bit, 0
  %is_free = icmp eq i8 %is_taken, 0
  %is_good = and i1 %may, %is_free
  %found_at = getelementptr i8, ptr %found, i64 %byte
  %before = load i8, ptr %found_at
  %with = or i8 %before, %power
  %new = select i1 %is_good, i8 %with, i8 %before
  store i8 %new, ptr %found_at
  %after = add i64 %at, 1
  %some = or i1 %any, %is_good
  br label %each
out:
  ret i1 %any
}

; The CPUs that a thread is to be kept to, of those allowed, beside others: cores of its own, else CPUs of its own, else
; all.
define internal void @workers.choose(ptr %cores, i64 %cpus, ptr %allowed, ptr %others, i64 %count, ptr %found) {
entry:
  %has_core = call i1 @workers.untaken(ptr %cores, i64 %cpus, ptr %allowed, ptr %others, i64 %count, i1 true,
                                   ptr %found)
  br i1 %has_core, label %out, label %by_cpu
by_cpu:
  %has_cpu = call i1 @workers.untaken(ptr %cores, i64 %cpus, ptr %allowed, ptr %others, i64 %count, i1 false,
                                   ptr %found)
  br i1 %has_cpu, label %out, label %free
free:
  call ptr @memcpy(ptr %found, ptr %allowed, i64 128)
  br label %out
out:
  ret void
}

; The CPUs of this thread and of a pool's workers except one; how many.
define internal i64 @workers.others(ptr %pool, ptr %slot, ptr %others) {
entry:
  %mine = call i64 @workers.here()
  %cpu = sub i64 %mine, 1
  store i64 %cpu, ptr %others
  %used_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 1
  %used = load i32, ptr %used_at
  br label %each
each:
  %number = phi i32 [ 1, %entry ], [ %next, %note ], [ %next, %look ]
  %count = phi i64 [ 1, %entry ], [ %noted, %note ], [ %count, %look ]
  %more = icmp ult i32 %number, %used
  br i1 %more, label %look, label %out
look:
  %next = add i32 %number, 1
  %its = call ptr @workers.slot(ptr %pool, i32 %number)
  %is_own = icmp eq ptr %its, %slot
  br i1 %is_own, label %each, label %note
note:
  %its_cpu_at = getelementptr %slot, ptr %its, i64 0, i32 4
  %its_cpu = load atomic i64, ptr %its_cpu_at monotonic, align 8
  %known = sub i64 %its_cpu, 1
  %other_at = getelementptr i64, ptr %others, i64 %count
  store i64 %known, ptr %other_at
  %noted = add i64 %count, 1
  br label %each
out:
  ret i64 %count
}

; FNV-1a of the words of a set; 0 stands for a worker that was told nothing yet, and is no set of one CPU.
define internal i64 @workers.hash(ptr %set) {
entry:
  br label %each
each:
  %number = phi i64 [ 0, %entry ], [ %next, %each ]
  %hash = phi i64 [ -3750763034362895579, %entry ], [ %mixed, %each ]
  %at = getelementptr i64, ptr %set, i64 %number
  %word = load i64, ptr %at
  %both = xor i64 %hash, %word
  %mixed = mul i64 %both, 1099511628211
  %next = add i64 %number, 1
  %more = icmp ult i64 %next, 16
  br i1 %more, label %each, label %out
out:
  ret i64 %mixed
}

; Have a worker leave the cores of its pool's other threads, unless it was told to a moment ago.
define internal void @workers.apart(ptr %pool, ptr %slot) {
entry:
  %allowed = alloca [16 x i64], align 8
  %found = alloca [16 x i64], align 8
  %others = alloca [MOST_CPUS x i64], align 8
  %look_at = getelementptr %slot, ptr %slot, i64 0, i32 6
  %hash_at = getelementptr %slot, ptr %slot, i64 0, i32 7
  %thread_at = getelementptr %slot, ptr %slot, i64 0, i32 3
  %look = load i64, ptr %look_at
  %now = call i64 @workers.now()
  %is_due = icmp sge i64 %now, %look
  br i1 %is_due, label %ask, label %out
ask:
  %soon = add i64 %now, 1000000
  store i64 %soon, ptr %look_at
  call ptr @memset(ptr %allowed, i32 0, i64 128)
  %status = call i32 @sched_getaffinity(i32 0, i64 128, ptr %allowed)
  %failed = icmp slt i32 %status, 0
  br i1 %failed, label %out, label %choose
choose:
  %cores = load ptr, ptr @workers.cores
  %cpus = load i64, ptr @workers.cpus
  %count = call i64 @workers.others(ptr %pool, ptr %slot, ptr %others)
  call void @workers.choose(ptr %cores, i64 %cpus, ptr %allowed, ptr %others, i64 %count, ptr %found)
  %hash = call i64 @workers.hash(ptr %found)
  %before = load i64, ptr %hash_at
  store i64 %hash, ptr %hash_at
  ; Somebody else (taskset, a control group) may have moved it since: it is told again.
  %thread = load i64, ptr %thread_at
  %ignored = call i32 @pthread_setaffinity_np(i64 %thread, i64 128, ptr %found)
  %is_same = icmp eq i64 %hash, %before
  br i1 %is_same, label %later, label %out
later:
  ; Others keep it from running: it is where it should be.
  %rest = add i64 %now, 10000000
  store i64 %rest, ptr %look_at
  br label %out
out:
  ret void
}
"""
