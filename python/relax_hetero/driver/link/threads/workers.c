/* Worker threads for the parallel loops of llvm kernels, and copies between pageable and pinned memory of the host.
 *
 * `make workers` translates this file into the LLVM IR beside it, one file for each processor, which executables bring
 * along (worker_threads.py says how, and why TVM's own pool is not used). No compiler is needed to install or to run.
 * TVM inlines the functions *_body into functions of C's calling convention whose addresses are taken here, named
 * alike without the suffix; everything else must be static, or inlined into them.
 *
 * A pool belongs to the thread that launches, which finds it by a key of pthreads. A launch writes a *job*: a word with
 * a number that grows, the count of tasks (10 bits) and a bit 0. Workers watch that word. Each has a *state* word of
 * its own: the last job of which its task was claimed, and in bit 0 whether that has ended. A task is claimed, by its
 * worker or by the caller, by exchanging an older state for the job. A worker that comes too late finds a state that is
 * not older, whatever it had read before: function and data of a job stay as they are until its tasks have ended.
 * Nobody depends on a wake-up: if one is lost, the caller does the work.
 *
 * On CPUs whose cores differ in speed a job has several tasks for each thread. Those behind the first ones belong to
 * nobody: whoever is done with a task takes the next one, so faster cores do more of them.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 1023     /* of a caller: ten bits; MAX_THREADS of artifact/worker_threads.py */
#define MAX_CPUS CPU_SETSIZE /* that threads are kept apart on; MAX_CPUS there */
#define CLOSED UINT64_MAX    /* of a word that threads wait for: they end */
#define ALL_BITS UINT32_MAX
#define ALL_SLEEPERS INT32_MAX

typedef _Atomic uint64_t word;
typedef int32_t (*task_function)(int32_t task, void *group, void *data);

/* TVMParallelGroupEnv: counters of barriers, which no loop here has, and the count of tasks. */
struct group {
    void *counters;
    int32_t tasks;
};

/* Written by the caller, apart from the words. Cores share cache lines in pairs. */
struct worker {
    alignas(128) word state;
    struct pool *pool;
    uint64_t number;
    pthread_t thread;
    _Atomic int64_t cpu;        /* of its last task, plus 1; 0 before the first */
    _Atomic int64_t late_since; /* since when a caller finds its task not begun; 0 if it came */
    int64_t next_look;          /* when to look again where it runs */
    uint64_t affinity_hash;     /* of the CPUs that it is kept to; 0 as long as it may use all */
};

struct pool {
    alignas(64) word job;
    task_function function;
    void *data;
    struct group group;
    alignas(64) _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t next_task; /* the first that nobody has taken; read only by threads that are at a task */
    alignas(64) void *_Atomic error; /* of a task that failed */
    uint32_t used;                   /* threads of a loop, the caller's among them */
    uint32_t begun;
    uint32_t capacity;
    _Atomic int64_t spin_ns; /* of its threads; -1 for the process' */
    bool is_running;
    struct worker workers[]; /* the entry 0, the caller's, is unused */
};

#define WORKER ((struct pool *)1) /* the key's value in a worker: loops within its loop run in it alone */

/* Functions of C's calling convention, which TVM compiles from those below. */
extern int32_t relax_hetero_workers_launch(task_function function, void *data, int32_t asked);
extern int32_t relax_hetero_workers_work(struct worker *self);
extern int32_t relax_hetero_workers_end(struct pool *pool);
extern int32_t relax_hetero_workers_stage(void *desk, void *copy, void *lane);
extern int32_t relax_hetero_workers_help(void *desk, void *lane);

static pthread_key_t key;
static void (*take_error)(void **error);
static void (*raise_error)(void *error);
static int (*drop_error)(void *error);
static uint32_t default_width = 1;
static uint32_t thread_tasks = 1; /* tasks of a job for each of its threads */
static _Atomic int64_t spin_ns;
static const int32_t *cpu_cores; /* for every CPU the lowest CPU of its core */
static int64_t num_cpus;

/* ---- Waiting: whoever waits spins for tens of microseconds, then sleeps in the kernel. ---- */

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Spin until a word differs from `old`, for at most `limit` nanoseconds; whether it differs. */
static bool spin_while(word *address, uint64_t old, int64_t limit) {
    int64_t start = 0;
    for (;;) {
        for (int polls = 0; polls < 32; polls++) { /* the clock costs more than a poll */
            if (atomic_load_explicit(address, memory_order_acquire) != old)
                return true;
            spin_pause();
        }
        int64_t now = now_ns();
        if (start == 0)
            start = now;
        if (now - start > limit)
            return false;
    }
}

/* Sleep until woken by one of the bits of `mask`, unless the low half of the word differs from that of `old`. */
static void futex_wait(word *address, uint64_t old, uint32_t mask) {
    syscall(SYS_futex, address, FUTEX_WAIT_BITSET_PRIVATE, (uint32_t)old, NULL, NULL, mask);
}

static void futex_wake(word *address, int32_t count, uint32_t mask) {
    syscall(SYS_futex, address, FUTEX_WAKE_BITSET_PRIVATE, count, NULL, NULL, mask);
}

/* Wait until a word differs from `old`: spin, then sleep, counted among the sleepers. Whether this thread slept. */
static bool await(word *address, uint64_t old, int64_t limit, uint32_t mask, _Atomic uint32_t *sleepers) {
    bool has_slept = false;
    while (!spin_while(address, old, limit)) {
        atomic_fetch_add(sleepers, 1);
        futex_wait(address, old, mask);
        atomic_fetch_sub(sleepers, 1);
        has_slept = true;
    }
    return has_slept;
}

/* Have all threads that wait for a word end. */
static void dismiss(word *address) {
    atomic_exchange(address, CLOSED);
    futex_wake(address, ALL_SLEEPERS, ALL_BITS);
}

/* Wake eight workers that have a task, if any sleeps; each wakes eight more. */
static void wake_some(struct pool *pool, uint32_t tasks) {
    if (atomic_load(&pool->sleepers) != 0)
        futex_wake(&pool->job, 8, tasks < 32 ? (1u << tasks) - 1 : ALL_BITS);
}

/* Nanoseconds that a pool's caller spins; workers spin 16 times as long. */
static int64_t spin_of(struct pool *pool) {
    int64_t own = atomic_load_explicit(&pool->spin_ns, memory_order_relaxed);
    return own < 0 ? atomic_load_explicit(&spin_ns, memory_order_relaxed) : own;
}

/* ---- Core affinity: each worker on a core that neither its caller nor another worker uses. ----
 *
 * Linux may leave two threads on one CPU beside an idle one, where two threads are as fast as one. Pinning every thread
 * to a CPU of its own is no way out: the caller's CPUs are not the library's to choose, and a pinned thread waits for
 * another process while other CPUs are idle. Here a worker is kept off the cores of the others, and only once it has
 * been seen to be late: it did not begin a task for a while, or did it on the caller's own CPU. It may run on every
 * other CPU that the caller may use, and the caller's own affinity stays as it is.
 *
 * Cores, not CPUs, are kept apart while there are enough of them: the hyper-threads of one core share its arithmetic
 * units. With more threads than CPUs all are left free.
 */

/* The number of this thread's CPU, plus 1. */
static int64_t this_cpu(void) {
    return (int64_t)sched_getcpu() + 1;
}

/* The allowed CPUs on cores (or, not `by_core`, the CPUs) that none of `others` is on; whether there are any. */
static bool untaken(const int32_t *cores, int64_t cpus, const cpu_set_t *allowed, const int64_t *others, int64_t count,
                    bool by_core, cpu_set_t *found) {
    bool taken[MAX_CPUS] = {false};
    bool any = false;
    memset(found, 0, sizeof(*found));
    for (int64_t i = 0; i < count; i++)
        if ((uint64_t)others[i] < (uint64_t)cpus) /* an unknown CPU takes nothing */
            taken[by_core ? cores[others[i]] : others[i]] = true;
    for (int64_t cpu = 0; cpu < cpus; cpu++)
        if (CPU_ISSET(cpu, allowed) && !taken[by_core ? cores[cpu] : cpu]) {
            CPU_SET(cpu, found);
            any = true;
        }
    return any;
}

/* The CPUs that a thread is to be kept to: cores of its own, else CPUs of its own, else all that are allowed.
 * Not static, so that tests can call it. */
void relax_hetero_workers_choose(const int32_t *cores, int64_t cpus, const cpu_set_t *allowed, const int64_t *others,
                                 int64_t count, cpu_set_t *found) {
    if (!untaken(cores, cpus, allowed, others, count, true, found) &&
        !untaken(cores, cpus, allowed, others, count, false, found))
        *found = *allowed;
}

/* FNV-1a of the words of a set; no set of one CPU has 0. */
static uint64_t hash_of(const cpu_set_t *set) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof(*set) / sizeof(uint64_t); i++)
        hash = (hash ^ ((const uint64_t *)set)[i]) * 1099511628211u;
    return hash;
}

/* Have a worker leave the cores of its pool's other threads, unless it was told to a moment ago. */
static void keep_apart(struct pool *pool, struct worker *worker) {
    cpu_set_t allowed, found;
    int64_t others[MAX_CPUS];
    int64_t now = now_ns(), count = 0;
    if (now < worker->next_look)
        return;
    worker->next_look = now + 1000000;
    memset(&allowed, 0, sizeof(allowed));
    if (sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
        return;
    others[count++] = this_cpu() - 1;
    for (uint32_t i = 1; i < pool->used; i++)
        if (&pool->workers[i] != worker)
            others[count++] = atomic_load_explicit(&pool->workers[i].cpu, memory_order_relaxed) - 1;
    relax_hetero_workers_choose(cpu_cores, num_cpus, &allowed, others, count, &found);
    uint64_t before = worker->affinity_hash;
    worker->affinity_hash = hash_of(&found);
    /* Also if nothing changed: somebody else (taskset, a control group) may have moved it since. */
    pthread_setaffinity_np(worker->thread, sizeof(found), &found);
    if (worker->affinity_hash == before) /* it is where it should be, and others keep it from running */
        worker->next_look = now + 10000000;
}

/* Have a worker leave if it did its last task on this thread's CPU. */
static void part_from(struct pool *pool, struct worker *worker, int64_t cpu) {
    if (atomic_load_explicit(&worker->cpu, memory_order_relaxed) == cpu)
        keep_apart(pool, worker);
}

/* A worker has not begun its task. It may still be waking up; later it waits for a CPU, perhaps for this one. */
static void note_late(struct pool *pool, struct worker *worker) {
    int64_t since = atomic_load_explicit(&worker->late_since, memory_order_relaxed);
    int64_t now = now_ns();
    if (since == 0)
        atomic_store_explicit(&worker->late_since, now, memory_order_relaxed);
    else if (now - since > 200000)
        keep_apart(pool, worker);
}

/* ---- Pools. ---- */

/* Claim a task of `job` by putting `as` into its state; whether it was there to be claimed. */
static bool claim(struct worker *worker, uint64_t job, uint64_t as) {
    uint64_t state = atomic_load_explicit(&worker->state, memory_order_acquire);
    return state < job && atomic_compare_exchange_strong(&worker->state, &state, as);
}

/* Run a task; the error of one that fails goes into the pool. */
static void run_task(struct pool *pool, uint32_t task) {
    if (pool->function((int32_t)task, &pool->group, pool->data) == 0)
        return;
    void *error = NULL;
    take_error(&error);
    void *other = atomic_exchange(&pool->error, error);
    if (other != NULL)
        drop_error(other);
}

/* Run tasks that belong to nobody, until none is left. */
static void run_free_tasks(struct pool *pool) {
    uint32_t tasks = (uint32_t)pool->group.tasks;
    if (tasks == pool->used)
        return;
    for (uint32_t task; (task = atomic_fetch_add(&pool->next_task, 1)) < tasks;)
        run_task(pool, task);
}

/* A worker's life. */
int32_t work_body(struct worker *self) {
    struct pool *pool = self->pool;
    uint32_t number = (uint32_t)self->number;
    uint32_t mask = 1u << (number < 31 ? number : 31);
    uint64_t job = 0;
    pthread_setspecific(key, WORKER);
    for (;;) {
        /* A worker that was done first waits for the others before there is a next job: it spins longer than a caller,
         * for whom a worker that has been put away may come back when the caller sleeps. */
        bool has_slept = await(&pool->job, job, spin_of(pool) * 16, mask, &pool->sleepers);
        job = atomic_load_explicit(&pool->job, memory_order_acquire);
        if (job == CLOSED)
            return 0;
        atomic_store_explicit(&self->cpu, this_cpu(), memory_order_relaxed);
        atomic_store_explicit(&self->late_since, 0, memory_order_relaxed);
        uint32_t tasks = job >> 1 & MAX_THREADS;
        if (number >= tasks)
            continue;
        if (has_slept)
            wake_some(pool, tasks);
        if (!claim(self, job, job))
            continue;
        run_task(pool, number);
        run_free_tasks(pool);
        atomic_exchange(&self->state, job | 1);
        if (atomic_load(&pool->caller_sleeps) != 0)
            futex_wake(&self->state, 1, ALL_BITS);
    }
}

/* A thread with a pool has ended, or wants a larger one. */
int32_t end_body(struct pool *pool) {
    if (pool == WORKER)
        return 0;
    dismiss(&pool->job);
    for (uint32_t i = 1; i < pool->begun; i++)
        pthread_join(pool->workers[i].thread, NULL);
    free(pool);
    return 0;
}

/* A pool for this thread, without workers yet; null without memory. */
static struct pool *make_pool(uint32_t capacity, uint32_t used) {
    size_t bytes = sizeof(struct pool) + capacity * sizeof(struct worker);
    struct pool *pool = aligned_alloc(alignof(struct worker), bytes);
    if (pool != NULL) {
        memset(pool, 0, bytes);
        pool->used = used;
        pool->begun = 1;
        pool->capacity = capacity;
        atomic_init(&pool->spin_ns, -1);
    }
    pthread_setspecific(key, pool);
    return pool;
}

/* Begin the threads that are missing. Signals are for the process' other threads. Fewer threads do, if the system has
 * no more: the caller takes their tasks. */
static void begin_workers(struct pool *pool) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->begun < pool->used; pool->begun++) {
        struct worker *worker = &pool->workers[pool->begun];
        worker->pool = pool;
        worker->number = pool->begun;
        if (pthread_create(&worker->thread, NULL, (void *(*)(void *))relax_hetero_workers_work, worker) != 0)
            break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* All tasks in this thread. */
static int32_t run_alone(task_function function, void *data, int32_t asked) {
    alignas(64) int32_t counter[16];
    struct group group = {counter, asked == 0 ? 1 : asked};
    int32_t status = 0;
    counter[0] = counter[1] = 0;
    for (int32_t task = 0; task < group.tasks && status == 0; task++)
        status = function(task, &group, data);
    return status;
}

/* Wait for a task that its worker has begun. */
static void join_task(struct pool *pool, struct worker *worker, uint64_t job) {
    if (spin_while(&worker->state, job, spin_of(pool)))
        return;
    /* Its thread may wait for this one on the same CPU: it would run only when this one sleeps. */
    part_from(pool, worker, this_cpu());
    atomic_exchange(&pool->caller_sleeps, 1);
    do
        futex_wait(&worker->state, job, ALL_BITS);
    while (atomic_load(&worker->state) == job);
    atomic_store(&pool->caller_sleeps, 0);
}

/* A parallel loop: TVMBackendParallelLaunch. */
int32_t launch_body(task_function function, void *data, int32_t asked) {
    struct pool *pool = pthread_getspecific(key);
    if (pool == NULL)
        pool = make_pool(default_width, default_width);
    if (pool == NULL || pool == WORKER || asked != 0 || pool->is_running || pool->used < 2)
        return run_alone(function, data, asked);
    if (pool->begun < pool->used)
        begin_workers(pool);
    uint32_t used = pool->used;
    pool->is_running = true;
    pool->function = function;
    pool->data = data;
    pool->group.tasks = (int32_t)(used * thread_tasks);
    atomic_store_explicit(&pool->next_task, used, memory_order_relaxed);
    uint64_t before = atomic_load_explicit(&pool->job, memory_order_relaxed);
    uint64_t job = ((before >> 11) + 1) << 11 | (uint64_t)used << 1;
    uint64_t ended = job | 1;
    atomic_exchange(&pool->job, job);
    wake_some(pool, used);
    run_task(pool, 0);
    run_free_tasks(pool);
    for (uint32_t i = 1; i < used; i++) {
        struct worker *worker = &pool->workers[i];
        if (claim(worker, job, ended)) {
            note_late(pool, worker);
            run_task(pool, i);
        }
    }
    int64_t cpu = this_cpu();
    for (uint32_t i = 1; i < used; i++) {
        struct worker *worker = &pool->workers[i];
        if (atomic_load_explicit(&worker->state, memory_order_acquire) != ended)
            join_task(pool, worker, job);
        part_from(pool, worker, cpu);
    }
    pool->is_running = false;
    void *error = atomic_load_explicit(&pool->error, memory_order_relaxed);
    if (error == NULL)
        return 0;
    atomic_store_explicit(&pool->error, NULL, memory_order_relaxed);
    raise_error(error);
    drop_error(error);
    return -1;
}

/* Functions that Python calls by the names of artifact/worker_threads.py, which says what each does. */

int64_t start_body(int64_t take, int64_t raise, int64_t drop, int64_t width, int64_t spin, int64_t cores, int64_t cpus,
                   int64_t tasks) {
    take_error = (void (*)(void **))take;
    raise_error = (void (*)(void *))raise;
    drop_error = (int (*)(void *))drop;
    default_width = (uint32_t)width;
    atomic_store_explicit(&spin_ns, spin, memory_order_relaxed);
    cpu_cores = (const int32_t *)cores;
    num_cpus = cpus;
    thread_tasks = (uint32_t)tasks;
    return pthread_key_create(&key, (void (*)(void *))relax_hetero_workers_end);
}

int64_t configure_body(int64_t capacity, int64_t used, int64_t spin) {
    struct pool *pool = pthread_getspecific(key);
    if (pool == WORKER || (pool != NULL && pool->is_running))
        return 0;
    if (pool != NULL && pool->capacity < (uint32_t)capacity) {
        end_body(pool);
        pool = NULL;
    }
    if (pool == NULL)
        pool = make_pool((uint32_t)capacity, (uint32_t)used);
    if (pool != NULL) {
        pool->used = (uint32_t)used;
        atomic_store_explicit(&pool->spin_ns, spin, memory_order_relaxed);
    }
    return 0;
}

int64_t spin_body(int64_t spin) {
    atomic_store_explicit(&spin_ns, spin, memory_order_relaxed);
    return 0;
}

int64_t forget_body(void) {
    return pthread_setspecific(key, NULL);
}

int64_t width_body(void) {
    struct pool *pool = pthread_getspecific(key);
    return pool == NULL || pool == WORKER ? (intptr_t)pool : pool->used;
}

int64_t launch_address_body(void) {
    return (intptr_t)relax_hetero_workers_launch;
}

int64_t stage_address_body(void) {
    return (intptr_t)relax_hetero_workers_stage;
}

int64_t help_address_body(void) {
    return (intptr_t)relax_hetero_workers_help;
}

/* ---- Copies between pageable and pinned memory of the host, while the GPU copies from and to the pinned memory. ----
 *
 * Threads meet in a *copy*, each with a *lane*: buffers and a stream of its own. They take parts of it by a counter
 * until none is left. A caller lays its copy on a *desk* and wakes the helpers that wait there; they never return to
 * Python, whose lock they would have to wait for. A helper that comes too late finds no copy, or no part.
 *
 * C's memcpy leaves pinned memory in the caches, where the GPU finds it: stores past the caches were measured no faster
 * from many threads, and half as fast from few.
 */

/* The driver's functions, numbered as in `Job` of vm/device/pinned_staging.py. */
enum { USE_CONTEXT, SYNCHRONIZE, RECORD, WAIT, COPY };

/* `Job` of vm/device/pinned_staging.py. */
struct copy {
    _Atomic int64_t next_part;
    int64_t parts;
    const int64_t *offsets;
    char *host;
    int64_t device;
    int64_t to_host;
    int64_t buffers;
    void *stream;
    void *begun; /* an event of the stream */
    void *context;
    int32_t (*use_context)(void *context);
    int32_t (*synchronize)(void *event);
    int32_t (*record)(void *event, void *stream);
    int32_t (*wait)(void *stream, void *event, uint32_t flags);
    int32_t (*copy)(int64_t to, int64_t from, int64_t bytes, void *stream);
    _Atomic int64_t status; /* of the first failure */
    int64_t function;       /* that has failed */
};

/* `_Buffer` there: pinned memory, the event after the GPU's last copy, and the part that arrives. */
struct buffer {
    char *memory;
    void *event;
    int64_t offset;
    int64_t bytes;
};

struct lane {
    void *stream;
    void *ended; /* an event of the stream */
    int64_t unused[2];
    struct buffer buffers[];
};

struct desk {
    word number; /* of copies so far */
    char unused[56];
    struct copy *_Atomic copy;
    word helpers; /* at work */
};

/* Note the first failure of a function of the driver; whether `status` is one. */
static bool fails(struct copy *copy, int32_t status, int64_t function) {
    int64_t none = 0;
    if (status != 0 && atomic_compare_exchange_strong(&copy->status, &none, (int64_t)status))
        copy->function = function;
    return status != 0;
}

/* Wait until the GPU has copied from or to a buffer; what has arrived goes on to the host's memory. Whether that fails. */
static bool settle(struct copy *copy, struct buffer *buffer) {
    int64_t bytes = buffer->bytes;
    buffer->bytes = 0;
    if (fails(copy, copy->synchronize(buffer->event), SYNCHRONIZE))
        return true;
    if (bytes != 0)
        memcpy(copy->host + buffer->offset, buffer->memory, (size_t)bytes);
    return false;
}

/* Copy one part through a buffer; whether that fails. */
static bool copy_part(struct copy *copy, struct lane *lane, struct buffer *buffer, int64_t index) {
    int64_t begin = copy->offsets[index], bytes = copy->offsets[index + 1] - begin;
    int64_t pinned = (intptr_t)buffer->memory, device = copy->device + begin;
    if (settle(copy, buffer))
        return true;
    if (copy->to_host) {
        buffer->offset = begin;
        buffer->bytes = bytes;
    } else {
        memcpy(buffer->memory, copy->host + begin, (size_t)bytes);
    }
    int32_t status = copy->to_host ? copy->copy(pinned, device, bytes, lane->stream)
                                   : copy->copy(device, pinned, bytes, lane->stream);
    return fails(copy, status, COPY) || fails(copy, copy->record(buffer->event, lane->stream), RECORD);
}

/* Copy parts until none is left, or a function has failed. */
static void copy_parts(struct copy *copy, struct lane *lane) {
    int64_t done = 0;
    fails(copy, copy->use_context(copy->context), USE_CONTEXT);
    while (atomic_load_explicit(&copy->status, memory_order_acquire) == 0) {
        int64_t part = atomic_fetch_add(&copy->next_part, 1);
        if (part >= copy->parts)
            break;
        if (done == 0 && fails(copy, copy->wait(lane->stream, copy->begun, 0), WAIT))
            break;
        /* The first parts of what goes to the GPU are small; of what comes, the last. */
        int64_t index = copy->to_host ? copy->parts - part - 1 : part;
        if (copy_part(copy, lane, &lane->buffers[done % copy->buffers], index))
            break;
        done++;
    }
    if (copy->to_host || done == 0) {
        for (int64_t i = 0; i < copy->buffers; i++) { /* in the order in which they were asked for */
            struct buffer *buffer = &lane->buffers[(done + i) % copy->buffers];
            if (buffer->bytes != 0)
                settle(copy, buffer);
        }
    } else { /* work that the copy's stream gets later comes after this thread's parts */
        fails(copy, copy->record(lane->ended, lane->stream), RECORD);
        fails(copy, copy->wait(copy->stream, lane->ended, 0), WAIT);
    }
}

/* Copy, with all helpers that come in time. Without a copy, the helpers end. */
int32_t stage_body(struct desk *desk, struct copy *copy, struct lane *lane) {
    if (copy == NULL) {
        dismiss(&desk->number);
        return 0;
    }
    atomic_store(&desk->copy, copy);
    atomic_fetch_add(&desk->number, 1);
    futex_wake(&desk->number, ALL_SLEEPERS, ALL_BITS);
    copy_parts(copy, lane);
    atomic_store(&desk->copy, NULL);
    for (uint64_t helpers; (helpers = atomic_load(&desk->helpers)) != 0;)
        spin_while(&desk->helpers, helpers, 1000000);
    return 0;
}

/* A helper's life. */
int32_t help_body(struct desk *desk, struct lane *lane) {
    _Atomic uint32_t sleepers = 0;
    uint64_t number = 0;
    for (;;) {
        await(&desk->number, number, 50000, ALL_BITS, &sleepers);
        number = atomic_load_explicit(&desk->number, memory_order_acquire);
        if (number == CLOSED)
            return 0;
        atomic_fetch_add(&desk->helpers, 1);
        struct copy *copy = atomic_load(&desk->copy);
        if (copy != NULL)
            copy_parts(copy, lane);
        atomic_fetch_sub(&desk->helpers, 1);
    }
}
