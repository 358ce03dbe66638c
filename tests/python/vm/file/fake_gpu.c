/* standalone_cuda.c on a GPU that this file plays: kernels run when their stream is asked or awaited, not when they are
 * launched. A command buffer writes x + 5 to y, over n numbers that also pass through its arena. Exits with 0 if all is
 * well.
 */
#include "standalone.c"

#define CHECK(...)                                                                                                     \
    if (!(__VA_ARGS__)) {                                                                                              \
        fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #__VA_ARGS__, error_text);                                     \
        exit(1);                                                                                                       \
    }

/* ---- Tables of a file ---- */

static const rh_device_info devices[] = {{"cuda:0", {kDLCUDA, 0}}};
static const rh_check_info checks[] = {{"index", "op take"}};
const rh_file_info rh_info = {RH_ABI, 0, 0, 0, devices, NULL, 1, checks};
const struct constant rh_constants[1];
const int32_t rh_num_constants, rh_width, rh_num_bounds, rh_num_gpu_codes, rh_num_mailboxes = 2;
const int64_t rh_alignment = 16, rh_check_keys[] = {INT64_C(-123456789012)}, rh_mailboxes[] = {0, 256};
const int64_t rh_mailbox_bytes = 512;
const struct bound rh_bounds[1];
const struct gpu_code rh_gpu_codes[1];

static int64_t arena_of(const int64_t *p) {
    return 8 * p[0];
}

/* Positions as in artifact/graph_layout.py, for two slots. */
#define REGION(name, parameters, arena, mailboxes)                                                                     \
    {name, 2, parameters, 16, 18, 18 + parameters, 18 + parameters + 8 * (parameters ? 1 + parameters : 0),            \
     18 + parameters + 8 * (parameters ? 1 + parameters : 0) + 32, 33, 5, 1, 800, arena, mailboxes}
static const struct region fixed = REGION("add", 0, NULL, false), sized = REGION("add", 1, arena_of, false),
                           waiting = REGION("add", 0, NULL, true);

/* ---- TVM-FFI ---- */

static char error_text[2048];
static void *stream = NULL;

static void set_error(const char *kind, const char *text) {
    snprintf(error_text, sizeof error_text, "%s", text);
}

static void move_error(TVMFFIObjectHandle *error) {
    *error = NULL;
}

struct tensor {
    TVMFFIObject header;
    DLTensor dl;
    int64_t shape[2], owned[];
};

static int ignore(TVMFFIObjectHandle handle) {
    return 0;
}

static int from_dlpack(DLManagedTensor *managed, int32_t alignment, int32_t contiguous, TVMFFIObjectHandle *result) {
    struct tensor *tensor = calloc(1, sizeof *tensor);
    tensor->dl = managed->dl_tensor;
    *result = tensor;
    return 0;
}

static int get_global(const TVMFFIByteArray *name, TVMFFIObjectHandle *result) {
    *result = strcmp(name->data, "ffi.Shape") == 0                         ? (void *)1
              : strcmp(name->data, "runtime.TVMTensorAllocWithScope") == 0 ? (void *)2
                                                                           : (void *)3;
    return 0;
}

static int call_function(TVMFFIObjectHandle function, TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    if (function == (void *)1) { /* a shape of one extent */
        *result = integer(args[0].v_int64);
    } else if (function == (void *)2) {
        size_t bytes = (size_t)args[0].v_int64 * args[1].v_dtype.bits / 8;
        struct tensor *tensor = calloc(1, sizeof *tensor);
        tensor->dl = (DLTensor){malloc(bytes), args[2].v_device, 1, args[1].v_dtype, tensor->shape, NULL, 0};
        tensor->shape[0] = args[0].v_int64;
        memset(tensor->dl.data, 0xab, bytes);
        *result = object(tensor, kTVMFFITensor);
    } else {
        const DLTensor *from = tensor_of(args[0]), *to = tensor_of(args[1]);
        memcpy(to->data, from->data, (size_t)bytes_of(from));
    }
    return 0;
}

static void *get_stream(int32_t type, int32_t id) {
    return stream;
}

static int set_stream(int32_t type, int32_t id, void *next, void **before) {
    if (before != NULL)
        *before = stream;
    stream = next;
    return 0;
}

/* ---- The driver ---- */

struct launches { /* a graph of all kernels */
    int64_t *ring, *consumed, *table, *arena, *constant, numbers;
    bool is_destroyed;
};

static struct launches recorded, *pending[64];
static int num_pending, num_captured, num_plain, num_dropped, status_of_launch, status_of_capture;
static int64_t *mailbox_to_fill;

static void add(const int64_t *row, int64_t *arena, const int64_t *constant, int64_t numbers) {
    const int64_t *x = (const int64_t *)row[0];
    int64_t *y = (int64_t *)row[1];
    for (int64_t i = 0; i < numbers; i++)
        arena[i] = x[i] + constant[0];
    memcpy(y, arena, (size_t)numbers * 8);
}

/* The compiled function that launches all kernels. */
__attribute__((visibility("default"), used)) int record(void *self, const TVMFFIAny *args, int32_t count,
                                                        TVMFFIAny *result) __asm__("__tvm_ffi_add_record");
int record(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    int64_t *plan = args[0].v_ptr, numbers = count > 1 ? args[1].v_int64 : 100;
    struct launches all = {(int64_t *)plan[RH_GRAPH_RING], (int64_t *)plan[RH_GRAPH_CONSUMED_ADDRESS],
                           (int64_t *)plan[RH_GRAPH_TABLE], (int64_t *)plan[6], (int64_t *)plan[5], numbers, false};
    CHECK((all.ring != NULL) == (stream == (void *)7));
    if (all.ring != NULL) {
        recorded = all;
    } else {
        num_plain++;
        add(plan + RH_GRAPH_BINDINGS, all.arena, all.constant, numbers);
    }
    return 0;
}

/* Begin and end the oldest launch, as a graph's first kernel does: the device counts the launches itself. */
static void proceed(void) {
    struct launches *all = pending[0];
    int64_t ticket = all->table[0]++;
    if (ticket % 4 == 0)
        *all->consumed = ticket;
    add(all->ring + ticket % RH_GRAPH_RING_ROWS * 2, all->arena, all->constant, all->numbers);
    memmove(pending, pending + 1, (size_t)--num_pending * sizeof *pending);
}

static int query(void *of) {
    if (mailbox_to_fill != NULL)
        *(int32_t *)mailbox_to_fill = 1, mailbox_to_fill = NULL;
    if (num_pending == 0)
        return 0;
    proceed();
    return NOT_READY;
}

static int synchronize(void *of) {
    while (num_pending > 0)
        proceed();
    return 0;
}

static int launch(void *executable, void *on) {
    struct launches *all = executable;
    CHECK(on == NULL && !all->is_destroyed && num_pending < 64);
    if (status_of_launch == 0)
        pending[num_pending++] = all;
    return status_of_launch;
}

static int create_stream(void **result, unsigned flags) {
    *result = (void *)7;
    return 0;
}

static int begin_capture(void *of, int mode) {
    return 0;
}

static int end_capture(void *of, void **graph) {
    *graph = &recorded;
    return status_of_capture;
}

static int instantiate_graph(void **executable, void *graph, unsigned long long flags) {
    num_captured++;
    *executable = memcpy(malloc(sizeof recorded), graph, sizeof recorded);
    return 0;
}

static int nothing(void *of) {
    return 0;
}

static int upload(void *executable, void *on) {
    return 0;
}

/* Running launches complete. */
static int destroy_executable(void *executable) {
    ((struct launches *)executable)->is_destroyed = true;
    num_dropped++;
    return 0;
}

static int allocate_pinned(void **address, size_t bytes, unsigned flags) {
    *address = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return 0;
}

static int error_name(int status, const char **name) {
    *name = "CUDA_ERROR_LAUNCH_FAILED";
    return 0;
}

/* ---- Submissions, as compiled code makes them ---- */

static int submit(struct graph *graph, int64_t *x, int64_t *y, int64_t numbers) {
    int64_t *words = graph->words, ticket = words[RH_GRAPH_SUBMITTED], executable = words[RH_GRAPH_GRAPH];
    int32_t parameters = graph->region->parameters;
    for (int i = 0; parameters > 0 && i < RH_GRAPH_CACHED_GRAPHS; i++) {
        int64_t *entry = words + graph->region->graph_cache + 2 * i;
        executable = entry[1] == numbers ? entry[0] : executable;
    }
    int64_t *row = words + graph->region->ring + ticket % RH_GRAPH_RING_ROWS * 2;
    TVMFFIAny args[] = {integer((intptr_t)words), none()}, result;
    if (executable == 0 || ticket - words[RH_GRAPH_CONSUMED] >= RH_GRAPH_RING_ROWS) {
        row = words + graph->region->slow_bindings;
        row[0] = (intptr_t)x, row[1] = (intptr_t)y;
        if (parameters > 0)
            words[graph->region->slow_parameters] = numbers;
        return submit_graph(NULL, args, 1, &result);
    }
    row[0] = (intptr_t)x, row[1] = (intptr_t)y;
    words[RH_GRAPH_SUBMITTED] = ticket + 1;
    int status = ((int (*)(void *, void *))words[RH_GRAPH_LAUNCH])((void *)executable, stream);
    if (status == 0)
        return 0;
    words[RH_GRAPH_SUBMITTED] = ticket;
    args[1] = integer(status);
    return graph_failed(NULL, args, 2, &result);
}

static void check_submissions(struct graph *graph, const int64_t *sizes, int count) {
    int64_t **x = calloc((size_t)count, sizeof *x), **y = calloc((size_t)count, sizeof *y);
    for (int i = 0; i < count; i++) {
        x[i] = malloc((size_t)sizes[i] * 8), y[i] = malloc((size_t)sizes[i] * 8);
        for (int64_t k = 0; k < sizes[i]; k++)
            x[i][k] = 1000 * i + k;
        CHECK(submit(graph, x[i], y[i], sizes[i]) == 0);
    }
    synchronize(NULL);
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < sizes[i]; k++)
            CHECK(y[i][k] == x[i][k] + 5);
}

static int set_context(void *context) {
    return 0;
}

/* A call that fails in a thread that ends without another one. */
static void *fail_in_thread(void *gpu) {
    CHECK(enter_gpu(gpu) == 0);
    *flag_of(gpu, 1) = 7;
    return NULL;
}

int main(void) {
    ffi.ErrorSetRaisedFromCStr = set_error, ffi.ErrorMoveFromRaised = move_error;
    ffi.ObjectIncRef = ffi.ObjectDecRef = ignore, ffi.TensorFromDLPack = from_dlpack;
    ffi.FunctionGetGlobal = get_global, ffi.FunctionCall = call_function;
    ffi.EnvGetStream = get_stream, ffi.EnvSetStream = set_stream;
    cuda.GetErrorName = error_name, cuda.HostAlloc = allocate_pinned, cuda.StreamCreate = create_stream;
    cuda.StreamDestroy = nothing, cuda.StreamQuery = query, cuda.StreamSynchronize = synchronize;
    cuda.BeginCapture = begin_capture, cuda.EndCapture = end_capture, cuda.GraphInstantiate = instantiate_graph;
    cuda.GraphDestroy = nothing, cuda.GraphUpload = upload, cuda.GraphLaunch = launch;
    cuda.GraphExecDestroy = destroy_executable;
    library = dlopen(NULL, RTLD_LAZY);

    struct machine *each = calloc(1, sizeof *each + sizeof(DLDevice));
    struct gpu *gpu = each->gpu = calloc(1, sizeof *gpu);
    gpu->device = (DLDevice){kDLCUDA, 0};
    int64_t bytes = 800, number = 5, one = 1;
    CHECK(allocate(gpu->device, (DLDataType){kDLUInt, 8, 1}, 1, &bytes, &gpu->arena) == 0);
    CHECK(pinned(512, &gpu->mailboxes) == 0 && pinned(64, &gpu->record) == 0);
    for (int i = 0; i < 2; i++)
        ((int64_t *)(gpu->mailboxes + rh_mailboxes[i]))[RH_GRAPH_OWNER] = (intptr_t)serve;
    machines = each;
    TVMFFIAny constant, state;
    CHECK(wrap(&number, gpu->device, int64_type, 1, &one, &constant) == 0);
    const struct entry entries[] = {{"a kernel", 0}, {NULL, 0}};
    struct graph *graphs[3];
    const struct region *const regions[] = {&fixed, &sized, &waiting};
    for (int i = 0; i < 3; i++) {
        int64_t words = regions[i]->state_words;
        struct constant spec = {int64_type, 0, 1, &words, 0, 0, entries, 2, regions[i], false, -1};
        CHECK(make_graph(gpu, &spec, &constant, &state) == 0 && tensor_of(state)->shape[0] == words);
        graphs[i] = gpu->graphs;
    }

    /* The next call does not wait for a thread that has ended. */
    pthread_t thread;
    make_lock(gpu);
    cuda.SetContext = set_context;
    CHECK(pthread_create(&thread, NULL, fail_in_thread, gpu) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(enter_gpu(gpu) == 0 && *flag_of(gpu, 1) == 0 && pthread_mutex_unlock(&gpu->in_use) == 0);

    /* Without parameters: captured after the first submission. Then rows are reused, and submissions wait for some. */
    int64_t hundreds[100];
    for (int i = 0; i < 100; i++)
        hundreds[i] = 100;
    check_submissions(graphs[0], hundreds, 100);
    CHECK(num_captured == 1 && num_plain == 1);

    /* With mailboxes: a graph from the beginning. */
    check_submissions(graphs[2], hundreds, 30);
    CHECK(num_captured == 2 && num_plain == 1);

    /* With a parameter: captured at the second occurrence; dropped when the arena grows, or 64 others are there. */
    const int64_t few[] = {3, 7, 3, 3, 7, 3, 50, 3, 3};
    check_submissions(graphs[1], few, 9);
    CHECK(num_captured == 5 && num_dropped == 2 && graphs[1]->num_captured == 1); /* 3, 7; and 3 after the growth */
    int64_t many[300];
    for (int i = 0; i < 300; i++)
        many[i] = 1 + i * 7 % 50 + i / 100 * 20;
    check_submissions(graphs[1], many, 300);
    CHECK(graphs[1]->num_captured <= MAX_GRAPHS && num_dropped > 2);
    check_submissions(graphs[1], few, 9);

    /* A failed launch counts for nothing. */
    status_of_launch = 719;
    CHECK(submit(graphs[0], many, many, 100) == -1);
    CHECK(strstr(error_text, "launching command buffer 'add' on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED (719)"));
    status_of_launch = 0;
    check_submissions(graphs[0], hundreds, 20);

    /* What cannot be captured is launched kernel by kernel. */
    int before = num_plain;
    status_of_capture = 901;
    const int64_t others[] = {49, 48, 49, 48, 49, 1000, 1000, 1000};
    check_submissions(graphs[1], others, 8);
    CHECK(graphs[1]->cannot_capture && graphs[1]->num_captured == 0 && num_plain >= before + 3);
    status_of_capture = 0;
    check_submissions(graphs[1], few, 9);

    /* Mailboxes: a flag that comes late, one that never comes, and a failure of the CPU. */
    TVMFFIAny await[] = {integer((intptr_t)gpu->mailboxes), integer(1)}, result;
    mailbox_to_fill = (int64_t *)gpu->mailboxes;
    CHECK(await_mailbox(NULL, await, 2, &result) == 0);
    await[0] = integer((intptr_t)gpu->mailboxes + 256);
    CHECK(await_mailbox(NULL, await, 2, &result) == -1 && strstr(error_text, "ended without sending what the CPU"));
    reset_mailboxes(gpu);
    CHECK(*flag_of(gpu, 0) == 0 && *flag_of(gpu, 1) == 0);

    /* Error records: a report is raised once, with the text of its check. */
    const int64_t report[] = {rh_check_keys[0], -7, -5, 5};
    const int32_t places[] = {RH_RECORD_KEY, RH_RECORD_FOUND, RH_RECORD_FIRST, RH_RECORD_END};
    for (int i = 0; i < 4; i++)
        memcpy((int32_t *)gpu->record + places[i], &report[i], 8);
    gpu->record[RH_RECORD_READY] = gpu->record[RH_RECORD_CLAIMED] = 1;
    CHECK(check_reported(gpu) == -1);
    CHECK(strcmp(error_text, "op take: index -7 is out of range, expected -5 to 4 (found on cuda:0)") == 0);
    CHECK(check_reported(gpu) == 0 && gpu->record[RH_RECORD_CLAIMED] == 0);
    return 0;
}
