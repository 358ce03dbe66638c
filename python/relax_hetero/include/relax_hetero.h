/* relax_hetero: models that `Executable.export_library` has written, in C and without Python.
 *
 *     rh_model *model = rh_load("model.so", NULL, 0);
 *     if (model == NULL)
 *         return fprintf(stderr, "%s\n", rh_error()), 1;
 *     int64_t shape[] = {1, 10};
 *     rh_tensor *x = rh_tensor_new(rh_float32, 2, shape, (DLDevice){kDLCPU, 0}), *y = NULL;
 *     ... fill rh_tensor_data(x) ...
 *     if (rh_run(model, rh_find(model, "main"), &x, 1, &y, 1) < 0)
 *         fprintf(stderr, "%s\n", rh_error());
 *     rh_tensor_free(x), rh_tensor_free(y), rh_free(model);
 *
 * The functions are defined here; a program links libtvm_runtime.so and libtvm_ffi.so (`relax-hetero config` prints the
 * options). They are a convenience: each file is also a module of TVM, whose functions take the model's inputs.
 *
 * Functions that can fail return NULL or a negative number, and rh_error() then says why. A model runs one call at a
 * time; load it again for another thread, which shares code and weights; both stay in memory until the program
 * ends. TVM_NUM_THREADS limits the threads of a call.
 */
#ifndef RELAX_HETERO_H_
#define RELAX_HETERO_H_

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RH_ABI 2 /* version of the structures and functions that files contain */
#define RH_REFUSED "relax_hetero refuses a value:" /* begin of the errors of checks in kernels */

typedef enum { RH_TENSOR, RH_SHAPE, RH_SCALAR, RH_TUPLE, RH_OBJECT } rh_kind;

enum {
    RH_DONATED = 1,     /* the call consumes the argument: results may use its memory */
    RH_HAS_DEFAULT = 2, /* NULL stands for a value in the file */
    RH_COPIED = 4,      /* the call writes to a copy of the argument */
    RH_STRING = 8,      /* codes of strings, which Python translates */
};

/* An input or a result of a function. */
typedef struct {
    const char *name;
    const char *type; /* for people: "float32[n, 384]" */
    rh_kind kind;
    int32_t device;       /* of a tensor: index in rh_file_info.devices; -1: the host */
    DLDataType dtype;     /* of a tensor; 0 bits: any */
    int32_t ndim;         /* of a tensor; -1: any */
    const int64_t *shape; /* of a tensor; -1 stands for an extent that calls choose; NULL if extents are unknown */
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
    DLDevice device;  /* that is used unless the program chooses another of its type */
} rh_device_info;

/* A check of kernels, of indices, values or divisors. */
typedef struct {
    const char *subject, *where;
} rh_check_info;

/* Contents of a file. */
typedef struct {
    int32_t abi;
    int32_t num_devices; /* of TVM's virtual machine */
    int32_t host;        /* index of the CPU that reads shapes and conditions */
    int32_t num_functions;
    const rh_device_info *devices;
    const rh_function_info *functions;
    int32_t num_checks;
    const rh_check_info *checks;
} rh_file_info;

/* Write why a check has refused a value, which it expects from `first` to `end` - 1. */
static inline void rh_write_refusal(char *text, size_t bytes, const rh_check_info *check, long long found,
                                    long long first, long long end) {
    if (strcmp(check->subject, "size") == 0)
        snprintf(text, bytes, "%s is divided by a size that is 0", check->where);
    else if (strcmp(check->subject, "divisor") == 0)
        snprintf(text, bytes, "%s: an integer is divided by 0", check->where);
    else if (first < end)
        snprintf(text, bytes, "%s: %s %lld is out of range, expected %lld to %lld", check->where, check->subject, found,
                 first, end - 1);
    else
        snprintf(text, bytes, "%s: %s %lld is out of range, expected none, as the axis is empty", check->where,
                 check->subject, found);
}

#ifndef RH_DECLARATIONS_ONLY

#include <dlfcn.h>
#include <stdlib.h>

typedef struct rh_tensor rh_tensor; /* a reference to a tensor of TVM */

typedef struct {
    TVMFFIObjectHandle file, machine, release, abandon;
    TVMFFIObjectHandle *functions; /* as in info */
    const rh_file_info *info;
    DLDevice *devices;
} rh_model;

static const DLDataType rh_float32 = {kDLFloat, 32, 1}, rh_int64 = {kDLInt, 64, 1}, rh_int32 = {kDLInt, 32, 1};

__attribute__((weak)) __thread char rh_error_text[4096];

/* Why the last function of this thread failed. */
static inline const char *rh_error(void) {
    return rh_error_text;
}

static inline int rh_fail(const char *what, const char *why) {
    snprintf(rh_error_text, sizeof rh_error_text, "%s%s%s", what, *why ? ": " : "", why);
    return -1;
}

static inline int rh_fail_numbers(const char *where, const char *what, long long found, long long expected) {
    snprintf(rh_error_text, sizeof rh_error_text, "%s: found %lld %s, expected %lld", where, found, what, expected);
    return -1;
}

/* Take the error of a failed function of TVM. */
static inline int rh_take_error(const char *what) {
    TVMFFIObjectHandle error = NULL;
    TVMFFIErrorMoveFromRaised(&error);
    if (error == NULL)
        return rh_fail(what, "failed");
    const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
    snprintf(rh_error_text, sizeof rh_error_text, "%s%s%.*s", what, *what ? ": " : "", (int)cell->message.size,
             cell->message.data);
    TVMFFIObjectDecRef(error);
    return -1;
}

static inline TVMFFIAny rh_any(int32_t type, int64_t value) {
    TVMFFIAny any;
    memset(&any, 0, sizeof any);
    any.type_index = type;
    any.v_int64 = value;
    return any;
}

static inline TVMFFIAny rh_object(const void *object, int32_t type) {
    return rh_any(object == NULL ? kTVMFFINone : type, (int64_t)(intptr_t)object);
}

/* Release a value that a function has returned. */
static inline void rh_drop(TVMFFIAny value) {
    if (value.type_index >= kTVMFFIStaticObjectBegin)
        TVMFFIObjectDecRef(value.v_obj);
}

/* Call a global function of TVM; `what` begins messages. */
static inline int rh_call_global(const char *name, TVMFFIAny *args, int32_t count, TVMFFIAny *result,
                                 const char *what) {
    TVMFFIByteArray text = {name, strlen(name)};
    TVMFFIObjectHandle function = NULL;
    *result = rh_any(kTVMFFINone, 0);
    if (TVMFFIFunctionGetGlobal(&text, &function) != 0)
        return rh_take_error(what);
    if (function == NULL)
        return rh_fail(name, "not defined, expected a program that links libtvm_runtime.so");
    int status = TVMFFIFunctionCall(function, args, count, result);
    TVMFFIObjectDecRef(function);
    return status == 0 ? 0 : rh_take_error(what);
}

/* A function of a module; NULL if there is none. */
static inline TVMFFIObjectHandle rh_function(TVMFFIObjectHandle module, const char *name, const char *what) {
    TVMFFIAny args[3] = {rh_object(module, kTVMFFIModule), rh_any(kTVMFFIRawStr, (int64_t)(intptr_t)name),
                         rh_any(kTVMFFIBool, 1)};
    TVMFFIAny result;
    if (rh_call_global("ffi.ModuleGetFunction", args, 3, &result, what) != 0)
        return NULL;
    if (result.type_index != kTVMFFIFunction)
        return rh_fail(what, "not a file of Executable.export_library that runs without Python"), (void *)NULL;
    return result.v_obj;
}

static inline int rh_call_method(TVMFFIObjectHandle module, const char *name, TVMFFIAny *args, int32_t count,
                                 TVMFFIAny *result, const char *what) {
    TVMFFIObjectHandle function = rh_function(module, name, what);
    *result = rh_any(kTVMFFINone, 0);
    if (function == NULL)
        return -1;
    int status = TVMFFIFunctionCall(function, args, count, result);
    TVMFFIObjectDecRef(function);
    return status == 0 ? 0 : rh_take_error(what);
}

static inline void rh_free(rh_model *model) {
    if (model == NULL)
        return;
    for (int32_t i = 0; model->functions != NULL && i < model->info->num_functions; i++)
        if (model->functions[i] != NULL)
            TVMFFIObjectDecRef(model->functions[i]);
    /* Not the file: its code keeps pointers to kernels of a GPU that it has found in the module loaded last. */
    TVMFFIObjectHandle objects[3] = {model->release, model->abandon, model->machine};
    for (int32_t i = 0; i < 3; i++)
        if (objects[i] != NULL)
            TVMFFIObjectDecRef(objects[i]);
    free(model->functions);
    free(model->devices);
    free(model);
}

/* Make TVM's virtual machine for the model's devices. */
static inline int rh_start(rh_model *model, const char *path, const DLDevice *devices, int32_t count) {
    char *file = (char *)malloc(strlen(path) + 3);
    if (file == NULL)
        return rh_fail(path, "no memory");
    /* A name without a folder would be looked up among the libraries of the system. */
    sprintf(file, "%s%s", strchr(path, '/') == NULL ? "./" : "", path);
    TVMFFIAny result, name = rh_any(kTVMFFIRawStr, (int64_t)(intptr_t)file);
    dlopen("libtvm_runtime_extra.so", RTLD_LAZY | RTLD_GLOBAL); /* some models call functions of it */
    int loaded = rh_call_global("ffi.ModuleLoadFromFile", &name, 1, &result, path);
    free(file);
    if (loaded != 0) {
        if (strstr(rh_error_text, "load_from_bytes.cuda") != NULL)
            return rh_fail(path, "runs on a GPU, expected libtvm_runtime_cuda.so of TVM, libcudart.so.13 and NVIDIA's "
                                 "driver (libcuda.so.1) where the dynamic loader finds them");
        return -1;
    }
    model->file = result.v_obj;
    if (rh_call_method(model->file, "relax_hetero.describe", NULL, 0, &result, path) != 0)
        return -1;
    const rh_file_info *info = (const rh_file_info *)result.v_ptr;
    if (info->abi != RH_ABI)
        return rh_fail(path, "made by another version of relax_hetero than relax_hetero.h: export it again");
    model->info = info;
    if (count != 0 && count != info->num_devices)
        return rh_fail_numbers(path, "devices (0: those of the file)", count, info->num_devices);
    model->functions = (TVMFFIObjectHandle *)calloc((size_t)info->num_functions + 1, sizeof *model->functions);
    model->devices = (DLDevice *)calloc((size_t)info->num_devices, sizeof *model->devices);
    TVMFFIAny *args = (TVMFFIAny *)calloc((size_t)info->num_devices + 1, 3 * sizeof *args);
    if (model->functions == NULL || model->devices == NULL || args == NULL)
        return free(args), rh_fail(path, "no memory");
    for (int32_t i = 0; i <= info->num_devices; i++) { /* the host once more, as the last */
        int32_t index = i < info->num_devices ? i : info->host;
        DLDevice device = count != 0 ? devices[index] : info->devices[index].device;
        if (device.device_type != info->devices[index].device.device_type)
            return free(args), rh_fail_numbers(path, "as the type of a device", device.device_type,
                                               info->devices[index].device.device_type);
        model->devices[index] = device;
        args[3 * i] = rh_any(kTVMFFIInt, device.device_type);
        args[3 * i + 1] = rh_any(kTVMFFIInt, device.device_id);
        args[3 * i + 2] = rh_any(kTVMFFIInt, 2); /* memory from pools */
    }
    int status = rh_call_method(model->file, "vm_load_executable", NULL, 0, &result, path);
    if (status == 0) {
        model->machine = result.v_obj;
        status = rh_call_method(model->machine, "vm_initialization", args, 3 * (info->num_devices + 1), &result, path);
    }
    free(args);
    if (status != 0 && strstr(rh_error_text, "Cannot find ffi::Function") != NULL)
        strncat(rh_error_text, "; a function of relax_hetero or relax.run that files lack needs Python",
                sizeof rh_error_text - strlen(rh_error_text) - 1);
    for (int32_t i = 0; status == 0 && i < info->num_functions; i++)
        if ((model->functions[i] = rh_function(model->machine, info->functions[i].name, path)) == NULL)
            status = -1;
    if (status == 0 && ((model->release = rh_function(model->machine, "relax_hetero.release_result", path)) == NULL ||
                        (model->abandon = rh_function(model->file, "relax_hetero.abandon", path)) == NULL))
        status = -1;
    return status;
}

/* Load a file, whose name ends with .so, and make a machine for it: on the devices of the file, or on one of the same
 * type for each of them. NULL on errors. Loading a file runs its code. */
static inline rh_model *rh_load(const char *path, const DLDevice *devices, int32_t num_devices) {
    rh_model *model = (rh_model *)calloc(1, sizeof *model);
    if (model == NULL)
        return rh_fail(path, "no memory"), (rh_model *)NULL;
    if (rh_start(model, path, devices, num_devices) != 0)
        return rh_free(model), (rh_model *)NULL;
    return model;
}

/* The function of a name; NULL if there is none. */
static inline const rh_function_info *rh_find(const rh_model *model, const char *name) {
    for (int32_t i = 0; i < model->info->num_functions; i++)
        if (strcmp(model->info->functions[i].name, name) == 0)
            return &model->info->functions[i];
    rh_fail(name, "no function of the model has this name, expected one of");
    for (int32_t i = 0; i < model->info->num_functions; i++) {
        strncat(rh_error_text, i ? ", " : " ", sizeof rh_error_text - strlen(rh_error_text) - 1);
        strncat(rh_error_text, model->info->functions[i].name, sizeof rh_error_text - strlen(rh_error_text) - 1);
    }
    return NULL;
}

/* The device of an input or a result. */
static inline DLDevice rh_device_of(const rh_model *model, const rh_value_info *value) {
    return model->devices[value->device < 0 ? model->info->host : value->device];
}

/* Replace the text of a kernel's refusal by what its check says. */
static inline int rh_explain_refusal(const rh_file_info *info) {
    const char *text = strstr(rh_error_text, RH_REFUSED);
    long long check, found, first, end;
    if (text == NULL || sscanf(text + strlen(RH_REFUSED), " check %lld, found %lld, expected %lld to %lld", &check,
                               &found, &first, &end) != 4 || check < 0 || check >= info->num_checks)
        return -1;
    rh_write_refusal(rh_error_text, sizeof rh_error_text, &info->checks[check], found, first, end);
    return -1;
}

/* Call a function with any values of TVM; the caller releases the result (rh_drop). 0, or -1 on errors. */
static inline int rh_call(rh_model *model, const rh_function_info *function, const TVMFFIAny *args, int32_t num_args,
                          TVMFFIAny *result) {
    TVMFFIAny released = rh_any(kTVMFFINone, 0);
    *result = rh_any(kTVMFFINone, 0);
    if (function == NULL)
        return -1;
    TVMFFIObjectHandle code = model->functions[function - model->info->functions];
    if (TVMFFIFunctionCall(code, (TVMFFIAny *)args, num_args, result) != 0) {
        rh_take_error("");
        TVMFFIFunctionCall(model->abandon, NULL, 0, &released);
        return rh_explain_refusal(model->info);
    }
    /* TVM's machine refers to the result until its next function ends: then that could not use the same memory. */
    return TVMFFIFunctionCall(model->release, NULL, 0, &released) == 0 ? 0 : rh_take_error("");
}

/* ---- Tensors ---- */

static inline void rh_tensor_free(rh_tensor *tensor) {
    if (tensor != NULL)
        TVMFFIObjectDecRef((TVMFFIObjectHandle)tensor);
}

static inline DLTensor *rh_tensor_dl(const rh_tensor *tensor) {
    return (DLTensor *)((char *)tensor + sizeof(TVMFFIObject));
}

/* The address of the elements; on a device of another type than kDLCPU it is that device's. */
static inline void *rh_tensor_data(const rh_tensor *tensor) {
    return (char *)rh_tensor_dl(tensor)->data + rh_tensor_dl(tensor)->byte_offset;
}

static inline size_t rh_tensor_bytes(const rh_tensor *tensor) {
    const DLTensor *dl = rh_tensor_dl(tensor);
    int64_t bits = (int64_t)dl->dtype.bits * dl->dtype.lanes;
    for (int32_t i = 0; i < dl->ndim; i++)
        bits *= dl->shape[i];
    return (size_t)(bits + 7) / 8;
}

/* A new tensor with undefined elements; NULL on errors. */
static inline rh_tensor *rh_tensor_new(DLDataType dtype, int32_t ndim, const int64_t *shape, DLDevice device) {
    TVMFFIAny *extents = (TVMFFIAny *)calloc((size_t)ndim + 1, sizeof *extents), args[4], result;
    if (extents == NULL)
        return rh_fail("rh_tensor_new", "no memory"), (rh_tensor *)NULL;
    for (int32_t i = 0; i < ndim; i++)
        extents[i] = rh_any(kTVMFFIInt, shape[i]);
    int status = rh_call_global("ffi.Shape", extents, ndim, &args[0], "rh_tensor_new");
    free(extents);
    if (status != 0)
        return NULL;
    args[1] = rh_any(kTVMFFIDataType, 0), args[1].v_dtype = dtype;
    args[2] = rh_any(kTVMFFIDevice, 0), args[2].v_device = device;
    args[3] = rh_any(kTVMFFINone, 0);
    status = rh_call_global("runtime.TVMTensorAllocWithScope", args, 4, &result, "rh_tensor_new");
    rh_drop(args[0]);
    return status == 0 ? (rh_tensor *)result.v_ptr : NULL;
}

/* Copy `bytes` bytes, all of the tensor's, from or to memory of the program. 0, or -1 on errors. */
static inline int rh_tensor_write(rh_tensor *tensor, const void *data, size_t bytes) {
    TVMFFIAny result, args[3] = {rh_object(tensor, kTVMFFITensor), rh_object(data, kTVMFFIOpaquePtr),
                                 rh_any(kTVMFFIInt, (int64_t)bytes)};
    if (bytes != rh_tensor_bytes(tensor))
        return rh_fail_numbers("rh_tensor_write", "bytes", (long long)bytes, (long long)rh_tensor_bytes(tensor));
    return rh_call_global("runtime.TVMTensorCopyFromBytes", args, 3, &result, "rh_tensor_write");
}

static inline int rh_tensor_read(const rh_tensor *tensor, void *data, size_t bytes) {
    TVMFFIAny result, args[3] = {rh_object(tensor, kTVMFFITensor), rh_object(data, kTVMFFIOpaquePtr),
                                 rh_any(kTVMFFIInt, (int64_t)bytes)};
    if (bytes != rh_tensor_bytes(tensor))
        return rh_fail_numbers("rh_tensor_read", "bytes", (long long)bytes, (long long)rh_tensor_bytes(tensor));
    if (rh_call_global("runtime.TVMTensorCopyToBytes", args, 3, &result, "rh_tensor_read") != 0)
        return -1;
    /* Files for GPUs define this function, for values that kernels have refused meanwhile. */
    TVMFFIByteArray name = {"relax_hetero.raise_reported", strlen("relax_hetero.raise_reported")};
    TVMFFIObjectHandle function = NULL;
    if (rh_tensor_dl(tensor)->device.device_type != kDLCUDA || TVMFFIFunctionGetGlobal(&name, &function) != 0 ||
        function == NULL)
        return 0;
    args[0] = rh_any(kTVMFFIInt, rh_tensor_dl(tensor)->device.device_id);
    int status = TVMFFIFunctionCall(function, args, 1, &result);
    TVMFFIObjectDecRef(function);
    return status == 0 ? 0 : rh_take_error("");
}

/* Call a function of tensors that returns a tensor or a tuple of tensors; NULL stands for a default value. Returns the
 * number of results, which the caller frees, or -1 on errors. */
static inline int32_t rh_run(rh_model *model, const rh_function_info *function, rh_tensor *const *inputs,
                             int32_t num_inputs, rh_tensor **outputs, int32_t num_outputs) {
    TVMFFIAny few[16], *args = num_inputs <= 16 ? few : (TVMFFIAny *)calloc((size_t)num_inputs, sizeof *args), result;
    if (args == NULL)
        return rh_fail("rh_run", "no memory");
    for (int32_t i = 0; i < num_inputs; i++)
        args[i] = rh_object(inputs[i], kTVMFFITensor);
    int status = rh_call(model, function, args, num_inputs, &result);
    if (args != few)
        free(args);
    if (status != 0)
        return -1;
    const TVMFFIAny *fields = &result;
    int64_t count = 1;
    if (result.type_index == kTVMFFIArray) {
        const TVMFFISeqCell *cell = (const TVMFFISeqCell *)((const char *)result.v_obj + sizeof(TVMFFIObject));
        fields = (const TVMFFIAny *)cell->data, count = cell->size;
    }
    for (int64_t i = 0; i < count && status == 0; i++)
        if (count > num_outputs || fields[i].type_index != kTVMFFITensor)
            status = rh_fail(function->name, "rh_run takes room for each result, which are tensors; else use rh_call");
    for (int64_t i = 0; i < count && status == 0; i++) {
        TVMFFIObjectIncRef(fields[i].v_obj);
        outputs[i] = (rh_tensor *)fields[i].v_obj;
    }
    rh_drop(result);
    return status == 0 ? (int32_t)count : -1;
}

#endif /* RH_DECLARATIONS_ONLY */

#ifdef __cplusplus
}
#endif
#endif
