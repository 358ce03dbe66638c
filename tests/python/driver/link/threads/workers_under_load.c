/* Everything that workers.c does at once, for a run under ThreadSanitizer: callers with loops that nest, fail, sleep
 * and change their width, a process that forks, and copies with helpers. Exits with 1 and a line if a number is wrong.
 *
 * Loops and copies write plain memory, so that a missing order between threads is a race that is reported.
 */
#include "workers.c"

#include <stdio.h>
#include <sys/wait.h>

#define EXPECT(condition)                                                 \
    do {                                                                  \
        if (!(condition)) {                                               \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                     \
        }                                                                 \
    } while (0)

int32_t relax_hetero_workers_launch(task_function function, void *data, int32_t asked) {
    return launch_body(function, data, asked);
}
int32_t relax_hetero_workers_work(struct worker *self) {
    return work_body(self);
}
int32_t relax_hetero_workers_end(struct pool *pool) {
    return end_body(pool);
}
int32_t relax_hetero_workers_stage(void *desk, void *copy, void *lane) {
    return stage_body(desk, copy, lane);
}
int32_t relax_hetero_workers_help(void *desk, void *lane) {
    return help_body(desk, lane);
}

/* TVM's errors: a reference that a thread has raised. */

static _Thread_local _Atomic int *raised;
static _Atomic int live_errors;

static _Atomic int *new_error(void) {
    _Atomic int *error = malloc(sizeof(*error));
    atomic_init(error, 1);
    live_errors++;
    return error;
}

static int drop(void *error) {
    if (atomic_fetch_sub((_Atomic int *)error, 1) == 1) {
        free(error);
        live_errors--;
    }
    return 0;
}

static void take(void **error) {
    *error = (void *)raised;
    raised = NULL;
}

static void raise_it(void *error) {
    atomic_fetch_add((_Atomic int *)error, 1);
    raised = error;
}

/* Loops. */

enum { TASKS = 3 }; /* of a loop for each thread */

struct loop {
    int64_t input;
    int64_t results[64];
    int tasks;
    int failing;     /* tasks below it fail */
    int nested;      /* each task runs a loop of its own */
    int microseconds; /* that odd tasks sleep */
};

static int32_t inner(int32_t task, void *group, void *data) {
    EXPECT(task == 0 && ((struct group *)group)->tasks == 1);
    ++*(int64_t *)data;
    return 0;
}

static int32_t outer(int32_t task, void *group, void *data) {
    struct loop *loop = data;
    EXPECT(((struct group *)group)->tasks == loop->tasks);
    if (task < loop->failing) {
        raised = new_error();
        return -1;
    }
    loop->results[task] += loop->input + task;
    if (loop->microseconds && task % 2)
        usleep((useconds_t)loop->microseconds);
    return loop->nested ? launch_body(inner, &loop->results[task], 0) : 0;
}

static void run_loop(struct loop *loop, int64_t input) {
    struct loop before = *loop;
    loop->input = input;
    loop->tasks = width_body() < 2 ? 1 : (int)(width_body() * TASKS);
    int32_t status = launch_body(outer, loop, 0);
    EXPECT((status != 0) == (loop->failing > 0) && (raised != NULL) == (status != 0));
    for (int i = loop->failing; i < loop->tasks; i++)
        EXPECT(loop->results[i] == before.results[i] + input + i + loop->nested);
    if (raised != NULL) {
        drop((void *)raised);
        raised = NULL;
    }
}

/* The first task of the worker, which is slow, waits for all others: its thread takes none of those behind. */
static int32_t slow_in_worker(int32_t task, void *group, void *data) {
    _Atomic int *done = data;
    while (task == 1 && atomic_load(done) < ((struct group *)group)->tasks - 1)
        usleep(50);
    atomic_fetch_add(done, 1);
    return 0;
}

static void check_slow_worker(void) {
    _Atomic int done;
    configure_body(2, 2, -1);
    for (int i = 0; i < 20; i++) {
        atomic_init(&done, 0);
        EXPECT(launch_body(slow_in_worker, (void *)&done, 0) == 0 && atomic_load(&done) == 2 * TASKS);
    }
}

static void *call_loops(void *argument) {
    uint32_t random = (uint32_t)(intptr_t)argument;
    struct loop loop = {0};
    configure_body(4, 4, -1);
    for (int64_t i = 0; i < 400; i++) {
        random = random * 1664525u + 1013904223u;
        uint32_t choice = random >> 16;
        loop.failing = choice % 8 == 0 ? 1 + (int)(choice >> 3) % 3 : 0;
        loop.nested = choice % 5 == 0;
        loop.microseconds = choice % 40 == 0 ? 500 : 0;
        if (choice % 16 == 1)
            configure_body(3 + choice % 7, 3 + choice % 5 % (1 + choice % 7), choice % 3 - 1); /* wider pools, and others as wide */
        if (choice % 25 == 0)
            usleep(1500); /* workers fall asleep */
        if (choice % 64 == 2)
            spin_body(choice % 2 ? 2000 : 50000); /* while others read it */
        run_loop(&loop, i);
    }
    return NULL;
}

static void *fork_between_loops(void *argument) {
    struct loop loop = {0};
    configure_body(4, 4, -1);
    for (int i = 0; i < 4; i++) {
        run_loop(&loop, i);
        pid_t child = fork();
        if (child == 0) {
            EXPECT(forget_body() == 0);
            configure_body(3, 3, 0);
            run_loop(&loop, 1);
            run_loop(&loop, 2);
            _exit(0);
        }
        int status = -1;
        EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        run_loop(&loop, i);
    }
    return argument;
}

/* A GPU whose streams copy at once, and fail after a while. */

enum { PARTS = 40, PART = 512, BUFFERS = 2, HELPERS = 3 };
static char gpu_memory[PARTS * PART];
static _Atomic int copies_until_failure;

static int32_t nothing(void *object) {
    return object == NULL;
}
static int32_t record(void *event, void *stream) {
    return event == NULL || stream == NULL;
}
static int32_t wait_event(void *stream, void *event, uint32_t flags) {
    return event == NULL || stream == NULL || flags != 0;
}
static int32_t copy_bytes(int64_t to, int64_t from, int64_t bytes, void *stream) {
    memcpy((void *)to, (void *)from, (size_t)bytes);
    return stream == NULL || atomic_fetch_sub(&copies_until_failure, 1) == 1 ? 77 : 0;
}

struct full_lane {
    struct lane lane;
    struct buffer buffers[BUFFERS];
    char pinned[BUFFERS][PART];
};

static struct desk desk;

static void open_lane(struct full_lane *lane) {
    lane->lane = (struct lane){lane, lane, {0, 0}};
    for (int i = 0; i < BUFFERS; i++)
        lane->buffers[i] = (struct buffer){lane->pinned[i], lane, 0, 0};
}

static void *help(void *argument) {
    struct full_lane lane;
    open_lane(&lane);
    EXPECT(help_body(&desk, &lane.lane) == 0);
    return argument;
}

static void check_copies(void) {
    static char host[PARTS * PART];
    static int64_t offsets[PARTS + 1];
    struct full_lane lane;
    pthread_t helpers[HELPERS];
    for (int i = 0; i <= PARTS; i++)
        offsets[i] = i * PART;
    open_lane(&lane);
    for (int i = 0; i < HELPERS; i++)
        EXPECT(pthread_create(&helpers[i], NULL, help, NULL) == 0);
    for (int i = 0; i < 120; i++) {
        bool to_host = i % 2, fails = i % 10 == 9;
        struct copy copy = {0,     PARTS,   offsets, host,   (intptr_t)gpu_memory, to_host,    BUFFERS, host, host, host,
                            nothing, nothing, record, wait_event, copy_bytes, 0, 0};
        for (int k = 0; k < PARTS * PART; k++)
            if (to_host)
                host[k] = 0;
            else
                host[k] = (char)(k / 7 + i);
        copies_until_failure = fails ? 5 : 0;
        if (i % 7 == 0)
            usleep(300); /* helpers fall asleep */
        stage_body(&desk, &copy, &lane.lane);
        EXPECT(copy.status == (fails ? 77 : 0) && (!fails || copy.function == COPY));
        for (int k = 0; k < PARTS * PART && !fails; k++)
            EXPECT(host[k] == gpu_memory[k] && host[k] == (char)(k / 7 + i / 2 * 2));
    }
    stage_body(&desk, NULL, NULL);
    for (int i = 0; i < HELPERS; i++)
        pthread_join(helpers[i], NULL);
}

int main(void) {
    enum { CALLERS = 4 };
    static const int32_t cores[4] = {0, 0, 2, 2};
    pthread_t callers[CALLERS];
    EXPECT(start_body((intptr_t)take, (intptr_t)raise_it, (intptr_t)drop, 2, 20000, (intptr_t)cores, 4, TASKS) == 0);
    pthread_t forker; /* alone: a process with other threads cannot fork under ThreadSanitizer */
    EXPECT(pthread_create(&forker, NULL, fork_between_loops, NULL) == 0);
    pthread_join(forker, NULL);
    for (intptr_t i = 0; i < CALLERS; i++)
        EXPECT(pthread_create(&callers[i], NULL, call_loops, (void *)(i + 1)) == 0);
    check_copies();
    check_slow_worker();
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
    EXPECT(live_errors == 0);
    return 0;
}
