"""Pools of worker threads in LLVM's language: who runs which task of a parallel loop, and how threads wait.

A pool belongs to the thread that launches, which finds it by a key of pthreads; a worker finds the value `WORKER`, and
runs loops within its loop alone. A launch writes a *job*: a word with a number that grows, the count of tasks (10 bits)
and a bit 0. Workers watch that word. Each has a *state* word of its own: the last job of which its task was claimed,
and in bit 0 whether that has ended. A task is claimed, by its worker or by the caller, by exchanging an older state for
the job. A worker that comes too late finds a state that is not older, whatever it had read before: all that a job
says stands until its tasks have ended.

Nobody depends on a wake-up: if one is lost, the caller does the work.

Workers that come late are kept off the cores of the others (`apart_text`).

Copies of large tensors between a GPU and the host come with them (`staging_text`).
"""

from __future__ import annotations

TEXT = r"""
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @pthread_key_create(ptr, ptr)
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)
declare i32 @llvm.umin.i32(i32, i32)
declare i32 @relax_hetero.workers.launch(ptr, ptr, i32)
declare i32 @relax_hetero.workers.work(ptr)
declare i32 @relax_hetero.workers.end(ptr)

; Each part lies in cache lines of its own; slots of workers follow the pool.
;                job, loop's function, its data, {TVM's counters of barriers, tasks}
%job = type { i64, ptr, ptr, { ptr, i32 }, [24 x i8] }
;                caller waits in its sleep, workers that sleep
%sleep = type { i32, i32, [56 x i8] }
;                error of a task, threads used, threads made, room, whether a loop runs
%own = type { ptr, i32, i32, i32, i32, [40 x i8] }
%pool = type { %job, %sleep, %own, [64 x i8] }
;                state, pool, number, thread; CPU of its last task + 1, since when it is late, when to look again where
;                it runs, a hash of the CPUs that it is kept to
%slot = type { i64, ptr, i64, i64, i64, i64, i64, i64, [64 x i8] }

@workers.key = internal global i32 0
@workers.take = internal global ptr null
@workers.raise = internal global ptr null
@workers.drop = internal global ptr null
@workers.width = internal global i32 1
@workers.spin = internal global i64 0

; Wake eight workers that have a task, if any sleeps; each wakes eight more.
define internal void @workers.wake_some(ptr %pool, i32 %tasks) {
  %sleepers_at = getelementptr %pool, ptr %pool, i64 0, i32 1, i32 1
  %sleepers = load atomic i32, ptr %sleepers_at seq_cst, align 4
  %any = icmp ne i32 %sleepers, 0
  br i1 %any, label %wake, label %out
wake:
  %bits = call i32 @llvm.umin.i32(i32 %tasks, i32 32)
  %wide = zext i32 %bits to i64
  %power = shl i64 1, %wide
  %ones = sub i64 %power, 1
  %mask = trunc i64 %ones to i32
  call void @workers.wake(ptr %pool, i32 8, i32 %mask)
  br label %out
out:
  ret void
}

define internal ptr @workers.slot(ptr %pool, i32 %number) {
  %slots = getelementptr %pool, ptr %pool, i64 1
  %slot = getelementptr %slot, ptr %slots, i32 %number
  ret ptr %slot
}

; Claim a task of `job` by putting `as` into its state; whether it was there to be claimed.
define internal i1 @workers.claim(ptr %slot, i64 %job, i64 %as) {
  %state = load atomic i64, ptr %slot acquire, align 8
  %is_older = icmp ult i64 %state, %job
  br i1 %is_older, label %try, label %no
try:
  %pair = cmpxchg ptr %slot, i64 %state, i64 %as seq_cst seq_cst, align 8
  %won = extractvalue { i64, i1 } %pair, 1
  ret i1 %won
no:
  ret i1 false
}

; Run a task; the error of one that fails goes into the pool.
define internal void @workers.do(ptr %pool, i32 %task) {
  %error = alloca ptr
  %function_at = getelementptr %job, ptr %pool, i64 0, i32 1
  %data_at = getelementptr %job, ptr %pool, i64 0, i32 2
  %env = getelementptr %job, ptr %pool, i64 0, i32 3
  %function = load ptr, ptr %function_at
  %data = load ptr, ptr %data_at
  %status = call i32 %function(i32 %task, ptr %env, ptr %data)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %keep, label %out
keep:
  store ptr null, ptr %error
  %take = load ptr, ptr @workers.take
  call void %take(ptr %error)
  %raised = load ptr, ptr %error
  %error_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 0
  %other = atomicrmw xchg ptr %error_at, ptr %raised seq_cst
  %is_first = icmp eq ptr %other, null
  br i1 %is_first, label %out, label %drop
drop:
  %drops = load ptr, ptr @workers.drop
  %ignored = call i32 %drops(ptr %other)
  br label %out
out:
  ret void
}

; A worker's life.
define internal i32 @BODY.work(ptr %slot) {
entry:
  %pool_at = getelementptr %slot, ptr %slot, i64 0, i32 1
  %number_at = getelementptr %slot, ptr %slot, i64 0, i32 2
  %pool = load ptr, ptr %pool_at
  %wide = load i64, ptr %number_at
  %number = trunc i64 %wide to i32
  %key = load i32, ptr @workers.key
  call i32 @pthread_setspecific(i32 %key, ptr inttoptr (i64 1 to ptr))
  %bit = call i32 @llvm.umin.i32(i32 %number, i32 31)
  %mask = shl i32 1, %bit
  %waits_at = getelementptr %pool, ptr %pool, i64 0, i32 1, i32 0
  %sleepers_at = getelementptr %pool, ptr %pool, i64 0, i32 1, i32 1
  ; A worker that was done first waits for the others before there is a next job: it spins longer than a caller, for
  ; whom a worker that has been put away may come back when the caller sleeps.
  %spin = load i64, ptr @workers.spin
  %limit = shl i64 %spin, 4
  br label %look
look:
  %last = phi i64 [ 0, %entry ], [ %job, %next ]
  %has_slept = call i1 @workers.await(ptr %pool, i64 %last, i64 %limit, i32 %mask, ptr %sleepers_at)
  %job = load atomic i64, ptr %pool acquire, align 8
  %is_end = icmp eq i64 %job, -1
  br i1 %is_end, label %leave, label %count
count:
  call void @workers.is_here(ptr %slot)
  %half = lshr i64 %job, 1
  %tasks = and i64 %half, MOST_THREADS
  %is_asked = icmp ult i64 %wide, %tasks
  br i1 %is_asked, label %pass_on, label %next
pass_on:
  br i1 %has_slept, label %wake_others, label %claim
wake_others:
  %few = trunc i64 %tasks to i32
  call void @workers.wake_some(ptr %pool, i32 %few)
  br label %claim
claim:
  %won = call i1 @workers.claim(ptr %slot, i64 %job, i64 %job)
  br i1 %won, label %do, label %next
do:
  call void @workers.do(ptr %pool, i32 %number)
  %ended = or i64 %job, 1
  atomicrmw xchg ptr %slot, i64 %ended seq_cst
  %waits = load atomic i32, ptr %waits_at seq_cst, align 4
  %is_asleep = icmp ne i32 %waits, 0
  br i1 %is_asleep, label %wake, label %next
wake:
  call void @workers.wake(ptr %slot, i32 1, i32 -1)
  br label %next
next:
  br label %look
leave:
  ret i32 0
}

; A thread with a pool has ended, or wants a larger one.
define internal i32 @BODY.end(ptr %pool) {
entry:
  %is_worker = icmp eq ptr %pool, inttoptr (i64 1 to ptr)
  br i1 %is_worker, label %out, label %stop
stop:
  call void @workers.dismiss(ptr %pool)
  %made_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 2
  %made = load i32, ptr %made_at
  br label %each
each:
  %number = phi i32 [ 1, %stop ], [ %next, %join ]
  %more = icmp ult i32 %number, %made
  br i1 %more, label %join, label %free
join:
  %slot = call ptr @workers.slot(ptr %pool, i32 %number)
  %thread_at = getelementptr %slot, ptr %slot, i64 0, i32 3
  %thread = load i64, ptr %thread_at
  call i32 @pthread_join(i64 %thread, ptr null)
  %next = add i32 %number, 1
  br label %each
free:
  call void @free(ptr %pool)
  br label %out
out:
  ret i32 0
}

; A pool for this thread, without workers yet; null without memory.
define internal ptr @workers.make(i32 %room, i32 %used) {
  %count = zext i32 %room to i64
  %slots = mul i64 %count, 128
  %bytes = add i64 %slots, 256
  %pool = call ptr @aligned_alloc(i64 128, i64 %bytes)
  %is_none = icmp eq ptr %pool, null
  br i1 %is_none, label %out, label %clear
clear:
  call ptr @memset(ptr %pool, i32 0, i64 %bytes)
  %used_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 1
  %made_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 2
  %room_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 3
  store i32 %used, ptr %used_at
  store i32 1, ptr %made_at
  store i32 %room, ptr %room_at
  br label %out
out:
  %key = load i32, ptr @workers.key
  call i32 @pthread_setspecific(i32 %key, ptr %pool)
  ret ptr %pool
}

; Begin the threads that are missing. Signals are for the process' other threads. Fewer threads do, if the system has
; no more: the caller takes their tasks.
define internal void @workers.begin(ptr %pool, i32 %used) {
entry:
  %all = alloca [128 x i8], align 16
  %before = alloca [128 x i8], align 16
  %made_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 2
  call i32 @sigfillset(ptr %all)
  call i32 @pthread_sigmask(i32 2, ptr %all, ptr %before)
  %made = load i32, ptr %made_at
  br label %each
each:
  %number = phi i32 [ %made, %entry ], [ %next, %begun ]
  %more = icmp ult i32 %number, %used
  br i1 %more, label %begin, label %out
begin:
  %slot = call ptr @workers.slot(ptr %pool, i32 %number)
  %pool_at = getelementptr %slot, ptr %slot, i64 0, i32 1
  %number_at = getelementptr %slot, ptr %slot, i64 0, i32 2
  %thread_at = getelementptr %slot, ptr %slot, i64 0, i32 3
  store ptr %pool, ptr %pool_at
  %wide = zext i32 %number to i64
  store i64 %wide, ptr %number_at
  %status = call i32 @pthread_create(ptr %thread_at, ptr null, ptr @relax_hetero.workers.work, ptr %slot)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %out, label %begun
begun:
  %next = add i32 %number, 1
  store i32 %next, ptr %made_at
  br label %each
out:
  call i32 @pthread_sigmask(i32 2, ptr %before, ptr null)
  ret void
}

; All tasks in this thread.
define internal i32 @workers.alone(ptr %function, ptr %data, i32 %asked) {
entry:
  %env = alloca { ptr, i32 }
  %counter = alloca [64 x i8], align 64
  %is_none = icmp eq i32 %asked, 0
  %tasks = select i1 %is_none, i32 1, i32 %asked
  store i64 0, ptr %counter
  store ptr %counter, ptr %env
  %tasks_at = getelementptr { ptr, i32 }, ptr %env, i64 0, i32 1
  store i32 %tasks, ptr %tasks_at
  br label %each
each:
  %task = phi i32 [ 0, %entry ], [ %next, %good ]
  %status = call i32 %function(i32 %task, ptr %env, ptr %data)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %out, label %good
good:
  %next = add i32 %task, 1
  %more = icmp ult i32 %next, %tasks
  br i1 %more, label %each, label %out
out:
  ret i32 %status
}

; Wait for a task that its worker has begun.
define internal void @workers.join(ptr %pool, ptr %slot, i64 %job) {
  %limit = load i64, ptr @workers.spin
  %ends = call i1 @workers.changes(ptr %slot, i64 %job, i64 %limit)
  br i1 %ends, label %out, label %wait
wait:
  ; Its task may be behind this thread on one CPU: it would begin only when this thread sleeps.
  %here = call i64 @workers.here()
  call void @workers.part(ptr %pool, ptr %slot, i64 %here)
  %waits_at = getelementptr %pool, ptr %pool, i64 0, i32 1, i32 0
  atomicrmw xchg ptr %waits_at, i32 1 seq_cst
  br label %sleep
sleep:
  call void @workers.sleep(ptr %slot, i64 %job, i32 -1)
  %state = load atomic i64, ptr %slot seq_cst, align 8
  %runs = icmp eq i64 %state, %job
  br i1 %runs, label %sleep, label %woken
woken:
  store atomic i32 0, ptr %waits_at seq_cst, align 4
  br label %out
out:
  ret void
}

; A parallel loop: TVMBackendParallelLaunch.
define internal i32 @BODY.launch(ptr %function, ptr %data, i32 %asked) {
entry:
  %key = load i32, ptr @workers.key
  %found = call ptr @pthread_getspecific(i32 %key)
  %is_none = icmp eq ptr %found, null
  br i1 %is_none, label %first, label %known
first:
  %width = load i32, ptr @workers.width
  %new = call ptr @workers.make(i32 %width, i32 %width)
  %has_failed = icmp eq ptr %new, null
  br i1 %has_failed, label %serial, label %known
known:
  %pool = phi ptr [ %found, %entry ], [ %new, %first ]
  %is_worker = icmp eq ptr %pool, inttoptr (i64 1 to ptr)
  br i1 %is_worker, label %serial, label %check
check:
  %used_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 1
  %made_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 2
  %runs_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 4
  %used = load i32, ptr %used_at
  %runs = load i32, ptr %runs_at
  %is_asked = icmp ne i32 %asked, 0
  %is_within = icmp ne i32 %runs, 0
  %is_one = icmp ult i32 %used, 2
  %either = or i1 %is_asked, %is_within
  %not_shared = or i1 %either, %is_one
  br i1 %not_shared, label %serial, label %shared
shared:
  %made = load i32, ptr %made_at
  %is_enough = icmp uge i32 %made, %used
  br i1 %is_enough, label %post, label %begin
begin:
  call void @workers.begin(ptr %pool, i32 %used)
  br label %post
post:
  store i32 1, ptr %runs_at
  %function_at = getelementptr %job, ptr %pool, i64 0, i32 1
  %data_at = getelementptr %job, ptr %pool, i64 0, i32 2
  %tasks_at = getelementptr %job, ptr %pool, i64 0, i32 3, i32 1
  store ptr %function, ptr %function_at
  store ptr %data, ptr %data_at
  store i32 %used, ptr %tasks_at
  %before = load i64, ptr %pool
  %number = lshr i64 %before, 11
  %after = add i64 %number, 1
  %high = shl i64 %after, 11
  %wide = zext i32 %used to i64
  %low = shl i64 %wide, 1
  %job = or i64 %high, %low
  atomicrmw xchg ptr %pool, i64 %job seq_cst
  call void @workers.wake_some(ptr %pool, i32 %used)
  call void @workers.do(ptr %pool, i32 0)
  %ended = or i64 %job, 1
  br label %take
take:
  %task = phi i32 [ 1, %post ], [ %next, %taken ]
  %slot = call ptr @workers.slot(ptr %pool, i32 %task)
  %won = call i1 @workers.claim(ptr %slot, i64 %job, i64 %ended)
  br i1 %won, label %late, label %taken
late:
  call void @workers.late(ptr %pool, ptr %slot)
  br label %do
do:
  call void @workers.do(ptr %pool, i32 %task)
  br label %taken
taken:
  %next = add i32 %task, 1
  %more = icmp ult i32 %next, %used
  br i1 %more, label %take, label %all
all:
  %here = call i64 @workers.here()
  br label %joins
joins:
  %other = phi i32 [ 1, %all ], [ %another, %joined ]
  %theirs = call ptr @workers.slot(ptr %pool, i32 %other)
  %state = load atomic i64, ptr %theirs acquire, align 8
  %has_ended = icmp eq i64 %state, %ended
  br i1 %has_ended, label %joined, label %join
join:
  call void @workers.join(ptr %pool, ptr %theirs, i64 %job)
  br label %joined
joined:
  call void @workers.part(ptr %pool, ptr %theirs, i64 %here)
  %another = add i32 %other, 1
  %left = icmp ult i32 %another, %used
  br i1 %left, label %joins, label %out
out:
  store i32 0, ptr %runs_at
  %error_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 0
  %error = load ptr, ptr %error_at
  %is_good = icmp eq ptr %error, null
  br i1 %is_good, label %good, label %raise
raise:
  store ptr null, ptr %error_at
  %raises = load ptr, ptr @workers.raise
  call void %raises(ptr %error)
  %drops = load ptr, ptr @workers.drop
  %ignored = call i32 %drops(ptr %error)
  ret i32 -1
good:
  ret i32 0
serial:
  %status = call i32 @workers.alone(ptr %function, ptr %data, i32 %asked)
  ret i32 %status
}

define internal i64 @BODY.start(i64 %take, i64 %raise, i64 %drop, i64 %width, i64 %spin, i64 %cores, i64 %cpus) {
  %takes = inttoptr i64 %take to ptr
  %raises = inttoptr i64 %raise to ptr
  %drops = inttoptr i64 %drop to ptr
  %threads = trunc i64 %width to i32
  store ptr %takes, ptr @workers.take
  store ptr %raises, ptr @workers.raise
  store ptr %drops, ptr @workers.drop
  store i32 %threads, ptr @workers.width
  store i64 %spin, ptr @workers.spin
  %table = inttoptr i64 %cores to ptr
  store ptr %table, ptr @workers.cores
  store i64 %cpus, ptr @workers.cpus
  %status = call i32 @pthread_key_create(ptr @workers.key, ptr @relax_hetero.workers.end)
  %wide = sext i32 %status to i64
  ret i64 %wide
}

define internal i64 @BODY.configure(i64 %room, i64 %used) {
entry:
  %rooms = trunc i64 %room to i32
  %uses = trunc i64 %used to i32
  %key = load i32, ptr @workers.key
  %pool = call ptr @pthread_getspecific(i32 %key)
  %address = ptrtoint ptr %pool to i64
  %is_none = icmp ult i64 %address, 2
  br i1 %is_none, label %missing, label %there
missing:
  %is_worker = icmp eq i64 %address, 1
  br i1 %is_worker, label %out, label %make
there:
  %room_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 3
  %runs_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 4
  %has = load i32, ptr %room_at
  %runs = load i32, ptr %runs_at
  %is_within = icmp ne i32 %runs, 0
  br i1 %is_within, label %out, label %idle
idle:
  %is_enough = icmp uge i32 %has, %rooms
  br i1 %is_enough, label %set, label %replace
set:
  %used_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 1
  store i32 %uses, ptr %used_at
  br label %out
replace:
  call i32 @relax_hetero.workers.end(ptr %pool)
  br label %make
make:
  call ptr @workers.make(i32 %rooms, i32 %uses)
  br label %out
out:
  ret i64 0
}

define internal i64 @BODY.spin(i64 %spin) {
  store i64 %spin, ptr @workers.spin
  ret i64 0
}

define internal i64 @BODY.forget() {
  %key = load i32, ptr @workers.key
  %status = call i32 @pthread_setspecific(i32 %key, ptr null)
  %wide = sext i32 %status to i64
  ret i64 %wide
}

define internal i64 @BODY.width() {
entry:
  %key = load i32, ptr @workers.key
  %pool = call ptr @pthread_getspecific(i32 %key)
  %address = ptrtoint ptr %pool to i64
  %has_none = icmp ult i64 %address, 2
  br i1 %has_none, label %none, label %some
none:
  ret i64 %address
some:
  %used_at = getelementptr %pool, ptr %pool, i64 0, i32 2, i32 1
  %used = load i32, ptr %used_at
  %wide = zext i32 %used to i64
  ret i64 %wide
}

define internal i64 @BODY.launch_address() {
  ret i64 ptrtoint (ptr @relax_hetero.workers.launch to i64)
}
"""
