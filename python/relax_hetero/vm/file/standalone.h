/* Tables of an executable, which standalone.py writes and standalone.c reads. */
#define RH_DECLARATIONS_ONLY
#include <relax_hetero.h>

struct entry { /* of an address table: a kernel, or the number of a constant */
    const char *kernel;
    int32_t constant;
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
    const char *unsupported; /* why only Python can make it, or null */
};

extern const struct constant rh_constants[];
extern const int32_t rh_num_constants;
extern const int64_t rh_alignment; /* of arguments, in bytes */
extern const int32_t rh_width;     /* number of threads that kernels were compiled for; 0: all */
extern const rh_file_info rh_info;
