/* Tables of an executable, which standalone.py writes and standalone.c reads. */
#define RH_DECLARATIONS_ONLY
#include <relax_hetero.h>
#include <stdbool.h>

struct entry { /* of an address table: a kernel, or the number of a constant */
    const char *kernel;
    int32_t constant;
};

struct region { /* a command buffer that runs as a CUDA graph, and its words (artifact/graph_layout.py) */
    const char *name;
    int32_t slots, parameters;
    int32_t slow_bindings, slow_parameters, graph_cache, ring, state_words, table_words, plan_constants;
    int32_t constants;
    int64_t arena_bytes;
    int64_t (*arena)(const int64_t *parameters); /* bytes that parameters determine; null: arena_bytes */
    bool has_mailboxes;
};

struct constant {
    DLDataType dtype;
    int32_t device;
    int32_t ndim;
    const int64_t *shape;
    int64_t offset; /* in bytes from the first weight */
    int64_t nbytes;
    const struct entry *table;
    int32_t entries;
    const struct region *region; /* whose state it stands for, or null */
    bool is_record;              /* whether it stands for the error record of a GPU */
    int64_t mailbox;             /* position among the mailboxes of the one that it stands for; -1 for others */
};

struct bound { /* upper bound of a symbolic size, which an input determines */
    int32_t function, input, axis;
    int64_t maximum;
    const char *name;
};

struct gpu_code {
    int32_t device;
    const char *arch; /* "sm_90a" */
    int32_t major, minor;
    bool is_exact; /* for this compute capability alone */
};

extern const struct constant rh_constants[];
extern const int32_t rh_num_constants;
extern const int64_t rh_alignment; /* of arguments, in bytes */
extern const int32_t rh_width;     /* number of threads that kernels were compiled for; 0: all */
extern const rh_file_info rh_info;
extern const struct bound rh_bounds[];
extern const int32_t rh_num_bounds;
extern const struct gpu_code rh_gpu_codes[];
extern const int32_t rh_num_gpu_codes;
extern const int64_t rh_check_keys[]; /* of rh_info.checks, in error records */
extern const int64_t rh_mailboxes[];  /* position of each mailbox, in bytes */
extern const int32_t rh_sve_bytes; /* of the vectors of SVE that kernels were compiled for, or 0 */
extern const int32_t rh_num_mailboxes;
extern const int64_t rh_mailbox_bytes;

/* Integer division as Python's, for sizes. */
static inline int64_t rh_floordiv(int64_t a, int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t rh_floormod(int64_t a, int64_t b) {
    return a - rh_floordiv(a, b) * b;
}

static inline int64_t rh_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t rh_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}
