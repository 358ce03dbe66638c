/* CUDA graphs, mailboxes and error records of a GPU for programs without Python; a part of standalone.c.
 *
 * This is vm/region/cuda_graph.py, vm/device/mailboxes.py and vm/device/error_records.py in C: the words that compiled
 * code shares with a machine are the same (artifact/graph_layout.py). TVM's CUDA runtime launches kernels and owns
 * memory; the driver's library captures and launches graphs. A machine has one GPU, and runs one call at a time.
 */
#include <errno.h>
#include <time.h>
#include <tvm/ffi/extra/c_env_api.h>

/* ---- The driver ---- */

#define CUDA_FUNCTIONS(F)                                                                                              \
    F(GetErrorName, "cuGetErrorName", (int, const char **))                                                            \
    F(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                                                   \
    F(PrimaryContext, "cuDevicePrimaryCtxRetain", (void **, int))                                                      \
    F(SetContext, "cuCtxSetCurrent", (void *))                                                                         \
    F(HostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                        \
    F(StreamCreate, "cuStreamCreate", (void **, unsigned))                                                             \
    F(StreamDestroy, "cuStreamDestroy_v2", (void *))                                                                   \
    F(StreamQuery, "cuStreamQuery", (void *))                                                                          \
    F(StreamSynchronize, "cuStreamSynchronize", (void *))                                                              \
    F(BeginCapture, "cuStreamBeginCapture_v2", (void *, int))                                                          \
    F(EndCapture, "cuStreamEndCapture", (void *, void **))                                                             \
    F(GraphInstantiate, "cuGraphInstantiateWithFlags", (void **, void *, unsigned long long))                          \
    F(GraphDestroy, "cuGraphDestroy", (void *))                                                                        \
    F(GraphUpload, "cuGraphUpload", (void *, void *))                                                                  \
    F(GraphLaunch, "cuGraphLaunch", (void *, void *))                                                                  \
    F(GraphExecDestroy, "cuGraphExecDestroy", (void *))

enum { NOT_READY = 600, PORTABLE_AND_MAPPED = 3, NON_BLOCKING = 1, RELAXED = 2, MAJOR = 75, MINOR = 76 };

static struct {
#define F(name, symbol, arguments) int(*name) arguments;
    CUDA_FUNCTIONS(F)
#undef F
} cuda;

static int find_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    const char *missing = driver == NULL ? "libcuda.so.1" : NULL;
#define F(name, symbol, arguments)                                                                                     \
    if (driver != NULL && (cuda.name = (__typeof__(cuda.name))dlsym(driver, symbol)) == NULL)                          \
        missing = symbol;
    CUDA_FUNCTIONS(F)
#undef F
    return missing == NULL ? 0 : fail("RuntimeError", "%s needs an NVIDIA driver of CUDA 12 or newer: %s is missing",
                                      path, missing);
}

/* 0, or -1 with an error that names the failed call. */
static int checked(int status, const char *call) {
    const char *name = NULL;
    if (status == 0)
        return 0;
    cuda.GetErrorName(status, &name);
    return fail("RuntimeError", "%s failed: %s (%d)", call, name != NULL ? name : "unknown error", status);
}

#define CUDA(name, ...) checked(cuda.name(__VA_ARGS__), "cu" #name)

static void wait_briefly(long nanoseconds) {
    nanosleep(&(struct timespec){0, nanoseconds}, NULL);
}

/* ---- GPUs of machines ---- */

/* Requests of compiled code: states of command buffers and mailboxes have the address of `serve` of their file. */
enum request { SUBMIT, EXPLAIN_FAILURE, AWAIT };
typedef int (*serve_function)(enum request, int64_t address, int64_t number);
static int serve(enum request request, int64_t address, int64_t number);

enum { MAX_GRAPHS = 64, MAX_SEEN_ONCE = 1024 };

struct graph { /* a command buffer */
    struct graph *next;
    struct gpu *gpu;
    const struct region *region;
    TVMFFISafeCallType launch_all;
    int64_t *words, *plan; /* the state, which the device reads, and arguments of launch_all */
    TVMFFIAny arena;       /* of its own, if parameters determine its size */
    int64_t arena_bytes;
    int32_t num_captured, oldest_cached, num_seen, next_seen;
    struct {
        void *executable;
        uint64_t last_use;
    } captured[MAX_GRAPHS];
    uint64_t uses;
    int64_t *captured_values, *seen_once; /* parameters of each captured graph, and of those that occurred once */
    bool cannot_capture;
};

struct gpu {
    DLDevice device;
    void *context;
    struct graph *graphs;
    TVMFFIAny arena; /* shared by graphs of static size, of which one runs at a time */
    char *mailboxes;
    volatile int32_t *record;
    pthread_mutex_t in_use; /* from enter to leave */
};

static void *stream_of(const struct gpu *gpu) {
    return ffi.EnvGetStream(gpu->device.device_type, gpu->device.device_id);
}

/* Pinned memory that the GPU accesses, filled with zeros. */
static int pinned(size_t bytes, void *address) {
    if (CUDA(HostAlloc, (void **)address, bytes, PORTABLE_AND_MAPPED) != 0)
        return -1;
    memset(*(void **)address, 0, bytes);
    return 0;
}

/* ---- Mailboxes ---- */

static volatile int32_t *flag_of(const struct gpu *gpu, int32_t mailbox) {
    return (volatile int32_t *)(gpu->mailboxes + rh_mailboxes[mailbox]);
}

/* Wait until the flag at an address is `wanted`: 1 for a value, 0 for an empty mailbox. */
static int await_flag(const struct gpu *gpu, const volatile int32_t *flag, int32_t wanted) {
    while (*flag != wanted) {
        int status = cuda.StreamQuery(stream_of(gpu));
        if (status != 0 && status != NOT_READY)
            return checked(status, "cuStreamQuery");
        if (status == 0 && *flag != wanted)
            return fail("RuntimeError", "a command buffer of the GPU ended without %s",
                        wanted ? "sending what the CPU waits for" : "receiving what the CPU has sent");
        wait_briefly(100000);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return 0;
}

/* End the work of the GPU after a failure, without waiting for the CPU any more, and clear all mailboxes. */
static void reset_mailboxes(const struct gpu *gpu) {
    while (rh_num_mailboxes > 0 && cuda.StreamQuery(stream_of(gpu)) == NOT_READY) {
        for (int32_t i = 0; i < rh_num_mailboxes; i++)
            *flag_of(gpu, i) = 1;
        wait_briefly(100000);
    }
    for (int32_t i = 0; i < rh_num_mailboxes; i++)
        *flag_of(gpu, i) = 0;
}

/* ---- Error records (artifact/checks.py) ---- */

/* Fail if kernels have reported a value that they refuse since the last call; does not wait. */
static int check_reported(const struct gpu *gpu) {
    volatile int32_t *record = gpu->record;
    if (record == NULL || record[RH_RECORD_READY] == 0)
        return 0;
    int64_t words[4];
    const int32_t places[] = {RH_RECORD_KEY, RH_RECORD_FOUND, RH_RECORD_FIRST, RH_RECORD_END};
    for (int i = 0; i < 4; i++)
        words[i] = (int64_t)((uint64_t)(uint32_t)record[places[i] + 1] << 32 | (uint32_t)record[places[i]]);
    record[RH_RECORD_READY] = 0;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    record[RH_RECORD_CLAIMED] = 0; /* last: from now on a thread of the GPU may fill the record again */
    char text[512] = "a check refused a value";
    for (int32_t i = 0; i < rh_info.num_checks; i++)
        if (rh_check_keys[i] == words[0])
            rh_write_refusal(text, sizeof text, &rh_info.checks[i], words[1], words[2], words[3]);
    FAIL("%s (found on cuda:%d)", text, gpu->device.device_id);
}

/* ---- Graphs ---- */

static int run_plan(const struct graph *graph, const int64_t *values) {
    TVMFFIAny args[1 + graph->region->parameters], result = none();
    args[0] = (TVMFFIAny){.type_index = kTVMFFIOpaquePtr, .v_ptr = graph->plan};
    for (int32_t i = 0; i < graph->region->parameters; i++)
        args[1 + i] = integer(values[i]);
    return graph->launch_all(NULL, args, 1 + graph->region->parameters, &result);
}

static int instantiate(void *captured, void *stream, void **executable) {
    if (CUDA(GraphInstantiate, executable, captured, 0) != 0)
        return -1;
    if (CUDA(GraphUpload, *executable, stream) == 0 && CUDA(StreamSynchronize, stream) == 0)
        return 0;
    cuda.GraphExecDestroy(*executable);
    return -1;
}

/* Capture the launches of all kernels. */
static int capture(const struct graph *graph, const int64_t *values, void **executable) {
    void *stream = NULL, *captured = NULL, *before = NULL;
    DLDevice device = graph->gpu->device;
    graph->plan[RH_GRAPH_RING] = (intptr_t)(graph->words + graph->region->ring);
    graph->plan[RH_GRAPH_CONSUMED_ADDRESS] = (intptr_t)(graph->words + RH_GRAPH_CONSUMED);
    if (CUDA(StreamCreate, &stream, NON_BLOCKING) != 0)
        return -1;
    int status = CUDA(BeginCapture, stream, RELAXED);
    if (status == 0) {
        ffi.EnvSetStream(device.device_type, device.device_id, stream, &before);
        status = run_plan(graph, values);
        ffi.EnvSetStream(device.device_type, device.device_id, before, NULL);
        int ended = cuda.EndCapture(stream, &captured); /* until then the stream can do nothing else */
        if (status == 0)
            status = checked(ended, "cuStreamEndCapture");
    }
    if (status == 0)
        status = instantiate(captured, stream, executable);
    if (captured != NULL)
        cuda.GraphDestroy(captured);
    cuda.StreamDestroy(stream);
    return status;
}

static int64_t *values_of(const struct graph *graph, int32_t index) {
    return graph->captured_values + index * graph->region->parameters;
}

static bool is_equal(const struct graph *graph, const int64_t *a, const int64_t *b) {
    return memcmp(a, b, (size_t)graph->region->parameters * sizeof *a) == 0;
}

/* Entry of the cache that compiled code searches; without parameters its only graph. */
static int64_t *cache_entry(const struct graph *graph, int32_t index) {
    if (graph->region->parameters == 0)
        return graph->words + RH_GRAPH_GRAPH;
    return graph->words + graph->region->graph_cache + index * (1 + graph->region->parameters);
}

static int32_t num_cache_entries(const struct graph *graph) {
    return graph->region->parameters == 0 ? 1 : RH_GRAPH_CACHED_GRAPHS;
}

/* Put a graph into that cache, in place of the oldest entry. */
static void cache_graph(struct graph *graph, int32_t index) {
    int64_t executable = (intptr_t)graph->captured[index].executable;
    for (int32_t i = 0; i < num_cache_entries(graph); i++)
        if (*cache_entry(graph, i) == executable)
            return;
    int64_t *entry = cache_entry(graph, graph->oldest_cached);
    entry[0] = executable;
    if (graph->region->parameters > 0)
        memcpy(entry + 1, values_of(graph, index), (size_t)graph->region->parameters * sizeof *entry);
    graph->oldest_cached = (graph->oldest_cached + 1) % num_cache_entries(graph);
}

/* Drop the graph at an index, whose place the last one takes; running launches complete. */
static void drop_graph(struct graph *graph, int32_t index) {
    int32_t last = --graph->num_captured;
    for (int32_t i = 0; i < num_cache_entries(graph); i++) {
        int64_t *entry = cache_entry(graph, i);
        if (*entry == (intptr_t)graph->captured[index].executable) {
            memset(entry, 0xff, (size_t)(1 + graph->region->parameters) * sizeof *entry); /* no size is -1 */
            *entry = 0;
        }
    }
    cuda.GraphExecDestroy(graph->captured[index].executable);
    graph->captured[index] = graph->captured[last];
    memmove(values_of(graph, index), values_of(graph, last), (size_t)graph->region->parameters * sizeof(int64_t));
}

static int32_t find_graph(const struct graph *graph, const int64_t *values) {
    for (int32_t i = 0; i < graph->num_captured; i++)
        if (is_equal(graph, values_of(graph, i), values))
            return i;
    return -1;
}

/* Capture, and drop the least recently used of too many graphs; the index of the graph, or -1. */
static int32_t add_graph(struct graph *graph, const int64_t *values) {
    void *executable = NULL;
    if (capture(graph, values, &executable) != 0)
        return -1;
    if (graph->num_captured == MAX_GRAPHS) {
        int32_t oldest = 0;
        for (int32_t i = 1; i < MAX_GRAPHS; i++)
            if (graph->captured[i].last_use < graph->captured[oldest].last_use)
                oldest = i;
        drop_graph(graph, oldest);
    }
    int32_t index = graph->num_captured++;
    graph->captured[index].executable = executable;
    graph->captured[index].last_use = ++graph->uses;
    memcpy(values_of(graph, index), values, (size_t)graph->region->parameters * sizeof *values);
    graph->words[RH_GRAPH_LAUNCH] = (intptr_t)cuda.GraphLaunch;
    cache_graph(graph, index);
    return index;
}

/* Whether parameters occurred before, which this records; always without parameters. */
static bool is_repeated(struct graph *graph, const int64_t *values) {
    int32_t count = graph->region->parameters;
    if (count == 0)
        return true;
    for (int32_t i = 0; i < graph->num_seen; i++)
        if (is_equal(graph, graph->seen_once + i * count, values))
            return true;
    memcpy(graph->seen_once + graph->next_seen * count, values, (size_t)count * sizeof *values);
    graph->next_seen = (graph->next_seen + 1) % MAX_SEEN_ONCE;
    graph->num_seen = graph->num_seen < MAX_SEEN_ONCE ? graph->num_seen + 1 : MAX_SEEN_ONCE;
    return false;
}

/* Grow the arena if necessary. Graphs contain its address, so growing drops them all. */
static int reserve_arena(struct graph *graph, const int64_t *values) {
    const struct region *region = graph->region;
    int64_t bytes = region->arena == NULL ? 0 : region->arena(values), larger = graph->arena_bytes * 5 / 4;
    if (bytes <= graph->arena_bytes)
        return 0;
    bytes = bytes > larger ? bytes : larger;
    while (graph->num_captured > 0)
        drop_graph(graph, 0);
    if (CUDA(StreamSynchronize, stream_of(graph->gpu)) != 0) /* earlier launches may still use the old arena */
        return -1;
    drop(graph->arena);
    graph->arena = none(), graph->arena_bytes = 0;
    if (allocate(graph->gpu->device, (DLDataType){kDLUInt, 8, 1}, 1, &bytes, &graph->arena) != 0)
        return -1;
    graph->arena_bytes = bytes;
    graph->plan[region->plan_constants + region->constants] = (intptr_t)address_of(tensor_of(graph->arena));
    return 0;
}

/* A kernel may do something that cannot be captured: then kernels are launched one by one. */
static void give_up_capturing(struct graph *graph) {
    TVMFFIObjectHandle error = NULL;
    ffi.ErrorMoveFromRaised(&error);
    if (error != NULL) {
        const TVMFFIErrorCell *cell = (const void *)((const char *)error + sizeof(TVMFFIObject));
        fprintf(stderr, "relax_hetero: command buffer '%s' is launched kernel by kernel, not as a graph: %.*s\n",
                graph->region->name, (int)cell->message.size, cell->message.data);
        ffi.ObjectDecRef(error);
    }
    while (graph->num_captured > 0)
        drop_graph(graph, 0);
    graph->cannot_capture = true;
}

/* A submission that compiled code has left to the machine, with bindings and parameters in the state. */
static int submit_slowly(struct graph *graph) {
    const struct region *region = graph->region;
    int64_t *words = graph->words, *bindings = words + region->slow_bindings, *values = words + region->slow_parameters;
    int32_t index = find_graph(graph, values);
    if (index < 0 && reserve_arena(graph, values) != 0)
        return -1;
    if (index < 0 && region->has_mailboxes && (index = add_graph(graph, values)) < 0)
        return -1; /* a graph is launched as a whole before the CPU works */
    if (index < 0) {
        graph->plan[RH_GRAPH_RING] = 0; /* the bindings are in the plan */
        memcpy(graph->plan + RH_GRAPH_BINDINGS, bindings, (size_t)region->slots * sizeof *bindings);
        if (run_plan(graph, values) != 0)
            return -1;
        if (!graph->cannot_capture && is_repeated(graph, values) && add_graph(graph, values) < 0)
            give_up_capturing(graph);
        return 0;
    }
    graph->captured[index].last_use = ++graph->uses;
    cache_graph(graph, index);
    void *stream = stream_of(graph->gpu);
    int64_t ticket = words[RH_GRAPH_SUBMITTED];
    while (ticket - __atomic_load_n(&words[RH_GRAPH_CONSUMED], __ATOMIC_ACQUIRE) >= RH_GRAPH_RING_ROWS) {
        int status = cuda.StreamQuery(stream);
        if (status != 0 && status != NOT_READY)
            return checked(status, "cuStreamQuery");
        wait_briefly(20000);
    }
    memcpy(words + region->ring + ticket % RH_GRAPH_RING_ROWS * region->slots, bindings, (size_t)region->slots * 8);
    if (CUDA(GraphLaunch, graph->captured[index].executable, stream) != 0)
        return -1;
    words[RH_GRAPH_SUBMITTED] = ticket + 1;
    return 0;
}

/* The state of a command buffer, as a constant of the GPU. */
static int make_graph(struct gpu *gpu, const struct constant *constant, const TVMFFIAny *placed, TVMFFIAny *result) {
    const struct region *region = constant->region;
    struct graph *graph = calloc(1, sizeof *graph);
    size_t parameters = (size_t)region->parameters + 1;
    char name[512];
    snprintf(name, sizeof name, "%s_record", region->name);
    if (graph == NULL || (graph->captured_values = calloc(MAX_GRAPHS * parameters, 8)) == NULL ||
        (graph->seen_once = calloc(MAX_SEEN_ONCE * parameters, 8)) == NULL ||
        (graph->plan = calloc((size_t)(region->plan_constants + region->constants + 1), 8)) == NULL)
        return fail("MemoryError", "no memory for a command buffer");
    if ((graph->launch_all = own_function("", name)) == NULL)
        return fail("RuntimeError", "%s has no function %s", path, name);
    graph->gpu = gpu, graph->region = region, graph->next = gpu->graphs;
    if (pinned((size_t)region->state_words * 8, &graph->words) != 0)
        return -1;
    graph->words[RH_GRAPH_OWNER] = (intptr_t)serve;
    graph->words[RH_GRAPH_DEVICE] = gpu->device.device_id;
    graph->words[RH_GRAPH_GET_STREAM] = (intptr_t)ffi.EnvGetStream;
    int64_t *zeros = calloc((size_t)region->table_words, 8), table_words = region->table_words, number = 0;
    TVMFFIAny host, table = none();
    if (zeros == NULL)
        return fail("MemoryError", "no memory for a command buffer");
    int status = wrap(zeros, (DLDevice){kDLCPU, 0}, int64_type, 1, &table_words, &host);
    if (status == 0) {
        status = new_copy(host, gpu->device, &table); /* stays: machines live until the program ends */
        drop(host);
    }
    free(zeros);
    if (status != 0)
        return -1;
    graph->plan[RH_GRAPH_TABLE] = (intptr_t)address_of(tensor_of(table));
    for (int32_t i = 0; i < constant->entries; i++) /* kernels lack words in the plan */
        if (constant->table[i].kernel == NULL)
            graph->plan[region->plan_constants + number++] =
                (intptr_t)address_of(tensor_of(placed[constant->table[i].constant]));
    if (region->arena == NULL)
        graph->plan[region->plan_constants + number] = (intptr_t)address_of(tensor_of(gpu->arena));
    gpu->graphs = graph;
    return wrap(graph->words, gpu->device, constant->dtype, constant->ndim, constant->shape, result);
}

/* ---- Making the GPU of a machine ---- */

static int check_code(const struct gpu *gpu) {
    for (int32_t i = 0; i < rh_num_gpu_codes; i++) {
        const struct gpu_code *code = &rh_gpu_codes[i];
        int major = 0, minor = 0;
        if (CUDA(DeviceGetAttribute, &major, MAJOR, gpu->device.device_id) != 0 ||
            CUDA(DeviceGetAttribute, &minor, MINOR, gpu->device.device_id) != 0)
            return -1;
        if (major == code->major && (code->is_exact ? minor == code->minor : minor >= code->minor))
            continue;
        char newer[32] = "alone";
        if (!code->is_exact)
            snprintf(newer, sizeof newer, "and newer ones of %d.x", code->major);
        return fail("RuntimeError", "%s was compiled for %s, which GPUs of compute capability %d.%d %s run: found "
                    "compute capability %d.%d as cuda:%d; compile the model for that",
                    rh_info.devices[code->device].name, code->arch, code->major, code->minor, newer, major, minor,
                    gpu->device.device_id);
    }
    return 0;
}

/* Make the lock that calls hold; the next one gets it, too, if a call has failed and its thread has ended. */
static void make_lock(struct gpu *gpu) {
    pthread_mutexattr_t robust;
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&gpu->in_use, &robust);
    pthread_mutexattr_destroy(&robust);
}

/* The GPU of these devices; null without one. */
static int make_gpu(const DLDevice *devices, struct gpu **result) {
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    int32_t first = -1;
    int64_t arena = 1;
    *result = NULL;
    for (int32_t i = 0; i < rh_info.num_devices; i++) {
        if (devices[i].device_type != kDLCUDA)
            continue;
        first = first < 0 ? i : first;
        if (devices[i].device_id != devices[first].device_id)
            return fail("RuntimeError", "%s runs on cuda:%d and cuda:%d, expected one GPU: several need the package "
                        "relax_hetero of Python", path, devices[first].device_id, devices[i].device_id);
    }
    if (first < 0)
        return 0;
    struct gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL)
        return fail("MemoryError", "no memory for a machine");
    gpu->device = devices[first];
    make_lock(gpu);
    if (find_driver() != 0 || check_code(gpu) != 0 || CUDA(PrimaryContext, &gpu->context, gpu->device.device_id) != 0 ||
        CUDA(SetContext, gpu->context) != 0)
        return -1;
    if (rh_num_mailboxes > 0 && blocking != NULL && *blocking != 0 && strcmp(blocking, "0") != 0)
        return fail("RuntimeError", "CUDA_LAUNCH_BLOCKING=%s: launches would wait for the GPU, which waits for the CPU "
                    "in this model; expected it unset", blocking);
    if (rh_num_mailboxes > 0 && pinned((size_t)rh_mailbox_bytes, &gpu->mailboxes) != 0)
        return -1;
    for (int32_t i = 0; i < rh_num_mailboxes; i++)
        ((int64_t *)(gpu->mailboxes + rh_mailboxes[i]))[RH_GRAPH_OWNER] = (intptr_t)serve;
    for (int32_t i = 0; i < rh_num_constants; i++) {
        const struct region *region = rh_constants[i].region;
        if (region != NULL && region->arena == NULL && region->arena_bytes > arena)
            arena = region->arena_bytes;
    }
    *result = gpu;
    return allocate(gpu->device, (DLDataType){kDLUInt, 8, 1}, 1, &arena, &gpu->arena);
}

/* Constants that a machine makes: the error record, mailboxes, and states of command buffers. */
static int place_of_gpu(struct gpu *gpu, const struct constant *constant, DLDevice device, const TVMFFIAny *placed,
                        TVMFFIAny *result) {
    void *data;
    if (gpu == NULL)
        return fail("RuntimeError", "%s has a constant of a GPU, expected a GPU among its devices", path);
    if (constant->region != NULL)
        return make_graph(gpu, constant, placed, result);
    if (constant->is_record) {
        if (gpu->record == NULL && pinned(RH_RECORD_WORDS * sizeof *gpu->record, &gpu->record) != 0)
            return -1;
        data = (void *)gpu->record;
    } else {
        data = gpu->mailboxes + constant->mailbox;
    }
    return wrap(data, device, constant->dtype, constant->ndim, constant->shape, result);
}

/* ---- Functions that compiled code calls by global names ---- */

static int serve(enum request request, int64_t address, int64_t number) {
    for (struct machine *each = __atomic_load_n(&machines, __ATOMIC_ACQUIRE); each != NULL; each = each->next) {
        const char *first = each->gpu == NULL ? NULL : each->gpu->mailboxes, *wanted = (const char *)address;
        if (request == AWAIT && first != NULL && first <= wanted && wanted < first + rh_mailbox_bytes)
            return await_flag(each->gpu, (const volatile int32_t *)address, (int32_t)number);
        for (struct graph *graph = each->gpu == NULL ? NULL : each->gpu->graphs; graph != NULL; graph = graph->next) {
            char call[512];
            if ((intptr_t)graph->words != address)
                continue;
            if (request == SUBMIT)
                return submit_slowly(graph);
            snprintf(call, sizeof call, "launching command buffer '%s' on cuda:%d", graph->region->name,
                     graph->gpu->device.device_id);
            return checked((int)number, call);
        }
    }
    return fail("RuntimeError", "%s: compiled code asked for an unknown command buffer", path);
}

enum { SUBMIT_GRAPH, GRAPH_FAILED, AWAIT_MAILBOX, RAISE_REPORTED, FUNCTIONS };
static TVMFFIObjectHandle before[FUNCTIONS]; /* what Python or another file has defined under these names, or null */

static int pass_to_owner(enum request request, int function, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    serve_function owner = (serve_function)((const int64_t *)args[0].v_int64)[RH_GRAPH_OWNER];
    *result = none();
    if (owner != NULL)
        return owner(request, args[0].v_int64, count > 1 ? args[1].v_int64 : 0);
    if (before[function] == NULL)
        return fail("RuntimeError", "%s: compiled code asked for an unknown command buffer", path);
    return ffi.FunctionCall(before[function], (TVMFFIAny *)args, count, result);
}

static int submit_graph(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    return pass_to_owner(SUBMIT, SUBMIT_GRAPH, args, count, result);
}

static int graph_failed(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    return pass_to_owner(EXPLAIN_FAILURE, GRAPH_FAILED, args, count, result);
}

static int await_mailbox(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    return pass_to_owner(AWAIT, AWAIT_MAILBOX, args, count, result);
}

/* Fail for values that kernels of a GPU have refused; relax_hetero.h calls it after it has read a tensor. */
static int raise_reported(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    *result = none();
    for (struct machine *each = __atomic_load_n(&machines, __ATOMIC_ACQUIRE); each != NULL; each = each->next)
        if (each->gpu != NULL && each->gpu->device.device_id == args[0].v_int64 && check_reported(each->gpu) != 0)
            return -1;
    if (before[RAISE_REPORTED] == NULL)
        return 0;
    return ffi.FunctionCall(before[RAISE_REPORTED], (TVMFFIAny *)args, count, result);
}

static int define_functions_of_gpus(void) {
    static const char *const names[FUNCTIONS] = {"submit_graph", "graph_failed", "await_mailbox", "raise_reported"};
    static const TVMFFISafeCallType functions[FUNCTIONS] = {submit_graph, graph_failed, await_mailbox, raise_reported};
    static bool is_done;
    for (int i = 0; i < FUNCTIONS && !is_done; i++) {
        char name[64];
        TVMFFIByteArray text = {name, (size_t)snprintf(name, sizeof name, "relax_hetero.%s", names[i])};
        TVMFFIObjectHandle function = NULL;
        if (ffi.FunctionGetGlobal(&text, &before[i]) != 0 ||
            ffi.FunctionCreate(NULL, functions[i], NULL, &function) != 0 ||
            ffi.FunctionSetGlobal(&text, function, 1) != 0)
            return -1;
        ffi.ObjectDecRef(function);
    }
    is_done = true;
    return 0;
}

/* ---- Calls ---- */

/* Reserve the GPU for a call of this thread. */
static int enter_gpu(struct gpu *gpu) {
    if (pthread_mutex_lock(&gpu->in_use) == EOWNERDEAD) {
        pthread_mutex_consistent(&gpu->in_use);
        reset_mailboxes(gpu);
    }
    if (CUDA(SetContext, gpu->context) == 0 && check_reported(gpu) == 0)
        return 0;
    pthread_mutex_unlock(&gpu->in_use);
    return -1;
}
