/* relax_hetero: models that `Executable.export_library` has written, in C, without Python.
 *
 *     rh_model *model = rh_load("model.so", NULL, 0);
 *     rh_tensor *x = rh_tensor_new(...), *y;
 *     if (model == NULL || rh_call(model, rh_find(model, "main"), &x, 1, &y, 1) < 0)
 *         fprintf(stderr, "%s\n", rh_error());
 *
 * The functions are defined here; a program links libtvm_runtime.so and libtvm_ffi.so. They are a convenience: each
 * file is also a module of TVM, whose functions TVM's virtual machine calls with the model's inputs.
 */
#ifndef RELAX_HETERO_H_
#define RELAX_HETERO_H_

#include <stdint.h>
#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RH_ABI 1 /* of the structures below: a file of another version is refused */

typedef enum { RH_TENSOR, RH_SHAPE, RH_SCALAR, RH_TUPLE, RH_OBJECT } rh_kind;

enum {
    RH_DONATED = 1,     /* the call consumes the argument: results may use its memory */
    RH_HAS_DEFAULT = 2, /* NULL stands for a value in the file */
    RH_COPIED = 4,      /* the call copies the argument first, because it writes to it */
    RH_STRING = 8,      /* codes of strings */
};

/* An input or a result. */
typedef struct {
    const char *name;
    const char *type; /* for people: "float32[n, 384]" */
    rh_kind kind;
    int32_t device; /* index in rh_file_info.devices; -1: the host */
    DLDataType dtype; /* of a tensor; 0 bits: any */
    int32_t ndim;   /* of a tensor; -1: any */
    const int64_t *shape; /* -1 for extents that calls choose; null if the rank is unknown */
    uint32_t flags;
    int32_t default_constant;
} rh_value_info;

typedef struct {
    const char *name;
    int32_t num_inputs, num_outputs;
    int32_t output_is_tuple;
    const rh_value_info *inputs, *outputs;
} rh_function_info;

typedef struct {
    const char *name; /* "llvm:0" */
    DLDevice device;  /* unless the program chooses another of this type */
} rh_device_info;

/* Contents of a file. */
typedef struct {
    int32_t abi;
    int32_t num_devices; /* of TVM's virtual machine */
    int32_t host;        /* index of the CPU that reads shapes and conditions */
    int32_t num_functions;
    const rh_device_info *devices;
    const rh_function_info *functions;
} rh_file_info;

#ifdef __cplusplus
}
#endif
#endif
