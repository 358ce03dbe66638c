"""Kernels of GPUs as CPU code: the threads of a block run one after another, from barrier to barrier.

Before::

    for thread in T.thread_binding(256, "threadIdx.x"):
        part = ...
        shared[thread] = part
        T.tvm_storage_sync("shared")
        y[thread] = shared[255 - thread]

After::

    for thread in range(256):
        part[thread] = ...
        shared[thread] = part[thread]
    for thread in range(256): y[thread] = shared[255 - thread]

Registers that live across a barrier get an element for each thread. A shuffle is a barrier, too: all threads of a warp
write down what they give before any takes. Barriers are in no branch that depends on the thread, as CUDA wants.
"""

import numpy as np
import tvm
from tvm import tirx
from tvm_ffi import VisitInterrupt, structural_map, structural_walk

SYNC, SHUFFLE = "tirx.tvm_storage_sync", "tirx.tvm_warp_shuffle_down"
CPU = tvm.target.Target("llvm")


def on_cpu(func, target=CPU):
    """A scheduled PrimFunc as one of a CPU."""
    body = structural_map(func.body, (tvm.ir.Call, _exact))
    body = structural_map(body, (tirx.For, _block))
    return func.with_body(body).with_attr("target", target).with_attr("tirx.is_scheduled", True)


def _exact(call):
    """CUDA's quick functions as the CPU's."""
    if not isinstance(call.op, tvm.ir.Op) or call.op.name != "tirx.cuda.func_call":
        return call
    name, x, _source = call.args
    return {"quick_exp": tirx.exp, "quick_sigmoid": tirx.sigmoid, "quick_tanh": tirx.tanh}[str(name.value)](x)


def compiled(func):
    """The function, to be called with TVM tensors."""
    func = on_cpu(func).with_attr("global_symbol", "main")
    return tvm.compile(tvm.IRModule({"main": func}), target=CPU)["main"]


def run(func, *arrays):
    """Call a scheduled PrimFunc with numpy arrays; those that it writes are changed."""
    tensors = [tvm.runtime.tensor(array) if isinstance(array, np.ndarray) else array for array in arrays]
    compiled(func)(*tensors)
    for array, tensor in zip(arrays, tensors, strict=True):
        if isinstance(array, np.ndarray):
            array[...] = tensor.numpy()


def _tag(loop):
    return "" if loop.thread_binding is None else str(loop.thread_binding.thread_tag)


def _serial(loop, body):
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, body)


def _block(loop):
    if _tag(loop) == "threadIdx.x":
        return _Threads(loop).run()
    return _serial(loop, loop.body) if _tag(loop).startswith("blockIdx") else loop


def _meets(node):
    def call(call):
        is_op = isinstance(call.op, tvm.ir.Op)
        return VisitInterrupt(call) if is_op and call.op.name in (SYNC, SHUFFLE) else None

    return structural_walk(node, (tvm.ir.Call, call)) is not None


class _Threads:
    def __init__(self, loop):
        self.loop, self.var, self.count = loop, loop.loop_var, int(loop.extent)
        self.wide, self.views, self.allocated = {}, {}, []

    def run(self):
        """The code of a block."""
        if not _meets(self.loop.body):
            return _serial(self.loop, self.loop.body)
        statements = self.parts(self.loop.body)
        return tirx.SeqStmt([*self.allocated, *statements])

    def parts(self, statement):
        """Statements of the block that do what every thread does."""
        if not isinstance(statement, tirx.SeqStmt):
            return self.meeting(statement) if _meets(statement) else [self.each([statement])]
        done, together = [], []
        for part in statement.seq:
            if isinstance(part, (tirx.AllocBuffer, tirx.DeclBuffer)):
                self.widen(part)
            elif isinstance(part, tirx.Bind):
                raise NotImplementedError("a bound variable that lives across a barrier")
            elif _meets(part):
                done += [self.each(together)] if together else []
                together = []
                done += self.meeting(part)
            else:
                together.append(part)
        return done + ([self.each(together)] if together else [])

    def each(self, statements):
        """All threads run statements without a barrier."""
        var = tirx.Var(self.var.name, self.var.ty.dtype)
        body = tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]
        body = structural_map(body, (tvm.ir.Var, lambda v: var if v.same_as(self.var) else v))
        loop = tirx.For(var, self.loop.min, self.loop.extent, tirx.ForKind.SERIAL, body)
        return _Indexed(self, var).rewrite(loop)

    def widen(self, statement):
        """Registers get an element for each thread, shared memory stays as it is."""
        buffer = statement.buffer
        if buffer.scope() == "local":
            count = 1
            for extent in buffer.shape:
                count = count * int(extent)
            assert len(buffer.shape) == 1, "registers have one dimension"
            data = statement.data if isinstance(statement, tirx.DeclBuffer) else None
            if data is None:
                wide = tirx.decl_buffer((count * self.count,), str(buffer.dtype), buffer.name, scope="global")
                self.allocated.append(tirx.AllocBuffer(wide))
            else:
                source = next(w for b, (w, _) in self.wide.items() if b in _variables(data))
                wide = tirx.decl_buffer((count * self.count,), str(buffer.dtype), buffer.name, scope="global")
                self.allocated.append(tirx.DeclBuffer(wide, data=source.data))
            self.wide[buffer] = (wide, count)
        elif buffer.scope().startswith("shared"):
            wide = tirx.decl_buffer(list(buffer.shape), str(buffer.dtype), buffer.name, scope="global")
            self.allocated.append(tirx.AllocBuffer(wide))
            self.wide[buffer] = (wide, 0)
        else:
            self.allocated.append(statement)

    def meeting(self, statement):
        """A statement in which threads meet."""
        if isinstance(statement, tirx.Evaluate):
            return []
        if isinstance(statement, tirx.For):
            assert self.var not in _variables(statement.extent), "a barrier in a loop whose length hangs on the thread"
            return [_serial(statement, _sequence(self.parts(statement.body)))]
        if isinstance(statement, tirx.IfThenElse):
            assert self.var not in _variables(statement.condition), "a barrier in a branch that hangs on the thread"
            assert not _meets(statement.condition)
            otherwise = None if statement.else_case is None else _sequence(self.parts(statement.else_case))
            return [tirx.IfThenElse(statement.condition, _sequence(self.parts(statement.then_case)), otherwise)]
        assert isinstance(statement, tirx.BufferStore), f"a barrier in {statement}"
        stores, copies = [], []

        def shuffle(call):
            if not isinstance(call.op, tvm.ir.Op) or call.op.name != SHUFFLE:
                return call
            value, distance, width = call.args[1], int(call.args[2]), int(call.args[3])
            sent = tirx.decl_buffer((self.count,), str(value.ty.dtype), "sent", scope="global")
            self.allocated.append(tirx.AllocBuffer(sent))
            stores.append(self.each([tirx.BufferStore(sent, value, [self.var])]))
            is_there = tirx.floormod(self.var, width) + distance < width
            copies.append(sent)
            return tirx.BufferLoad(sent, [tirx.Select(is_there, self.var + distance, self.var)])

        value = structural_map(statement.value, (tvm.ir.Call, shuffle))
        return [*stores, self.each([tirx.BufferStore(statement.buffer, value, statement.indices)])]


class _Indexed:
    def __init__(self, threads, var):
        self.threads, self.var = threads, var

    def note(self, declaration):
        """Views of registers that live across a barrier, declared where there is none."""
        for buffer, (wide, count) in list(self.threads.wide.items()):
            if count and buffer in _variables(declaration.data):
                view = declaration.buffer
                own = int(view.shape[0])
                storage = tirx.decl_buffer((own * self.threads.count,), str(view.dtype), view.name, scope="global")
                self.threads.wide[view] = (storage, own)
                self.threads.views[view] = tirx.DeclBuffer(storage, data=wide.data)

    def rewrite(self, statement):
        """`statement` with registers of the thread that `var` is."""

        def place(buffer, indices):
            wide, count = self.threads.wide[buffer]
            return wide, [index + self.var * count if count else index for index in indices]

        def load(load):
            if load.source not in self.threads.wide:
                return load
            return tirx.BufferLoad(*place(load.source, list(load.indices)))

        def store(store):
            if store.buffer not in self.threads.wide:
                return store
            wide, indices = place(store.buffer, list(store.indices))
            return tirx.BufferStore(wide, store.value, indices)

        def declare(declaration):
            return self.threads.views.get(declaration.buffer, declaration)

        structural_walk(statement, (tirx.DeclBuffer, self.note))
        statement = structural_map(statement, (tirx.DeclBuffer, declare))
        statement = structural_map(statement, (tvm.ir.expr.TensorLoad, load))
        return structural_map(statement, (tirx.BufferStore, store))


def _sequence(statements):
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0] if statements else tirx.Evaluate(0)


def _variables(node):
    variables = []
    structural_walk(node, (tvm.ir.Var, variables.append))
    return set(variables)
