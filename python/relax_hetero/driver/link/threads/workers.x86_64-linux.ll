; Made from workers.c by `make workers`, SHA-256 3b9cbc1aa19aa0a710d8686d62f62af1da580092c2c160d75cfe8b056a9f662b

%struct.worker = type { i64, ptr, i64, i64, i64, i64, i64, i64, [64 x i8] }
%struct.timespec = type { i64, i64 }
%struct.__sigset_t = type { [16 x i64] }
%struct.group = type { ptr, i32 }
%struct.buffer = type { ptr, ptr, i64, i64 }
%struct.cpu_set_t = type { [16 x i64] }

@key = internal global i32 0, align 4
@default_width = internal unnamed_addr global i32 1, align 4
@thread_tasks = internal unnamed_addr global i32 1, align 4
@raise_error = internal unnamed_addr global ptr null, align 8
@drop_error = internal unnamed_addr global ptr null, align 8
@take_error = internal unnamed_addr global ptr null, align 8
@spin_ns = internal unnamed_addr global i64 0, align 8
@cpu_cores = internal unnamed_addr global ptr null, align 8
@num_cpus = internal unnamed_addr global i64 0, align 8

define void @relax_hetero_workers_choose(ptr noundef readonly captures(none) %cores, i64 noundef %cpus, ptr noundef readonly captures(none) %allowed, ptr noundef readonly captures(none) %others, i64 noundef %count, ptr noundef captures(none) initializes((0, 128)) %found) local_unnamed_addr {
entry:
  %call = tail call fastcc zeroext i1 @untaken(ptr noundef %cores, i64 noundef %cpus, ptr noundef %allowed, ptr noundef %others, i64 noundef %count, i1 noundef zeroext true, ptr noundef %found)
  br i1 %call, label %if.end, label %land.lhs.true

land.lhs.true:
  %call1 = tail call fastcc zeroext i1 @untaken(ptr noundef %cores, i64 noundef %cpus, ptr noundef %allowed, ptr noundef %others, i64 noundef %count, i1 noundef zeroext false, ptr noundef %found)
  br i1 %call1, label %if.end, label %if.then

if.then:
  tail call void @llvm.memcpy.p0.p0.i64(ptr noundef nonnull align 8 dereferenceable(128) %found, ptr noundef nonnull align 8 dereferenceable(128) %allowed, i64 128, i1 false)
  br label %if.end

if.end:
  ret void
}

define internal fastcc zeroext i1 @untaken(ptr noundef readonly captures(none) %cores, i64 noundef %cpus, ptr noundef readonly captures(none) %allowed, ptr noundef readonly captures(none) %others, i64 noundef %count, i1 noundef zeroext %by_core, ptr noundef captures(none) initializes((0, 128)) %found) unnamed_addr {
entry:
  %taken = alloca [1024 x i8], align 16
  call void @llvm.lifetime.start.p0(ptr nonnull %taken)
  call void @llvm.memset.p0.i64(ptr noundef nonnull align 16 dereferenceable(1024) %taken, i8 0, i64 1024, i1 false)
  tail call void @llvm.memset.p0.i64(ptr noundef nonnull align 8 dereferenceable(128) %found, i8 0, i64 128, i1 false)
  %cmp75 = icmp sgt i64 %count, 0
  br i1 %cmp75, label %for.body, label %for.cond6.preheader

for.cond6.preheader:
  %cmp777 = icmp sgt i64 %cpus, 0
  br i1 %cmp777, label %for.body10, label %for.cond.cleanup9

for.body:
  %i.076 = phi i64 [ %inc, %for.inc ], [ 0, %entry ]
  %arrayidx = getelementptr inbounds nuw i64, ptr %others, i64 %i.076
  %0 = load i64, ptr %arrayidx, align 8
  %cmp1 = icmp ult i64 %0, %cpus
  br i1 %cmp1, label %if.then, label %for.inc

if.then:
  br i1 %by_core, label %cond.true, label %cond.end

cond.true:
  %arrayidx3 = getelementptr inbounds i32, ptr %cores, i64 %0
  %1 = load i32, ptr %arrayidx3, align 4
  %conv = sext i32 %1 to i64
  br label %cond.end

cond.end:
  %cond = phi i64 [ %conv, %cond.true ], [ %0, %if.then ]
  %arrayidx5 = getelementptr inbounds i8, ptr %taken, i64 %cond
  store i8 1, ptr %arrayidx5, align 1
  br label %for.inc

for.inc:
  %inc = add nuw nsw i64 %i.076, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond6.preheader, label %for.body

for.cond.cleanup9:
  %any.0.lcssa = phi i1 [ false, %for.cond6.preheader ], [ %any.1, %for.inc48 ]
  call void @llvm.lifetime.end.p0(ptr nonnull %taken)
  ret i1 %any.0.lcssa

for.body10:
  %any.080 = phi i1 [ %any.1, %for.inc48 ], [ false, %for.cond6.preheader ]
  %cpu.078 = phi i64 [ %inc49, %for.inc48 ], [ 0, %for.cond6.preheader ]
  %cmp11 = icmp samesign ult i64 %cpu.078, 1024
  br i1 %cmp11, label %cond.true13, label %for.inc48

cond.true13:
  %div1472 = lshr i64 %cpu.078, 6
  %arrayidx15 = getelementptr inbounds nuw i64, ptr %allowed, i64 %div1472
  %2 = load i64, ptr %arrayidx15, align 8
  %rem = and i64 %cpu.078, 63
  %3 = shl nuw i64 1, %rem
  %4 = and i64 %2, %3
  %5 = icmp eq i64 %4, 0
  br i1 %5, label %for.inc48, label %land.lhs.true

land.lhs.true:
  br i1 %by_core, label %cond.true23, label %cond.end27

cond.true23:
  %arrayidx24 = getelementptr inbounds nuw i32, ptr %cores, i64 %cpu.078
  %6 = load i32, ptr %arrayidx24, align 4
  %conv25 = sext i32 %6 to i64
  br label %cond.end27

cond.end27:
  %cond28 = phi i64 [ %conv25, %cond.true23 ], [ %cpu.078, %land.lhs.true ]
  %arrayidx29 = getelementptr inbounds i8, ptr %taken, i64 %cond28
  %7 = load i8, ptr %arrayidx29, align 1
  %loadedv30 = trunc nuw i8 %7 to i1
  br i1 %loadedv30, label %for.inc48, label %cond.true37

cond.true37:
  %arrayidx43 = getelementptr inbounds nuw i64, ptr %found, i64 %div1472
  %8 = load i64, ptr %arrayidx43, align 8
  %or = or i64 %8, %3
  store i64 %or, ptr %arrayidx43, align 8
  br label %for.inc48

for.inc48:
  %any.1 = phi i1 [ %any.080, %cond.end27 ], [ true, %cond.true37 ], [ %any.080, %cond.true13 ], [ %any.080, %for.body10 ]
  %inc49 = add nuw nsw i64 %cpu.078, 1
  %exitcond81.not = icmp eq i64 %inc49, %cpus
  br i1 %exitcond81.not, label %for.cond.cleanup9, label %for.body10
}

declare void @llvm.memcpy.p0.p0.i64(ptr noalias writeonly captures(none), ptr noalias readonly captures(none), i64, i1 immarg)

define noundef i32 @work_body(ptr noundef %self) local_unnamed_addr {
entry:
  %pool1 = getelementptr inbounds nuw i8, ptr %self, i64 8
  %0 = load ptr, ptr %pool1, align 8
  %number2 = getelementptr inbounds nuw i8, ptr %self, i64 16
  %1 = load i64, ptr %number2, align 16
  %conv = trunc i64 %1 to i32
  %cond = tail call i32 @llvm.umin.i32(i32 %conv, i32 31)
  %shl = shl nuw i32 1, %cond
  %2 = load i32, ptr @key, align 4
  %call = tail call i32 @pthread_setspecific(i32 noundef %2, ptr noundef nonnull inttoptr (i64 1 to ptr))
  %spin_ns.i = getelementptr inbounds nuw i8, ptr %0, i64 152
  %sleepers = getelementptr inbounds nuw i8, ptr %0, i64 68
  %cpu = getelementptr inbounds nuw i8, ptr %self, i64 32
  %late_since = getelementptr inbounds nuw i8, ptr %self, i64 40
  %caller_sleeps = getelementptr inbounds nuw i8, ptr %0, i64 64
  br label %for.cond

for.cond:
  %job.0 = phi i64 [ 0, %entry ], [ %5, %for.cond.backedge ]
  %3 = load atomic i64, ptr %spin_ns.i monotonic, align 8
  %cmp.i = icmp slt i64 %3, 0
  br i1 %cmp.i, label %cond.true.i, label %spin_of.exit

cond.true.i:
  %4 = load atomic i64, ptr @spin_ns monotonic, align 8
  br label %spin_of.exit

spin_of.exit:
  %cond.i = phi i64 [ %4, %cond.true.i ], [ %3, %for.cond ]
  %mul = shl nsw i64 %cond.i, 4
  %call6 = tail call fastcc zeroext i1 @await(ptr noundef nonnull %0, i64 noundef %job.0, i64 noundef %mul, i32 noundef %shl, ptr noundef nonnull %sleepers)
  %5 = load atomic i64, ptr %0 acquire, align 128
  %cmp8 = icmp eq i64 %5, -1
  br i1 %cmp8, label %cleanup31, label %if.end

if.end:
  %call.i = tail call i32 @sched_getcpu()
  %conv.i = sext i32 %call.i to i64
  %add.i = add nsw i64 %conv.i, 1
  store atomic i64 %add.i, ptr %cpu monotonic, align 32
  store atomic i64 0, ptr %late_since monotonic, align 8
  %6 = trunc i64 %5 to i32
  %7 = lshr i32 %6, 1
  %conv12 = and i32 %7, 1023
  %cmp13.not = icmp ugt i32 %conv12, %conv
  br i1 %cmp13.not, label %if.end16, label %for.cond.backedge

if.end16:
  br i1 %call6, label %if.then17, label %if.end18

if.then17:
  tail call fastcc void @wake_some(ptr noundef nonnull %0, i32 noundef %conv12)
  br label %if.end18

if.end18:
  %8 = load atomic i64, ptr %self acquire, align 128
  %cmp.i57 = icmp ult i64 %8, %5
  br i1 %cmp.i57, label %claim.exit, label %for.cond.backedge

for.cond.backedge:
  br label %for.cond

claim.exit:
  %9 = cmpxchg ptr %self, i64 %8, i64 %5 seq_cst seq_cst, align 128
  %10 = extractvalue { i64, i1 } %9, 1
  br i1 %10, label %if.end21, label %for.cond.backedge

if.end21:
  tail call fastcc void @run_task(ptr noundef nonnull %0, i32 noundef %conv)
  tail call fastcc void @run_free_tasks(ptr noundef nonnull %0)
  %or = or i64 %5, 1
  %11 = atomicrmw xchg ptr %self, i64 %or seq_cst, align 128
  %12 = load atomic i32, ptr %caller_sleeps seq_cst, align 64
  %cmp25.not = icmp eq i32 %12, 0
  br i1 %cmp25.not, label %for.cond.backedge, label %if.then27

if.then27:
  %call.i58 = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef nonnull %self, i32 noundef 138, i32 noundef 1, ptr noundef null, ptr noundef null, i32 noundef -1)
  br label %for.cond.backedge

cleanup31:
  ret i32 0
}

declare void @llvm.lifetime.start.p0(ptr captures(none))

declare i32 @pthread_setspecific(i32 noundef, ptr noundef) local_unnamed_addr

define internal fastcc noundef zeroext i1 @await(ptr noundef %address, i64 noundef %old, i64 noundef %limit, i32 noundef %mask, ptr noundef captures(none) %sleepers) unnamed_addr {
entry:
  %call6 = tail call fastcc zeroext i1 @spin_while(ptr noundef %address, i64 noundef %old, i64 noundef %limit)
  br i1 %call6, label %while.end, label %while.body.lr.ph

while.body.lr.ph:
  %conv.i = trunc i64 %old to i32
  br label %while.body

while.body:
  %0 = atomicrmw add ptr %sleepers, i32 1 seq_cst, align 4
  %call.i = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef %address, i32 noundef 137, i32 noundef %conv.i, ptr noundef null, ptr noundef null, i32 noundef %mask)
  %1 = atomicrmw sub ptr %sleepers, i32 1 seq_cst, align 4
  %call = tail call fastcc zeroext i1 @spin_while(ptr noundef %address, i64 noundef %old, i64 noundef %limit)
  br i1 %call, label %while.end, label %while.body

while.end:
  %has_slept.0.lcssa = xor i1 %call6, true
  ret i1 %has_slept.0.lcssa
}

define internal fastcc void @wake_some(ptr noundef %pool, i32 noundef %tasks) unnamed_addr {
entry:
  %sleepers = getelementptr inbounds nuw i8, ptr %pool, i64 68
  %0 = load atomic i32, ptr %sleepers seq_cst, align 4
  %cmp.not = icmp eq i32 %0, 0
  br i1 %cmp.not, label %if.end, label %if.then

if.then:
  %cmp1 = icmp ult i32 %tasks, 32
  %notmask = shl nsw i32 -1, %tasks
  %sub = xor i32 %notmask, -1
  %cond = select i1 %cmp1, i32 %sub, i32 -1
  %call.i = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef nonnull %pool, i32 noundef 138, i32 noundef 8, ptr noundef null, ptr noundef null, i32 noundef %cond)
  br label %if.end

if.end:
  ret void
}

define internal fastcc void @run_task(ptr noundef %pool, i32 noundef %task) unnamed_addr {
entry:
  %error = alloca ptr, align 8
  %function = getelementptr inbounds nuw i8, ptr %pool, i64 8
  %0 = load ptr, ptr %function, align 8
  %group = getelementptr inbounds nuw i8, ptr %pool, i64 24
  %data = getelementptr inbounds nuw i8, ptr %pool, i64 16
  %1 = load ptr, ptr %data, align 16
  %call = tail call i32 %0(i32 noundef %task, ptr noundef nonnull %group, ptr noundef %1)
  %cmp = icmp eq i32 %call, 0
  br i1 %cmp, label %return, label %if.end

if.end:
  call void @llvm.lifetime.start.p0(ptr nonnull %error)
  store ptr null, ptr %error, align 8
  %2 = load ptr, ptr @take_error, align 8
  call void %2(ptr noundef nonnull %error)
  %error1 = getelementptr inbounds nuw i8, ptr %pool, i64 128
  %3 = load ptr, ptr %error, align 8
  %4 = ptrtoint ptr %3 to i64
  %5 = atomicrmw xchg ptr %error1, i64 %4 seq_cst, align 128
  %cmp2.not = icmp eq i64 %5, 0
  br i1 %cmp2.not, label %if.end5, label %if.then3

if.then3:
  %6 = inttoptr i64 %5 to ptr
  %7 = load ptr, ptr @drop_error, align 8
  %call4 = call i32 %7(ptr noundef nonnull %6)
  br label %if.end5

if.end5:
  call void @llvm.lifetime.end.p0(ptr nonnull %error)
  br label %return

return:
  ret void
}

define internal fastcc void @run_free_tasks(ptr noundef %pool) unnamed_addr {
entry:
  %tasks1 = getelementptr inbounds nuw i8, ptr %pool, i64 32
  %0 = load i32, ptr %tasks1, align 8
  %used = getelementptr inbounds nuw i8, ptr %pool, i64 136
  %1 = load i32, ptr %used, align 8
  %cmp = icmp eq i32 %0, %1
  br i1 %cmp, label %cleanup, label %for.cond.preheader

for.cond.preheader:
  %next_task = getelementptr inbounds nuw i8, ptr %pool, i64 72
  %2 = atomicrmw add ptr %next_task, i32 1 seq_cst, align 8
  %cmp28 = icmp ult i32 %2, %0
  br i1 %cmp28, label %for.body, label %cleanup

for.body:
  %3 = phi i32 [ %4, %for.body ], [ %2, %for.cond.preheader ]
  tail call fastcc void @run_task(ptr noundef nonnull %pool, i32 noundef %3)
  %4 = atomicrmw add ptr %next_task, i32 1 seq_cst, align 8
  %cmp2 = icmp ult i32 %4, %0
  br i1 %cmp2, label %for.body, label %cleanup

cleanup:
  ret void
}

declare void @llvm.lifetime.end.p0(ptr captures(none))

define noundef i32 @end_body(ptr noundef %pool) local_unnamed_addr {
entry:
  %cmp = icmp eq ptr %pool, inttoptr (i64 1 to ptr)
  br i1 %cmp, label %return, label %if.end

if.end:
  %0 = atomicrmw xchg ptr %pool, i64 -1 seq_cst, align 8
  %call.i.i = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef %pool, i32 noundef 138, i32 noundef 2147483647, ptr noundef null, ptr noundef null, i32 noundef -1)
  %begun = getelementptr inbounds nuw i8, ptr %pool, i64 140
  %1 = load i32, ptr %begun, align 4
  %cmp18 = icmp ugt i32 %1, 1
  br i1 %cmp18, label %for.body, label %for.cond.cleanup

for.cond.cleanup:
  tail call void @free(ptr noundef nonnull %pool)
  br label %return

for.body:
  %indvars.iv = phi i64 [ %indvars.iv.next, %for.body ], [ 1, %if.end ]
  %arrayidx = getelementptr inbounds nuw %struct.worker, ptr %pool, i64 %indvars.iv
  %thread = getelementptr inbounds nuw i8, ptr %arrayidx, i64 280
  %2 = load i64, ptr %thread, align 8
  %call = tail call i32 @pthread_join(i64 noundef %2, ptr noundef null)
  %indvars.iv.next = add nuw nsw i64 %indvars.iv, 1
  %3 = load i32, ptr %begun, align 4
  %4 = zext i32 %3 to i64
  %cmp1 = icmp samesign ult i64 %indvars.iv.next, %4
  br i1 %cmp1, label %for.body, label %for.cond.cleanup

return:
  ret i32 0
}

declare i32 @pthread_join(i64 noundef, ptr noundef) local_unnamed_addr

declare void @free(ptr allocptr noundef captures(none)) local_unnamed_addr

define i32 @launch_body(ptr noundef %function, ptr noundef %data, i32 noundef %asked) local_unnamed_addr {
entry:
  %time.i.i = alloca %struct.timespec, align 8
  %all.i = alloca %struct.__sigset_t, align 8
  %before.i = alloca %struct.__sigset_t, align 8
  %counter.i = alloca [16 x i32], align 64
  %group.i = alloca %struct.group, align 8
  %0 = load i32, ptr @key, align 4
  %call = tail call ptr @pthread_getspecific(i32 noundef %0)
  %cmp = icmp eq ptr %call, null
  br i1 %cmp, label %if.then, label %if.end

if.then:
  %1 = load i32, ptr @default_width, align 4
  %call1 = tail call fastcc ptr @make_pool(i32 noundef %1, i32 noundef %1)
  br label %if.end

if.end:
  %pool.0 = phi ptr [ %call1, %if.then ], [ %call, %entry ]
  %cmp5 = icmp ne i32 %asked, 0
  %2 = icmp ult ptr %pool.0, inttoptr (i64 2 to ptr)
  %or.cond = or i1 %cmp5, %2
  br i1 %or.cond, label %if.then9, label %lor.lhs.false6

lor.lhs.false6:
  %is_running = getelementptr inbounds nuw i8, ptr %pool.0, i64 160
  %3 = load i8, ptr %is_running, align 32
  %loadedv = trunc nuw i8 %3 to i1
  br i1 %loadedv, label %if.then9, label %lor.lhs.false7

lor.lhs.false7:
  %used = getelementptr inbounds nuw i8, ptr %pool.0, i64 136
  %4 = load i32, ptr %used, align 8
  %cmp8 = icmp ult i32 %4, 2
  br i1 %cmp8, label %if.then9, label %if.end11

if.then9:
  call void @llvm.lifetime.start.p0(ptr nonnull %counter.i)
  call void @llvm.lifetime.start.p0(ptr nonnull %group.i)
  store ptr %counter.i, ptr %group.i, align 8
  %tasks.i = getelementptr inbounds nuw i8, ptr %group.i, i64 8
  %cond.i = call i32 @llvm.umax.i32(i32 %asked, i32 1)
  store i32 %cond.i, ptr %tasks.i, align 8
  %5 = getelementptr inbounds nuw i8, ptr %group.i, i64 12
  store i32 0, ptr %5, align 4
  %arrayidx.i = getelementptr inbounds nuw i8, ptr %counter.i, i64 4
  store i32 0, ptr %arrayidx.i, align 4
  store i32 0, ptr %counter.i, align 64
  %cmp39.i = icmp sgt i32 %cond.i, 0
  br i1 %cmp39.i, label %for.body.i, label %run_alone.exit

for.body.i:
  %task.010.i = phi i32 [ %inc.i, %for.body.i ], [ 0, %if.then9 ]
  %call.i = call i32 %function(i32 noundef %task.010.i, ptr noundef nonnull %group.i, ptr noundef %data)
  %inc.i = add nuw nsw i32 %task.010.i, 1
  %6 = load i32, ptr %tasks.i, align 8
  %cmp3.i = icmp slt i32 %inc.i, %6
  %cmp4.i = icmp eq i32 %call.i, 0
  %7 = select i1 %cmp3.i, i1 %cmp4.i, i1 false
  br i1 %7, label %for.body.i, label %run_alone.exit

run_alone.exit:
  %status.0.lcssa.i = phi i32 [ 0, %if.then9 ], [ %call.i, %for.body.i ]
  call void @llvm.lifetime.end.p0(ptr nonnull %group.i)
  call void @llvm.lifetime.end.p0(ptr nonnull %counter.i)
  br label %cleanup66

if.end11:
  %begun = getelementptr inbounds nuw i8, ptr %pool.0, i64 140
  %8 = load i32, ptr %begun, align 4
  %cmp13 = icmp ult i32 %8, %4
  br i1 %cmp13, label %if.then14, label %if.end15

if.then14:
  call void @llvm.lifetime.start.p0(ptr nonnull %all.i)
  call void @llvm.lifetime.start.p0(ptr nonnull %before.i)
  %call.i119 = call i32 @sigfillset(ptr noundef nonnull %all.i)
  %call1.i = call i32 @pthread_sigmask(i32 noundef 2, ptr noundef nonnull %all.i, ptr noundef nonnull %before.i)
  %workers.i = getelementptr inbounds nuw i8, ptr %pool.0, i64 256
  %9 = load i32, ptr %begun, align 4
  %10 = load i32, ptr %used, align 8
  %cmp19.i = icmp ult i32 %9, %10
  br i1 %cmp19.i, label %for.body.i120, label %begin_workers.exit

for.body.i120:
  %11 = phi i32 [ %inc.i122, %for.inc.i ], [ %9, %if.then14 ]
  %idxprom.i = zext i32 %11 to i64
  %arrayidx.i121 = getelementptr inbounds nuw %struct.worker, ptr %workers.i, i64 %idxprom.i
  %pool3.i = getelementptr inbounds nuw i8, ptr %arrayidx.i121, i64 8
  store ptr %pool.0, ptr %pool3.i, align 8
  %number.i = getelementptr inbounds nuw i8, ptr %arrayidx.i121, i64 16
  store i64 %idxprom.i, ptr %number.i, align 16
  %thread.i = getelementptr inbounds nuw i8, ptr %arrayidx.i121, i64 24
  %call5.i = call i32 @pthread_create(ptr noundef nonnull %thread.i, ptr noundef null, ptr noundef nonnull @relax_hetero_workers_work, ptr noundef nonnull %arrayidx.i121)
  %cmp6.not.i = icmp eq i32 %call5.i, 0
  br i1 %cmp6.not.i, label %for.inc.i, label %begin_workers.exit

for.inc.i:
  %12 = load i32, ptr %begun, align 4
  %inc.i122 = add i32 %12, 1
  store i32 %inc.i122, ptr %begun, align 4
  %13 = load i32, ptr %used, align 8
  %cmp.i = icmp ult i32 %inc.i122, %13
  br i1 %cmp.i, label %for.body.i120, label %begin_workers.exit

begin_workers.exit:
  %call9.i = call i32 @pthread_sigmask(i32 noundef 2, ptr noundef nonnull %before.i, ptr noundef null)
  call void @llvm.lifetime.end.p0(ptr nonnull %before.i)
  call void @llvm.lifetime.end.p0(ptr nonnull %all.i)
  %.pre = load i32, ptr %used, align 8
  br label %if.end15

if.end15:
  %14 = phi i32 [ %.pre, %begin_workers.exit ], [ %4, %if.end11 ]
  store i8 1, ptr %is_running, align 32
  %function19 = getelementptr inbounds nuw i8, ptr %pool.0, i64 8
  store ptr %function, ptr %function19, align 8
  %data20 = getelementptr inbounds nuw i8, ptr %pool.0, i64 16
  store ptr %data, ptr %data20, align 16
  %15 = load i32, ptr @thread_tasks, align 4
  %mul = mul i32 %15, %14
  %tasks = getelementptr inbounds nuw i8, ptr %pool.0, i64 32
  store i32 %mul, ptr %tasks, align 32
  %next_task = getelementptr inbounds nuw i8, ptr %pool.0, i64 72
  store atomic i32 %14, ptr %next_task monotonic, align 8
  %16 = load atomic i64, ptr %pool.0 monotonic, align 128
  %shr = and i64 %16, -2048
  %shl = add i64 %shr, 2048
  %conv = zext i32 %14 to i64
  %shl22 = shl nuw nsw i64 %conv, 1
  %or = or i64 %shl, %shl22
  %or23 = or disjoint i64 %or, 1
  %17 = atomicrmw xchg ptr %pool.0, i64 %or seq_cst, align 128
  call fastcc void @wake_some(ptr noundef nonnull %pool.0, i32 noundef %14)
  call fastcc void @run_task(ptr noundef nonnull %pool.0, i32 noundef 0)
  call fastcc void @run_free_tasks(ptr noundef nonnull %pool.0)
  %cmp27133 = icmp ugt i32 %14, 1
  br i1 %cmp27133, label %for.body.lr.ph, label %for.cond.cleanup.thread

for.cond.cleanup.thread:
  %call.i123148 = call i32 @sched_getcpu()
  br label %for.cond.cleanup37

for.body.lr.ph:
  %workers = getelementptr inbounds nuw i8, ptr %pool.0, i64 256
  %tv_nsec.i.i = getelementptr inbounds nuw i8, ptr %time.i.i, i64 8
  br label %for.body

for.cond.cleanup:
  %call.i123 = call i32 @sched_getcpu()
  %conv.i = sext i32 %call.i123 to i64
  %add.i = add nsw i64 %conv.i, 1
  %workers40 = getelementptr inbounds nuw i8, ptr %pool.0, i64 256
  %spin_ns.i.i = getelementptr inbounds nuw i8, ptr %pool.0, i64 152
  %caller_sleeps.i = getelementptr inbounds nuw i8, ptr %pool.0, i64 64
  %conv.i17.i = trunc i64 %or to i32
  br label %for.body38

for.body:
  %indvars.iv = phi i64 [ 1, %for.body.lr.ph ], [ %indvars.iv.next, %if.end31 ]
  %arrayidx = getelementptr inbounds nuw %struct.worker, ptr %workers, i64 %indvars.iv
  %18 = load atomic i64, ptr %arrayidx acquire, align 128
  %cmp.i124 = icmp ult i64 %18, %or
  br i1 %cmp.i124, label %claim.exit, label %if.end31

claim.exit:
  %19 = cmpxchg ptr %arrayidx, i64 %18, i64 %or23 seq_cst seq_cst, align 128
  %20 = extractvalue { i64, i1 } %19, 1
  br i1 %20, label %if.then30, label %if.end31

if.then30:
  %late_since.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 40
  %21 = load atomic i64, ptr %late_since.i monotonic, align 8
  call void @llvm.lifetime.start.p0(ptr nonnull %time.i.i)
  %call.i.i = call i32 @clock_gettime(i32 noundef 1, ptr noundef nonnull %time.i.i)
  %22 = load i64, ptr %time.i.i, align 8
  %mul.i.i = mul nsw i64 %22, 1000000000
  %23 = load i64, ptr %tv_nsec.i.i, align 8
  %add.i.i = add nsw i64 %mul.i.i, %23
  call void @llvm.lifetime.end.p0(ptr nonnull %time.i.i)
  %cmp.i125 = icmp eq i64 %21, 0
  br i1 %cmp.i125, label %if.then.i, label %if.else.i

if.then.i:
  store atomic i64 %add.i.i, ptr %late_since.i monotonic, align 8
  br label %note_late.exit

if.else.i:
  %sub.i = sub nsw i64 %add.i.i, %21
  %cmp2.i = icmp sgt i64 %sub.i, 200000
  br i1 %cmp2.i, label %if.then3.i, label %note_late.exit

if.then3.i:
  call fastcc void @keep_apart(ptr noundef nonnull readonly %pool.0, ptr noundef nonnull %arrayidx)
  br label %note_late.exit

note_late.exit:
  %24 = trunc nuw i64 %indvars.iv to i32
  call fastcc void @run_task(ptr noundef nonnull %pool.0, i32 noundef %24)
  br label %if.end31

if.end31:
  %indvars.iv.next = add nuw nsw i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %conv
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body

for.cond.cleanup37:
  store i8 0, ptr %is_running, align 32
  %error52 = getelementptr inbounds nuw i8, ptr %pool.0, i64 128
  %25 = load atomic i64, ptr %error52 monotonic, align 128
  %cmp54 = icmp eq i64 %25, 0
  br i1 %cmp54, label %cleanup66, label %if.end57

for.body38:
  %indvars.iv138 = phi i64 [ 1, %for.cond.cleanup ], [ %indvars.iv.next139, %part_from.exit ]
  %arrayidx42 = getelementptr inbounds nuw %struct.worker, ptr %workers40, i64 %indvars.iv138
  %26 = load atomic i64, ptr %arrayidx42 acquire, align 128
  %cmp44.not = icmp eq i64 %26, %or23
  br i1 %cmp44.not, label %if.end47, label %if.then46

if.then46:
  %27 = load atomic i64, ptr %spin_ns.i.i monotonic, align 8
  %cmp.i.i = icmp slt i64 %27, 0
  br i1 %cmp.i.i, label %cond.true.i.i, label %spin_of.exit.i

cond.true.i.i:
  %28 = load atomic i64, ptr @spin_ns monotonic, align 8
  br label %spin_of.exit.i

spin_of.exit.i:
  %cond.i.i = phi i64 [ %28, %cond.true.i.i ], [ %27, %if.then46 ]
  %call1.i126 = call fastcc zeroext i1 @spin_while(ptr noundef nonnull %arrayidx42, i64 noundef %or, i64 noundef %cond.i.i)
  br i1 %call1.i126, label %if.end47, label %if.end.i

if.end.i:
  %call.i.i127 = call i32 @sched_getcpu()
  %conv.i.i = sext i32 %call.i.i127 to i64
  %add.i.i128 = add nsw i64 %conv.i.i, 1
  %cpu1.i.i = getelementptr inbounds nuw i8, ptr %arrayidx42, i64 32
  %29 = load atomic i64, ptr %cpu1.i.i monotonic, align 32
  %cmp.i16.i = icmp eq i64 %29, %add.i.i128
  br i1 %cmp.i16.i, label %if.then.i.i, label %part_from.exit.i

if.then.i.i:
  call fastcc void @keep_apart(ptr noundef nonnull readonly %pool.0, ptr noundef nonnull %arrayidx42)
  br label %part_from.exit.i

part_from.exit.i:
  %30 = atomicrmw xchg ptr %caller_sleeps.i, i32 1 seq_cst, align 64
  br label %do.body.i

do.body.i:
  %call.i18.i = call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef nonnull %arrayidx42, i32 noundef 137, i32 noundef %conv.i17.i, ptr noundef null, ptr noundef null, i32 noundef -1)
  %31 = load atomic i64, ptr %arrayidx42 seq_cst, align 128
  %cmp.i129 = icmp eq i64 %31, %or
  br i1 %cmp.i129, label %do.body.i, label %do.end.i

do.end.i:
  store atomic i32 0, ptr %caller_sleeps.i seq_cst, align 64
  br label %if.end47

if.end47:
  %cpu1.i = getelementptr inbounds nuw i8, ptr %arrayidx42, i64 32
  %32 = load atomic i64, ptr %cpu1.i monotonic, align 32
  %cmp.i130 = icmp eq i64 %32, %add.i
  br i1 %cmp.i130, label %if.then.i132, label %part_from.exit

if.then.i132:
  call fastcc void @keep_apart(ptr noundef nonnull readonly %pool.0, ptr noundef nonnull %arrayidx42)
  br label %part_from.exit

part_from.exit:
  %indvars.iv.next139 = add nuw nsw i64 %indvars.iv138, 1
  %exitcond142.not = icmp eq i64 %indvars.iv.next139, %conv
  br i1 %exitcond142.not, label %for.cond.cleanup37, label %for.body38

if.end57:
  %33 = inttoptr i64 %25 to ptr
  store atomic i64 0, ptr %error52 monotonic, align 128
  %34 = load ptr, ptr @raise_error, align 8
  call void %34(ptr noundef nonnull %33)
  %35 = load ptr, ptr @drop_error, align 8
  %call60 = call i32 %35(ptr noundef nonnull %33)
  br label %cleanup66

cleanup66:
  %retval.1 = phi i32 [ %status.0.lcssa.i, %run_alone.exit ], [ -1, %if.end57 ], [ 0, %for.cond.cleanup37 ]
  ret i32 %retval.1
}

declare ptr @pthread_getspecific(i32 noundef) local_unnamed_addr

define internal fastcc noundef ptr @make_pool(i32 noundef %capacity, i32 noundef %used) unnamed_addr {
entry:
  %conv = zext i32 %capacity to i64
  %mul = shl nuw nsw i64 %conv, 7
  %add = add nuw nsw i64 %mul, 256
  %call = tail call noalias align 128 ptr @aligned_alloc(i64 noundef 128, i64 noundef %add)
  %cmp.not = icmp eq ptr %call, null
  br i1 %cmp.not, label %if.end, label %if.then

if.then:
  tail call void @llvm.memset.p0.i64(ptr noundef nonnull align 128 dereferenceable(1) %call, i8 0, i64 %add, i1 false)
  %used2 = getelementptr inbounds nuw i8, ptr %call, i64 136
  store i32 %used, ptr %used2, align 8
  %begun = getelementptr inbounds nuw i8, ptr %call, i64 140
  store i32 1, ptr %begun, align 4
  %capacity3 = getelementptr inbounds nuw i8, ptr %call, i64 144
  store i32 %capacity, ptr %capacity3, align 16
  %spin_ns = getelementptr inbounds nuw i8, ptr %call, i64 152
  store i64 -1, ptr %spin_ns, align 8
  br label %if.end

if.end:
  %0 = load i32, ptr @key, align 4
  %call4 = tail call i32 @pthread_setspecific(i32 noundef %0, ptr noundef %call)
  ret ptr %call
}

define range(i64 -2147483648, 2147483648) i64 @start_body(i64 noundef %take, i64 noundef %raise, i64 noundef %drop, i64 noundef %width, i64 noundef %spin, i64 noundef %cores, i64 noundef %cpus, i64 noundef %tasks) local_unnamed_addr {
entry:
  %0 = inttoptr i64 %take to ptr
  store ptr %0, ptr @take_error, align 8
  %1 = inttoptr i64 %raise to ptr
  store ptr %1, ptr @raise_error, align 8
  %2 = inttoptr i64 %drop to ptr
  store ptr %2, ptr @drop_error, align 8
  %conv = trunc i64 %width to i32
  store i32 %conv, ptr @default_width, align 4
  store atomic i64 %spin, ptr @spin_ns monotonic, align 8
  %3 = inttoptr i64 %cores to ptr
  store ptr %3, ptr @cpu_cores, align 8
  store i64 %cpus, ptr @num_cpus, align 8
  %conv1 = trunc i64 %tasks to i32
  store i32 %conv1, ptr @thread_tasks, align 4
  %call = tail call i32 @pthread_key_create(ptr noundef nonnull @key, ptr noundef nonnull @relax_hetero_workers_end)
  %conv2 = sext i32 %call to i64
  ret i64 %conv2
}

declare i32 @pthread_key_create(ptr noundef, ptr noundef) local_unnamed_addr

declare i32 @relax_hetero_workers_end(ptr noundef)

define noundef i64 @configure_body(i64 noundef %capacity, i64 noundef %used, i64 noundef %spin) local_unnamed_addr {
entry:
  %0 = load i32, ptr @key, align 4
  %call = tail call ptr @pthread_getspecific(i32 noundef %0)
  %magicptr = ptrtoint ptr %call to i64
  switch i64 %magicptr, label %land.lhs.true [
    i64 1, label %cleanup
    i64 0, label %entry.if.end16_crit_edge
  ]

entry.if.end16_crit_edge:
  %.pre = trunc i64 %capacity to i32
  br label %if.end16

land.lhs.true:
  %is_running = getelementptr inbounds nuw i8, ptr %call, i64 160
  %1 = load i8, ptr %is_running, align 32
  %loadedv = trunc nuw i8 %1 to i1
  br i1 %loadedv, label %cleanup, label %land.lhs.true3

land.lhs.true3:
  %capacity4 = getelementptr inbounds nuw i8, ptr %call, i64 144
  %2 = load i32, ptr %capacity4, align 16
  %conv = trunc i64 %capacity to i32
  %cmp5 = icmp ult i32 %2, %conv
  br i1 %cmp5, label %if.then7, label %land.lhs.true3.if.then19_crit_edge

land.lhs.true3.if.then19_crit_edge:
  %.pre39 = trunc i64 %used to i32
  br label %if.then19

if.then7:
  %call8 = tail call i32 @end_body(ptr noundef nonnull %call)
  br label %if.end16

if.end16:
  %conv13.pre-phi = phi i32 [ %.pre, %entry.if.end16_crit_edge ], [ %conv, %if.then7 ]
  %conv14 = trunc i64 %used to i32
  %call15 = tail call fastcc ptr @make_pool(i32 noundef %conv13.pre-phi, i32 noundef %conv14)
  %cmp17.not = icmp eq ptr %call15, null
  br i1 %cmp17.not, label %cleanup, label %if.then19

if.then19:
  %conv20.pre-phi = phi i32 [ %.pre39, %land.lhs.true3.if.then19_crit_edge ], [ %conv14, %if.end16 ]
  %pool.138 = phi ptr [ %call, %land.lhs.true3.if.then19_crit_edge ], [ %call15, %if.end16 ]
  %used21 = getelementptr inbounds nuw i8, ptr %pool.138, i64 136
  store i32 %conv20.pre-phi, ptr %used21, align 8
  %spin_ns = getelementptr inbounds nuw i8, ptr %pool.138, i64 152
  store atomic i64 %spin, ptr %spin_ns monotonic, align 8
  br label %cleanup

cleanup:
  ret i64 0
}

define noundef i64 @spin_body(i64 noundef %spin) local_unnamed_addr {
entry:
  store atomic i64 %spin, ptr @spin_ns monotonic, align 8
  ret i64 0
}

define range(i64 -2147483648, 2147483648) i64 @forget_body() local_unnamed_addr {
entry:
  %0 = load i32, ptr @key, align 4
  %call = tail call i32 @pthread_setspecific(i32 noundef %0, ptr noundef null)
  %conv = sext i32 %call to i64
  ret i64 %conv
}

define range(i64 0, 4294967296) i64 @width_body() local_unnamed_addr {
entry:
  %0 = load i32, ptr @key, align 4
  %call = tail call ptr @pthread_getspecific(i32 noundef %0)
  %magicptr = ptrtoint ptr %call to i64
  %1 = icmp ult ptr %call, inttoptr (i64 2 to ptr)
  br i1 %1, label %cond.end, label %cond.false

cond.false:
  %used = getelementptr inbounds nuw i8, ptr %call, i64 136
  %2 = load i32, ptr %used, align 8
  %conv = zext i32 %2 to i64
  br label %cond.end

cond.end:
  %cond = phi i64 [ %conv, %cond.false ], [ %magicptr, %entry ]
  ret i64 %cond
}

define noundef i64 @launch_address_body() local_unnamed_addr {
entry:
  ret i64 ptrtoint (ptr @relax_hetero_workers_launch to i64)
}

declare i32 @relax_hetero_workers_launch(ptr noundef, ptr noundef, i32 noundef)

define noundef i64 @stage_address_body() local_unnamed_addr {
entry:
  ret i64 ptrtoint (ptr @relax_hetero_workers_stage to i64)
}

declare i32 @relax_hetero_workers_stage(ptr noundef, ptr noundef, ptr noundef)

define noundef i64 @help_address_body() local_unnamed_addr {
entry:
  ret i64 ptrtoint (ptr @relax_hetero_workers_help to i64)
}

declare i32 @relax_hetero_workers_help(ptr noundef, ptr noundef)

define noundef i32 @stage_body(ptr noundef %desk, ptr noundef %copy, ptr noundef captures(none) %lane) local_unnamed_addr {
entry:
  %cmp = icmp eq ptr %copy, null
  br i1 %cmp, label %if.then, label %if.end

if.then:
  %0 = atomicrmw xchg ptr %desk, i64 -1 seq_cst, align 8
  %call.i.i = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef %desk, i32 noundef 138, i32 noundef 2147483647, ptr noundef null, ptr noundef null, i32 noundef -1)
  br label %return

if.end:
  %copy1 = getelementptr inbounds nuw i8, ptr %desk, i64 64
  %1 = ptrtoint ptr %copy to i64
  store atomic i64 %1, ptr %copy1 seq_cst, align 8
  %2 = atomicrmw add ptr %desk, i64 1 seq_cst, align 8
  %call.i = tail call i64 (i64, ...) @syscall(i64 noundef 202, ptr noundef %desk, i32 noundef 138, i32 noundef 2147483647, ptr noundef null, ptr noundef null, i32 noundef -1)
  tail call fastcc void @copy_parts(ptr noundef %copy, ptr noundef %lane)
  store atomic i64 0, ptr %copy1 seq_cst, align 8
  %helpers7 = getelementptr inbounds nuw i8, ptr %desk, i64 72
  %3 = load atomic i64, ptr %helpers7 seq_cst, align 8
  %cmp9.not19 = icmp eq i64 %3, 0
  br i1 %cmp9.not19, label %return, label %for.body

for.body:
  %4 = phi i64 [ %5, %for.body ], [ %3, %if.end ]
  %call = tail call fastcc zeroext i1 @spin_while(ptr noundef nonnull %helpers7, i64 noundef %4, i64 noundef 1000000)
  %5 = load atomic i64, ptr %helpers7 seq_cst, align 8
  %cmp9.not = icmp eq i64 %5, 0
  br i1 %cmp9.not, label %return, label %for.body

return:
  ret i32 0
}

define internal fastcc void @copy_parts(ptr noundef nonnull captures(none) %copy, ptr noundef captures(none) %lane) unnamed_addr {
entry:
  %use_context = getelementptr inbounds nuw i8, ptr %copy, i64 80
  %0 = load ptr, ptr %use_context, align 8
  %context = getelementptr inbounds nuw i8, ptr %copy, i64 72
  %1 = load ptr, ptr %context, align 8
  %call = tail call i32 %0(ptr noundef %1)
  %cmp.i.not = icmp eq i32 %call, 0
  br i1 %cmp.i.not, label %fails.exit, label %land.lhs.true.i

land.lhs.true.i:
  %status1.i = getelementptr inbounds nuw i8, ptr %copy, i64 120
  %conv.i = sext i32 %call to i64
  %2 = cmpxchg ptr %status1.i, i64 0, i64 %conv.i seq_cst seq_cst, align 8
  %3 = extractvalue { i64, i1 } %2, 1
  br i1 %3, label %if.then.i, label %fails.exit

if.then.i:
  %function3.i = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 0, ptr %function3.i, align 8
  br label %fails.exit

fails.exit:
  %status = getelementptr inbounds nuw i8, ptr %copy, i64 120
  %4 = load atomic i64, ptr %status acquire, align 8
  %cmp124 = icmp eq i64 %4, 0
  br i1 %cmp124, label %while.body.lr.ph, label %for.cond.preheader

while.body.lr.ph:
  %parts = getelementptr inbounds nuw i8, ptr %copy, i64 8
  %wait = getelementptr inbounds nuw i8, ptr %copy, i64 104
  %begun = getelementptr inbounds nuw i8, ptr %copy, i64 64
  %to_host = getelementptr inbounds nuw i8, ptr %copy, i64 40
  %buffers = getelementptr inbounds nuw i8, ptr %lane, i64 32
  %buffers11 = getelementptr inbounds nuw i8, ptr %copy, i64 48
  %offsets.i = getelementptr inbounds nuw i8, ptr %copy, i64 16
  %device3.i = getelementptr inbounds nuw i8, ptr %copy, i64 32
  %host.i = getelementptr inbounds nuw i8, ptr %copy, i64 24
  %copy13.i = getelementptr inbounds nuw i8, ptr %copy, i64 112
  %record.i = getelementptr inbounds nuw i8, ptr %copy, i64 96
  br label %while.body

while.body:
  %done.0125 = phi i64 [ 0, %while.body.lr.ph ], [ %inc, %cleanup15 ]
  %5 = atomicrmw add ptr %copy, i64 1 seq_cst, align 8
  %6 = load i64, ptr %parts, align 8
  %cmp3.not = icmp slt i64 %5, %6
  br i1 %cmp3.not, label %if.end, label %while.end

if.end:
  %cmp4 = icmp eq i64 %done.0125, 0
  br i1 %cmp4, label %land.lhs.true, label %if.end8

land.lhs.true:
  %7 = load ptr, ptr %wait, align 8
  %8 = load ptr, ptr %lane, align 8
  %9 = load ptr, ptr %begun, align 8
  %call5 = tail call i32 %7(ptr noundef %8, ptr noundef %9, i32 noundef 0)
  %cmp.i78.not = icmp eq i32 %call5, 0
  br i1 %cmp.i78.not, label %if.end8, label %land.lhs.true.i79

land.lhs.true.i79:
  %conv.i81 = sext i32 %call5 to i64
  %10 = cmpxchg ptr %status, i64 0, i64 %conv.i81 seq_cst seq_cst, align 8
  %11 = extractvalue { i64, i1 } %10, 1
  br i1 %11, label %if.then.i82, label %for.cond.preheader

if.then.i82:
  %function3.i83 = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 3, ptr %function3.i83, align 8
  br label %for.cond.preheader

if.end8:
  %12 = load i64, ptr %to_host, align 8
  %tobool.not = icmp eq i64 %12, 0
  br i1 %tobool.not, label %cond.end, label %cond.true

cond.true:
  %13 = load i64, ptr %parts, align 8
  %14 = xor i64 %5, -1
  %sub10 = add i64 %13, %14
  br label %cond.end

cond.end:
  %cond = phi i64 [ %sub10, %cond.true ], [ %5, %if.end8 ]
  %15 = load i64, ptr %buffers11, align 8
  %rem = srem i64 %done.0125, %15
  %arrayidx = getelementptr inbounds nuw %struct.buffer, ptr %buffers, i64 %rem
  %16 = load ptr, ptr %offsets.i, align 8
  %arrayidx.i = getelementptr inbounds i64, ptr %16, i64 %cond
  %17 = load i64, ptr %arrayidx.i, align 8
  %arrayidx2.i = getelementptr i8, ptr %arrayidx.i, i64 8
  %18 = load i64, ptr %arrayidx2.i, align 8
  %sub.i = sub nsw i64 %18, %17
  %19 = load ptr, ptr %arrayidx, align 8
  %20 = ptrtoint ptr %19 to i64
  %21 = load i64, ptr %device3.i, align 8
  %add4.i = add nsw i64 %21, %17
  %call.i = tail call fastcc zeroext i1 @settle(ptr noundef nonnull %copy, ptr noundef nonnull %arrayidx)
  br i1 %call.i, label %while.end, label %if.end.i

if.end.i:
  %22 = load i64, ptr %to_host, align 8
  %tobool.not.i = icmp eq i64 %22, 0
  br i1 %tobool.not.i, label %if.else.i, label %if.then5.i

if.then5.i:
  %offset.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 16
  store i64 %17, ptr %offset.i, align 8
  %bytes6.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 24
  store i64 %sub.i, ptr %bytes6.i, align 8
  br label %if.end8.i

if.else.i:
  %23 = load ptr, ptr %arrayidx, align 8
  %24 = load ptr, ptr %host.i, align 8
  %add.ptr.i = getelementptr inbounds i8, ptr %24, i64 %17
  tail call void @llvm.memcpy.p0.p0.i64(ptr align 1 %23, ptr align 1 %add.ptr.i, i64 %sub.i, i1 false)
  br label %if.end8.i

if.end8.i:
  %25 = load i64, ptr %to_host, align 8
  %tobool10.not.i = icmp eq i64 %25, 0
  %26 = load ptr, ptr %copy13.i, align 8
  %27 = load ptr, ptr %lane, align 8
  br i1 %tobool10.not.i, label %cond.false.i, label %cond.true.i

cond.true.i:
  %call12.i = tail call i32 %26(i64 noundef %20, i64 noundef %add4.i, i64 noundef %sub.i, ptr noundef %27)
  br label %cond.end.i

cond.false.i:
  %call15.i = tail call i32 %26(i64 noundef %add4.i, i64 noundef %20, i64 noundef %sub.i, ptr noundef %27)
  br label %cond.end.i

cond.end.i:
  %cond.i = phi i32 [ %call12.i, %cond.true.i ], [ %call15.i, %cond.false.i ]
  %cmp.i.not.i = icmp eq i32 %cond.i, 0
  br i1 %cmp.i.not.i, label %lor.rhs.i, label %land.lhs.true.i.i

land.lhs.true.i.i:
  %conv.i.i = sext i32 %cond.i to i64
  %28 = cmpxchg ptr %status, i64 0, i64 %conv.i.i seq_cst seq_cst, align 8
  %29 = extractvalue { i64, i1 } %28, 1
  br i1 %29, label %cleanup.sink.split.i, label %while.end

lor.rhs.i:
  %30 = load ptr, ptr %record.i, align 8
  %event.i = getelementptr inbounds nuw i8, ptr %arrayidx, i64 8
  %31 = load ptr, ptr %event.i, align 8
  %32 = load ptr, ptr %lane, align 8
  %call18.i = tail call i32 %30(ptr noundef %31, ptr noundef %32)
  %cmp.i50.not.i = icmp eq i32 %call18.i, 0
  br i1 %cmp.i50.not.i, label %cleanup15, label %land.lhs.true.i51.i

land.lhs.true.i51.i:
  %conv.i53.i = sext i32 %call18.i to i64
  %33 = cmpxchg ptr %status, i64 0, i64 %conv.i53.i seq_cst seq_cst, align 8
  %34 = extractvalue { i64, i1 } %33, 1
  br i1 %34, label %cleanup.sink.split.i, label %while.end

cleanup.sink.split.i:
  %.sink.i = phi i64 [ 4, %land.lhs.true.i.i ], [ 2, %land.lhs.true.i51.i ]
  %function3.i.i = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 %.sink.i, ptr %function3.i.i, align 8
  br label %while.end

cleanup15:
  %inc = add nuw nsw i64 %done.0125, 1
  %35 = load atomic i64, ptr %status acquire, align 8
  %cmp = icmp eq i64 %35, 0
  br i1 %cmp, label %while.body, label %while.end

while.end:
  %done.3 = phi i64 [ %done.0125, %land.lhs.true.i51.i ], [ %done.0125, %cleanup.sink.split.i ], [ %done.0125, %land.lhs.true.i.i ], [ %inc, %cleanup15 ], [ %done.0125, %while.body ], [ %done.0125, %cond.end ]
  %to_host16 = getelementptr inbounds nuw i8, ptr %copy, i64 40
  %36 = load i64, ptr %to_host16, align 8
  %tobool17 = icmp ne i64 %36, 0
  %cmp18 = icmp eq i64 %done.3, 0
  %or.cond = select i1 %tobool17, i1 true, i1 %cmp18
  br i1 %or.cond, label %for.cond.preheader, label %if.else

for.cond.preheader:
  %done.3142 = phi i64 [ %done.3, %while.end ], [ 0, %if.then.i82 ], [ 0, %land.lhs.true.i79 ], [ 0, %fails.exit ]
  %buffers20 = getelementptr inbounds nuw i8, ptr %copy, i64 48
  %37 = load i64, ptr %buffers20, align 8
  %cmp21128 = icmp sgt i64 %37, 0
  br i1 %cmp21128, label %for.body.lr.ph, label %if.end40

for.body.lr.ph:
  %buffers22 = getelementptr inbounds nuw i8, ptr %lane, i64 32
  br label %for.body

for.body:
  %38 = phi i64 [ %37, %for.body.lr.ph ], [ %40, %if.end29 ]
  %i.0129 = phi i64 [ 0, %for.body.lr.ph ], [ %inc30, %if.end29 ]
  %add = add nuw nsw i64 %i.0129, %done.3142
  %rem24 = srem i64 %add, %38
  %arrayidx25 = getelementptr inbounds nuw %struct.buffer, ptr %buffers22, i64 %rem24
  %bytes = getelementptr inbounds nuw i8, ptr %arrayidx25, i64 24
  %39 = load i64, ptr %bytes, align 8
  %cmp26.not = icmp eq i64 %39, 0
  br i1 %cmp26.not, label %if.end29, label %if.then27

if.then27:
  %call28 = tail call fastcc zeroext i1 @settle(ptr noundef %copy, ptr noundef nonnull %arrayidx25)
  %.pre = load i64, ptr %buffers20, align 8
  br label %if.end29

if.end29:
  %40 = phi i64 [ %.pre, %if.then27 ], [ %38, %for.body ]
  %inc30 = add nuw nsw i64 %i.0129, 1
  %cmp21 = icmp slt i64 %inc30, %40
  br i1 %cmp21, label %for.body, label %if.end40

if.else:
  %record = getelementptr inbounds nuw i8, ptr %copy, i64 96
  %41 = load ptr, ptr %record, align 8
  %ended = getelementptr inbounds nuw i8, ptr %lane, i64 8
  %42 = load ptr, ptr %ended, align 8
  %43 = load ptr, ptr %lane, align 8
  %call33 = tail call i32 %41(ptr noundef %42, ptr noundef %43)
  %cmp.i85.not = icmp eq i32 %call33, 0
  br i1 %cmp.i85.not, label %fails.exit92, label %land.lhs.true.i87

land.lhs.true.i87:
  %conv.i89 = sext i32 %call33 to i64
  %44 = cmpxchg ptr %status, i64 0, i64 %conv.i89 seq_cst seq_cst, align 8
  %45 = extractvalue { i64, i1 } %44, 1
  br i1 %45, label %if.then.i90, label %fails.exit92

if.then.i90:
  %function3.i91 = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 2, ptr %function3.i91, align 8
  br label %fails.exit92

fails.exit92:
  %wait35 = getelementptr inbounds nuw i8, ptr %copy, i64 104
  %46 = load ptr, ptr %wait35, align 8
  %stream36 = getelementptr inbounds nuw i8, ptr %copy, i64 56
  %47 = load ptr, ptr %stream36, align 8
  %48 = load ptr, ptr %ended, align 8
  %call38 = tail call i32 %46(ptr noundef %47, ptr noundef %48, i32 noundef 0)
  %cmp.i93.not = icmp eq i32 %call38, 0
  br i1 %cmp.i93.not, label %if.end40, label %land.lhs.true.i95

land.lhs.true.i95:
  %conv.i97 = sext i32 %call38 to i64
  %49 = cmpxchg ptr %status, i64 0, i64 %conv.i97 seq_cst seq_cst, align 8
  %50 = extractvalue { i64, i1 } %49, 1
  br i1 %50, label %if.then.i98, label %if.end40

if.then.i98:
  %function3.i99 = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 3, ptr %function3.i99, align 8
  br label %if.end40

if.end40:
  ret void
}

define internal fastcc noundef zeroext i1 @spin_while(ptr noundef readonly captures(none) %address, i64 noundef %old, i64 noundef %limit) unnamed_addr {
entry:
  %time.i = alloca %struct.timespec, align 8
  %tv_nsec.i = getelementptr inbounds nuw i8, ptr %time.i, i64 8
  br label %for.cond

for.cond:
  %start.0 = phi i64 [ 0, %entry ], [ %spec.select, %for.end ]
  br label %for.body

for.body:
  %polls.022 = phi i32 [ 0, %for.cond ], [ %inc, %if.end ]
  %0 = load atomic i64, ptr %address acquire, align 8
  %cmp2.not.not.not.not.not = icmp ne i64 %0, %old
  br i1 %cmp2.not.not.not.not.not, label %cleanup11, label %if.end

if.end:
  call void @llvm.x86.sse2.pause()
  %inc = add nuw nsw i32 %polls.022, 1
  %exitcond.not = icmp eq i32 %inc, 32
  br i1 %exitcond.not, label %for.end, label %for.body

for.end:
  call void @llvm.lifetime.start.p0(ptr nonnull %time.i)
  %call.i = call i32 @clock_gettime(i32 noundef 1, ptr noundef nonnull %time.i)
  %1 = load i64, ptr %time.i, align 8
  %mul.i = mul nsw i64 %1, 1000000000
  %2 = load i64, ptr %tv_nsec.i, align 8
  %add.i = add nsw i64 %mul.i, %2
  call void @llvm.lifetime.end.p0(ptr nonnull %time.i)
  %cmp3 = icmp eq i64 %start.0, 0
  %spec.select = select i1 %cmp3, i64 %add.i, i64 %start.0
  %sub = sub nsw i64 %add.i, %spec.select
  %cmp6.not = icmp sgt i64 %sub, %limit
  br i1 %cmp6.not, label %cleanup11, label %for.cond

cleanup11:
  ret i1 %cmp2.not.not.not.not.not
}

define noundef i32 @help_body(ptr noundef %desk, ptr noundef captures(none) %lane) local_unnamed_addr {
entry:
  %sleepers = alloca i32, align 4
  call void @llvm.lifetime.start.p0(ptr nonnull %sleepers)
  store i32 0, ptr %sleepers, align 4
  %call19 = call fastcc zeroext i1 @await(ptr noundef %desk, i64 noundef 0, i64 noundef 50000, i32 noundef -1, ptr noundef nonnull %sleepers)
  %0 = load atomic i64, ptr %desk acquire, align 8
  %cmp20 = icmp eq i64 %0, -1
  br i1 %cmp20, label %if.then, label %if.end.lr.ph

if.end.lr.ph:
  %helpers = getelementptr inbounds nuw i8, ptr %desk, i64 72
  %copy4 = getelementptr inbounds nuw i8, ptr %desk, i64 64
  br label %if.end

if.then:
  call void @llvm.lifetime.end.p0(ptr nonnull %sleepers)
  ret i32 0

if.end:
  %1 = phi i64 [ %0, %if.end.lr.ph ], [ %6, %if.end8 ]
  %2 = atomicrmw add ptr %helpers, i64 1 seq_cst, align 8
  %3 = load atomic i64, ptr %copy4 seq_cst, align 8
  %cmp6.not = icmp eq i64 %3, 0
  br i1 %cmp6.not, label %if.end8, label %if.then7

if.then7:
  %4 = inttoptr i64 %3 to ptr
  tail call fastcc void @copy_parts(ptr noundef %4, ptr noundef %lane)
  br label %if.end8

if.end8:
  %5 = atomicrmw sub ptr %helpers, i64 1 seq_cst, align 8
  %call = call fastcc zeroext i1 @await(ptr noundef nonnull %desk, i64 noundef %1, i64 noundef 50000, i32 noundef -1, ptr noundef nonnull %sleepers)
  %6 = load atomic i64, ptr %desk acquire, align 8
  %cmp = icmp eq i64 %6, -1
  br i1 %cmp, label %if.then, label %if.end
}

declare void @llvm.memset.p0.i64(ptr writeonly captures(none), i8, i64, i1 immarg)

declare i64 @syscall(i64 noundef, ...) local_unnamed_addr

declare i32 @sched_getcpu() local_unnamed_addr

declare noalias noundef ptr @aligned_alloc(i64 allocalign noundef, i64 noundef) local_unnamed_addr

declare i32 @sigfillset(ptr noundef) local_unnamed_addr

declare i32 @pthread_sigmask(i32 noundef, ptr noundef, ptr noundef) local_unnamed_addr

declare i32 @pthread_create(ptr noundef, ptr noundef, ptr noundef, ptr noundef) local_unnamed_addr

declare i32 @relax_hetero_workers_work(ptr noundef)

define internal fastcc void @keep_apart(ptr noundef readonly captures(address) %pool, ptr noundef captures(address) %worker) unnamed_addr {
entry:
  %time.i = alloca %struct.timespec, align 8
  %allowed = alloca %struct.cpu_set_t, align 8
  %found = alloca %struct.cpu_set_t, align 8
  %others = alloca [1024 x i64], align 16
  call void @llvm.lifetime.start.p0(ptr nonnull %allowed)
  call void @llvm.lifetime.start.p0(ptr nonnull %found)
  call void @llvm.lifetime.start.p0(ptr nonnull %others)
  call void @llvm.lifetime.start.p0(ptr nonnull %time.i)
  %call.i = call i32 @clock_gettime(i32 noundef 1, ptr noundef nonnull %time.i)
  %0 = load i64, ptr %time.i, align 8
  %mul.i = mul nsw i64 %0, 1000000000
  %tv_nsec.i = getelementptr inbounds nuw i8, ptr %time.i, i64 8
  %1 = load i64, ptr %tv_nsec.i, align 8
  %add.i = add nsw i64 %mul.i, %1
  call void @llvm.lifetime.end.p0(ptr nonnull %time.i)
  %next_look = getelementptr inbounds nuw i8, ptr %worker, i64 48
  %2 = load i64, ptr %next_look, align 16
  %cmp = icmp slt i64 %add.i, %2
  br i1 %cmp, label %cleanup, label %if.end

if.end:
  %add = add nsw i64 %add.i, 1000000
  store i64 %add, ptr %next_look, align 16
  call void @llvm.memset.p0.i64(ptr noundef nonnull align 8 dereferenceable(128) %allowed, i8 0, i64 128, i1 false)
  %call2 = call i32 @sched_getaffinity(i32 noundef 0, i64 noundef 128, ptr noundef nonnull %allowed)
  %cmp3 = icmp slt i32 %call2, 0
  br i1 %cmp3, label %cleanup, label %if.end5

if.end5:
  %call.i48 = call i32 @sched_getcpu()
  %conv.i = sext i32 %call.i48 to i64
  store i64 %conv.i, ptr %others, align 16
  %used = getelementptr inbounds nuw i8, ptr %pool, i64 136
  %3 = load i32, ptr %used, align 8
  %cmp751 = icmp ugt i32 %3, 1
  br i1 %cmp751, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %workers = getelementptr inbounds nuw i8, ptr %pool, i64 256
  %wide.trip.count = zext i32 %3 to i64
  br label %for.body

for.cond.cleanup:
  %count.0.lcssa = phi i64 [ 1, %if.end5 ], [ %count.1, %for.inc ]
  %4 = load ptr, ptr @cpu_cores, align 8
  %5 = load i64, ptr @num_cpus, align 8
  call void @relax_hetero_workers_choose(ptr noundef %4, i64 noundef %5, ptr noundef nonnull %allowed, ptr noundef nonnull %others, i64 noundef %count.0.lcssa, ptr noundef nonnull %found)
  %affinity_hash = getelementptr inbounds nuw i8, ptr %worker, i64 56
  %6 = load i64, ptr %affinity_hash, align 8
  br label %for.body.i

for.body.i:
  %i.05.i = phi i64 [ 0, %for.cond.cleanup ], [ %inc.i, %for.body.i ]
  %hash.04.i = phi i64 [ -3750763034362895579, %for.cond.cleanup ], [ %mul.i50, %for.body.i ]
  %arrayidx.i = getelementptr inbounds nuw i64, ptr %found, i64 %i.05.i
  %7 = load i64, ptr %arrayidx.i, align 8
  %xor.i = xor i64 %7, %hash.04.i
  %mul.i50 = mul i64 %xor.i, 1099511628211
  %inc.i = add nuw nsw i64 %i.05.i, 1
  %exitcond.not.i = icmp eq i64 %inc.i, 16
  br i1 %exitcond.not.i, label %hash_of.exit, label %for.body.i

hash_of.exit:
  store i64 %mul.i50, ptr %affinity_hash, align 8
  %thread = getelementptr inbounds nuw i8, ptr %worker, i64 24
  %8 = load i64, ptr %thread, align 8
  %call21 = call i32 @pthread_setaffinity_np(i64 noundef %8, i64 noundef 128, ptr noundef nonnull %found)
  %9 = load i64, ptr %affinity_hash, align 8
  %cmp23 = icmp eq i64 %9, %6
  br i1 %cmp23, label %if.then24, label %cleanup

for.body:
  %indvars.iv = phi i64 [ 1, %for.body.lr.ph ], [ %indvars.iv.next, %for.inc ]
  %count.053 = phi i64 [ 1, %for.body.lr.ph ], [ %count.1, %for.inc ]
  %arrayidx8 = getelementptr inbounds nuw %struct.worker, ptr %workers, i64 %indvars.iv
  %cmp9.not = icmp eq ptr %arrayidx8, %worker
  br i1 %cmp9.not, label %for.inc, label %if.then10

if.then10:
  %cpu = getelementptr inbounds nuw i8, ptr %arrayidx8, i64 32
  %10 = load atomic i64, ptr %cpu monotonic, align 32
  %sub14 = add nsw i64 %10, -1
  %inc15 = add nsw i64 %count.053, 1
  %arrayidx16 = getelementptr inbounds i64, ptr %others, i64 %count.053
  store i64 %sub14, ptr %arrayidx16, align 8
  br label %for.inc

for.inc:
  %count.1 = phi i64 [ %inc15, %if.then10 ], [ %count.053, %for.body ]
  %indvars.iv.next = add nuw nsw i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %wide.trip.count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body

if.then24:
  %add25 = add nsw i64 %add.i, 10000000
  store i64 %add25, ptr %next_look, align 16
  br label %cleanup

cleanup:
  call void @llvm.lifetime.end.p0(ptr nonnull %others)
  call void @llvm.lifetime.end.p0(ptr nonnull %found)
  call void @llvm.lifetime.end.p0(ptr nonnull %allowed)
  ret void
}

declare i32 @clock_gettime(i32 noundef, ptr noundef) local_unnamed_addr

declare i32 @sched_getaffinity(i32 noundef, i64 noundef, ptr noundef) local_unnamed_addr

declare i32 @pthread_setaffinity_np(i64 noundef, i64 noundef, ptr noundef) local_unnamed_addr

define internal fastcc noundef zeroext i1 @settle(ptr noundef nonnull captures(none) %copy, ptr noundef captures(none) %buffer) unnamed_addr {
entry:
  %bytes1 = getelementptr inbounds nuw i8, ptr %buffer, i64 24
  %0 = load i64, ptr %bytes1, align 8
  store i64 0, ptr %bytes1, align 8
  %synchronize = getelementptr inbounds nuw i8, ptr %copy, i64 88
  %1 = load ptr, ptr %synchronize, align 8
  %event = getelementptr inbounds nuw i8, ptr %buffer, i64 8
  %2 = load ptr, ptr %event, align 8
  %call = tail call i32 %1(ptr noundef %2)
  %cmp.i = icmp ne i32 %call, 0
  br i1 %cmp.i, label %land.lhs.true.i, label %fails.exit

land.lhs.true.i:
  %status1.i = getelementptr inbounds nuw i8, ptr %copy, i64 120
  %conv.i = sext i32 %call to i64
  %3 = cmpxchg ptr %status1.i, i64 0, i64 %conv.i seq_cst seq_cst, align 8
  %4 = extractvalue { i64, i1 } %3, 1
  br i1 %4, label %if.then.i, label %cleanup

if.then.i:
  %function3.i = getelementptr inbounds nuw i8, ptr %copy, i64 128
  store i64 1, ptr %function3.i, align 8
  br label %cleanup

fails.exit:
  %cmp.not = icmp eq i64 %0, 0
  br i1 %cmp.not, label %cleanup, label %if.then4

if.then4:
  %host = getelementptr inbounds nuw i8, ptr %copy, i64 24
  %5 = load ptr, ptr %host, align 8
  %offset = getelementptr inbounds nuw i8, ptr %buffer, i64 16
  %6 = load i64, ptr %offset, align 8
  %add.ptr = getelementptr inbounds i8, ptr %5, i64 %6
  %7 = load ptr, ptr %buffer, align 8
  tail call void @llvm.memcpy.p0.p0.i64(ptr align 1 %add.ptr, ptr align 1 %7, i64 %0, i1 false)
  br label %cleanup

cleanup:
  ret i1 %cmp.i
}

declare void @llvm.x86.sse2.pause()

declare i32 @llvm.umin.i32(i32, i32)

declare i32 @llvm.umax.i32(i32, i32)
