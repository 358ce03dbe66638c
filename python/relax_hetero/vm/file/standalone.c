/* Run-time part of exported files, which need no Python: constants, checks of arguments, transfers, worker threads.
 *
 * `Executable.export_library` compiles this file with the description of an executable (standalone.py), and links both
 * with its kernels. TVM's virtual machine looks up packed functions in the file first, so the functions at the end
 * of this file serve its bytecode. The entry of a function (driver/link/entries.py) calls `enter`, which checks
 * the arguments and returns the tuple of constants, and at last `leave`.
 *
 * rh.vm.VirtualMachine does not call entries: in calls of Python `machine` is null, and the functions that this
 * library also defines in Python pass on to those.
 *
 * Functions of TVM-FFI are looked up when the file is loaded, as programs may load their library locally.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tvm/ffi/extra/c_env_api.h>

#include "standalone.h"

/* ---- TVM-FFI ---- */

#define FFI_FUNCTIONS(F)                                                                                              \
    F(FunctionGetGlobal)                                                                                               \
    F(FunctionCreate)                                                                                                  \
    F(FunctionSetGlobal)                                                                                               \
    F(FunctionCall)                                                                                                    \
    F(ObjectIncRef)                                                                                                    \
    F(ObjectDecRef)                                                                                                    \
    F(ErrorMoveFromRaised)                                                                                             \
    F(ErrorSetRaised)                                                                                                  \
    F(ErrorSetRaisedFromCStr)                                                                                          \
    F(TensorFromDLPack)                                                                                                \
    F(TensorCreateUnsafeView)                                                                                          \
    F(DataTypeFromString)                                                                                             \
    F(EnvGetStream)                                                                                                    \
    F(EnvSetStream)

static struct {
#define F(name) __typeof__(&TVMFFI##name) name;
    FFI_FUNCTIONS(F)
#undef F
} ffi;

static const char *path; /* of this file, with its identity when it was loaded */
static struct stat identity;
static void *library;

/* Load TVM's CUDA runtime, which must define its loader of kernels before TVM reads this file's, and the library that
 * it needs: beside TVM's runtime, in pip's packages or where the system finds libraries. */
static void load_cuda_runtime(void) {
    static const char *const names[] = {"libcudart.so.13", "libtvm_runtime_cuda.so"};
    static const char *const folders[] = {"%s/%s", "%s/../../nvidia/cu13/lib/%s", "%.0s%s"};
    void *runtime = dlopen("libtvm_runtime.so", RTLD_LAZY | RTLD_NOLOAD);
    struct link_map *map = NULL;
    if (runtime == NULL || dlinfo(runtime, RTLD_DI_LINKMAP, &map) != 0)
        return;
    const char *end = strrchr(map->l_name, '/');
    for (int i = 0; i < 2; i++) {
        bool is_loaded = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD) != NULL;
        for (int k = 0; k < 3 && !is_loaded; k++) {
            char folder[4096], name[4352];
            snprintf(folder, sizeof folder, "%.*s", end == NULL ? 0 : (int)(end - map->l_name), map->l_name);
            snprintf(name, sizeof name, folders[k], folder, names[i]);
            is_loaded = dlopen(name, RTLD_LAZY) != NULL;
        }
    }
}

__attribute__((constructor)) static void on_load(void) {
    void *tvm_ffi = dlopen("libtvm_ffi.so", RTLD_LAZY | RTLD_NOLOAD);
#define F(name) ffi.name = (__typeof__(ffi.name))dlsym(tvm_ffi != NULL ? tvm_ffi : RTLD_DEFAULT, "TVMFFI" #name);
    FFI_FUNCTIONS(F)
#undef F
    Dl_info place;
    if (dladdr(&ffi, &place) != 0 && place.dli_fname != NULL && stat(place.dli_fname, &identity) == 0)
        path = realpath(place.dli_fname, NULL);
    for (int32_t i = 0; i < rh_info.num_devices; i++)
        if (rh_info.devices[i].device.device_type == kDLCUDA) {
            load_cuda_runtime();
            break;
        }
}

#define FAIL(...) return fail("ValueError", __VA_ARGS__)

static int fail(const char *kind, const char *format, ...) {
    char text[2048];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    ffi.ErrorSetRaisedFromCStr(kind, text);
    return -1;
}

static TVMFFIAny integer(int64_t value) {
    return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value};
}

static TVMFFIAny none(void) {
    return (TVMFFIAny){.type_index = kTVMFFINone};
}

static TVMFFIAny object(void *handle, int32_t type) {
    return (TVMFFIAny){.type_index = type, .v_obj = handle};
}

static bool is_object(TVMFFIAny value) {
    return value.type_index >= kTVMFFIStaticObjectBegin;
}

/* A new reference, as results of packed functions are. */
static TVMFFIAny shared(TVMFFIAny value) {
    if (is_object(value))
        ffi.ObjectIncRef(value.v_obj);
    return value;
}

static void drop(TVMFFIAny value) {
    if (is_object(value))
        ffi.ObjectDecRef(value.v_obj);
}

/* Fields after the header of an object, if it is of a type; else null. */
static const void *content(TVMFFIAny value, int32_t type) {
    return value.type_index == type ? (const char *)value.v_obj + sizeof(TVMFFIObject) : NULL;
}

static const DLTensor *tensor_of(TVMFFIAny value) {
    return content(value, kTVMFFITensor);
}

static const TVMFFISeqCell *fields_of(TVMFFIAny value) {
    return content(value, kTVMFFIArray);
}

static const char *text_of(const TVMFFIAny *value) {
    if (value->type_index == kTVMFFISmallStr)
        return value->v_bytes;
    if (value->type_index == kTVMFFIRawStr)
        return value->v_c_str;
    const TVMFFIByteArray *bytes = content(*value, kTVMFFIStr);
    return bytes != NULL ? bytes->data : "?";
}

/* Call a global function. */
static int call_global(const char *name, TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    TVMFFIByteArray text = {name, strlen(name)};
    TVMFFIObjectHandle function = NULL;
    if (ffi.FunctionGetGlobal(&text, &function) != 0)
        return -1;
    if (function == NULL)
        return fail("RuntimeError", "%s is not defined: expected libtvm_runtime.so to be loaded", name);
    *result = none();
    int status = ffi.FunctionCall(function, args, count, result);
    ffi.ObjectDecRef(function);
    return status;
}

/* A packed function of this file, or null. */
static TVMFFISafeCallType own_function(const char *prefix, const char *name) {
    char symbol[1024];
    snprintf(symbol, sizeof symbol, "__tvm_ffi_%s%s", prefix, name);
    return (TVMFFISafeCallType)dlsym(library, symbol);
}

/* The integer that such a function without parameters returns, or 0. */
static int64_t call_own(const char *prefix, const char *name) {
    TVMFFISafeCallType function = own_function(prefix, name);
    TVMFFIAny result = none();
    return function != NULL && function(NULL, NULL, 0, &result) == 0 ? result.v_int64 : 0;
}

static int64_t bytes_of(const DLTensor *tensor) {
    int64_t bits = (int64_t)tensor->dtype.bits * tensor->dtype.lanes;
    for (int32_t i = 0; i < tensor->ndim; i++)
        bits *= tensor->shape[i];
    return (bits + 7) / 8;
}

static char *address_of(const DLTensor *tensor) {
    return (char *)tensor->data + tensor->byte_offset;
}

static bool same_device(DLDevice a, DLDevice b) {
    return a.device_type == b.device_type && a.device_id == b.device_id;
}

static bool is_host(DLDevice device) {
    return device.device_type == kDLCPU;
}

static bool is_contiguous(const DLTensor *tensor) {
    int64_t stride = 1;
    for (int32_t i = tensor->ndim - 1; tensor->strides != NULL && i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride)
            return false;
        stride *= tensor->shape[i];
    }
    return true;
}

static void free_tensor(DLManagedTensor *self) {
    free(self->dl_tensor.shape);
    free(self);
}

static const DLDataType int64_type = {kDLInt, 64, 1};

/* A tensor of memory that stays valid. */
static int wrap(void *data, DLDevice device, DLDataType dtype, int32_t ndim, const int64_t *shape, TVMFFIAny *result) {
    DLManagedTensor *managed = calloc(1, sizeof *managed);
    int64_t *extents = malloc((size_t)(ndim > 0 ? 2 * ndim : 1) * sizeof *extents), stride = 1;
    if (managed == NULL || extents == NULL)
        return fail("MemoryError", "no memory");
    for (int32_t i = ndim - 1; i >= 0; i--) {
        extents[i] = shape[i];
        extents[ndim + i] = stride;
        stride *= shape[i];
    }
    managed->dl_tensor = (DLTensor){data, device, ndim, dtype, extents, extents + ndim, 0};
    managed->deleter = free_tensor;
    TVMFFIObjectHandle handle = NULL;
    if (ffi.TensorFromDLPack(managed, 0, 0, &handle) != 0)
        return -1;
    *result = object(handle, kTVMFFITensor);
    return 0;
}

/* The same memory as a tensor of another device. */
static int alias(TVMFFIAny value, DLDevice device, TVMFFIAny *result) {
    DLTensor view = *tensor_of(value);
    view.device = device;
    TVMFFIObjectHandle handle = NULL;
    if (ffi.TensorCreateUnsafeView(value.v_obj, &view, &handle) != 0)
        return -1;
    *result = object(handle, kTVMFFITensor);
    return 0;
}

/* A new tensor; TVM's allocator aligns it. */
static int allocate(DLDevice device, DLDataType dtype, int32_t ndim, const int64_t *shape, TVMFFIAny *result) {
    TVMFFIAny extents[16] = {{0}}, dims = none();
    if (ndim > 16)
        FAIL("a tensor has %d dimensions, expected at most 16", ndim);
    for (int32_t i = 0; i < ndim; i++)
        extents[i] = integer(shape[i]);
    if (call_global("ffi.Shape", extents, ndim, &dims) != 0)
        return -1;
    TVMFFIAny args[] = {dims, {.type_index = kTVMFFIDataType, .v_dtype = dtype},
                        {.type_index = kTVMFFIDevice, .v_device = device}, none()};
    int status = call_global("runtime.TVMTensorAllocWithScope", args, 4, result);
    drop(dims);
    return status;
}

static int check_reported_values(void);

/* Copy between tensors of the same bytes; work on other devices continues after the return. */
static int copy(TVMFFIAny from, TVMFFIAny to) {
    const DLTensor *source = tensor_of(from), *target = tensor_of(to);
    if (is_host(source->device) && is_host(target->device)) {
        memcpy(address_of(target), address_of(source), (size_t)bytes_of(source));
        return 0;
    }
    TVMFFIAny args[] = {from, to}, result = none();
    if (call_global("runtime.TVMTensorCopyFromTo", args, 2, &result) != 0)
        return -1;
    return is_host(target->device) ? check_reported_values() : 0;
}

static int new_copy(TVMFFIAny value, DLDevice device, TVMFFIAny *result) {
    const DLTensor *tensor = tensor_of(value);
    if (allocate(device, tensor->dtype, tensor->ndim, tensor->shape, result) != 0)
        return -1;
    return copy(value, *result);
}

/* ---- Weights, which the file has after its code (artifact/container.py), mapped once. ---- */

enum { FOOTER_BYTES = 48, TRAILER_BYTES = RH_TRAILER_BYTES, WEIGHT_ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };

static char *weights, *weights_end;

/* The offset of the first weight, from the footer; 0 if there is none. */
static int64_t find_weights(const char *file, int64_t bytes) {
    for (int64_t end = bytes; end >= bytes - TRAILER_BYTES; end -= TRAILER_BYTES) {
        uint64_t library_end;
        const char *footer = file + end - FOOTER_BYTES;
        if (end >= FOOTER_BYTES && memcmp(footer, "rlxheter", 8) == 0) {
            memcpy(&library_end, footer + 20, 8);
            return (int64_t)(library_end + WEIGHT_ALIGNMENT - 1) / WEIGHT_ALIGNMENT * WEIGHT_ALIGNMENT;
        }
    }
    return 0;
}

/* Bytes of memory that are free, also by the limit of a container. */
static int64_t free_memory(void) {
    int64_t bytes = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE), numbers[2] = {0, 0};
    const char *const names[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"};
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(names[i], "re");
        if (file == NULL || fscanf(file, "%" SCNd64, &numbers[i]) != 1)
            numbers[0] = 0; /* "max", or no such limit */
        if (file != NULL)
            fclose(file);
    }
    return numbers[0] > 0 && numbers[0] - numbers[1] < bytes ? numbers[0] - numbers[1] : bytes;
}

/* A copy of many weights on huge pages, as vm/device/huge_pages.py makes; null if they stay in the mapped file. */
static char *copy_to_huge_pages(const char *data, int64_t bytes) {
    const char *setting = getenv("RELAX_HETERO_HUGE_PAGES");
    if (bytes < 16 << 20 || (setting != NULL && (strcmp(setting, "off") == 0 || strcmp(setting, "0") == 0)) ||
        free_memory() < 2 * bytes)
        return NULL;
    char *memory = mmap(NULL, (size_t)bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    memory += -(uintptr_t)memory % HUGE_PAGE;
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
    memcpy(memory, data, (size_t)bytes);
    mprotect(memory, (size_t)bytes, PROT_READ);
    return memory;
}

static int map_weights(void) {
    if (weights != NULL)
        return 0;
    struct stat now;
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &now) != 0)
        return fail("RuntimeError", "%s: the file with the weights of loaded code cannot be opened", path ? path : "?");
    bool is_same = now.st_dev == identity.st_dev && now.st_ino == identity.st_ino && now.st_size == identity.st_size;
    void *mapped = is_same ? mmap(NULL, (size_t)now.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    close(file);
    if (library == NULL)
        library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!is_same || library == NULL)
        return fail("RuntimeError", "%s was replaced after its code was loaded: load it again", path);
    if (mapped == MAP_FAILED)
        return fail("RuntimeError", "%s: its weights cannot be mapped", path);
    int64_t begin = find_weights(mapped, now.st_size);
    if (begin == 0)
        return fail("RuntimeError", "%s: found code without weights, expected a whole file of export_library", path);
    int64_t bytes = 0;
    for (int32_t i = 0; i < rh_num_constants; i++) {
        int64_t end = rh_constants[i].offset + rh_constants[i].nbytes;
        bytes = end > bytes ? end : bytes;
    }
    if (begin + bytes > now.st_size)
        return fail("RuntimeError", "%s: the file is truncated in its weights", path);
    char *copied = copy_to_huge_pages((char *)mapped + begin, bytes);
    weights = copied != NULL ? copied : (char *)mapped + begin;
    weights_end = weights + bytes;
    if (copied != NULL)
        munmap(mapped, (size_t)now.st_size);
    return 0;
}

/* ---- Machines: devices with their constants, which virtual machines on these devices share. ---- */

struct machine {
    struct machine *next;
    struct gpu *gpu; /* null without one */
    TVMFFIAny constants;
    DLDevice devices[];
};

static struct machine *machines;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct machine *machine; /* of this thread's call */

#include "standalone_cuda.c"

static int check_reported_values(void) {
    return machine != NULL && machine->gpu != NULL ? check_reported(machine->gpu) : 0;
}

static DLDevice device_at(const struct machine *each, int32_t index) {
    return each->devices[index < 0 ? rh_info.host : index];
}

static int place(const struct machine *each, int32_t index, TVMFFIAny *placed) {
    const struct constant *constant = &rh_constants[index];
    DLDevice device = device_at(each, constant->device), host = {kDLCPU, 0};
    if (constant->region != NULL || constant->is_record || constant->mailbox >= 0)
        return place_of_gpu(each->gpu, constant, device, placed, &placed[index]);
    void *data = weights + constant->offset;
    if (constant->table != NULL) {
        int64_t *table = data = aligned_alloc(WEIGHT_ALIGNMENT, ((size_t)constant->entries * 8 + 64) / 64 * 64);
        if (table == NULL)
            return fail("MemoryError", "no memory for a table of addresses");
        for (int32_t i = 0; i < constant->entries; i++) {
            const struct entry *entry = &constant->table[i];
            if (entry->kernel == NULL)
                table[i] = (intptr_t)address_of(tensor_of(placed[entry->constant]));
            else if ((table[i] = call_own(RH_ADDRESS, entry->kernel)) == 0)
                return fail("RuntimeError", "%s has no kernel %s", path, entry->kernel);
        }
    }
    if (is_host(device))
        return wrap(data, device, constant->dtype, constant->ndim, constant->shape, &placed[index]);
    TVMFFIAny original;
    if (wrap(data, host, constant->dtype, constant->ndim, constant->shape, &original) != 0)
        return -1;
    int status = new_copy(original, device, &placed[index]);
    drop(original);
    return status;
}

static int place_constants(struct machine *each) {
    TVMFFIAny *placed = calloc((size_t)rh_num_constants + 1, sizeof *placed);
    int status = placed == NULL ? fail("MemoryError", "no memory for constants") : 0;
    if (status == 0)
        status = make_gpu(each->devices, &each->gpu);
    /* Tables have addresses of other constants, and command buffers those of tables. */
    for (int32_t round = 0; round < 3; round++)
        for (int32_t i = 0; i < rh_num_constants && status == 0; i++)
            if ((rh_constants[i].region != NULL ? 2 : rh_constants[i].table != NULL) == round)
                status = place(each, i, placed);
    if (status == 0 && each->gpu != NULL)
        status = define_functions_of_gpus();
    if (status == 0)
        status = call_global("ffi.Array", placed, rh_num_constants, &each->constants);
    for (int32_t i = 0; i < rh_num_constants && placed != NULL; i++)
        drop(placed[i]);
    free(placed);
    return status;
}

/* ---- Worker threads (driver/link/threads/workers.c), started with the first machine. ---- */

/* The lowest CPU of the same core. */
static int32_t core_of(int32_t cpu) {
    char name[96];
    int32_t first = cpu;
    snprintf(name, sizeof name, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *file = fopen(name, "re");
    if (file == NULL)
        return cpu;
    if (fscanf(file, "%d", &first) != 1 || first < 0 || first >= CPU_SETSIZE)
        first = cpu;
    fclose(file);
    return first;
}

/* Whether a file with Linux' notation of a set of CPUs, such as 0-3,8, has one. */
static bool lists_cpu(const char *name, int32_t cpu) {
    FILE *file = fopen(name, "re");
    int first, last, next = ',';
    bool found = false;
    while (file != NULL && next == ',' && fscanf(file, "%d", &first) == 1) {
        last = first;
        next = fgetc(file);
        if (next == '-') {
            if (fscanf(file, "%d", &last) != 1)
                break;
            next = fgetc(file);
        }
        found = found || (first <= cpu && cpu <= last);
    }
    if (file != NULL)
        fclose(file);
    return found;
}

/* A key that cores of one speed share (target/cpu_cores.py). */
static int kind_of(int32_t cpu) {
    char name[96];
    int capacity = 0;
    if (lists_cpu("/sys/devices/cpu_core/cpus", cpu))
        return -1;
    if (lists_cpu("/sys/devices/cpu_atom/cpus", cpu))
        return -2;
    snprintf(name, sizeof name, "/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
    FILE *file = fopen(name, "re");
    if (file == NULL)
        return 0;
    if (fscanf(file, "%d", &capacity) != 1)
        capacity = 0;
    fclose(file);
    return capacity;
}

/* CPUs that a container may use; 0 without a quota. */
static int32_t cpu_quota(void) {
    double quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (file == NULL)
        return 0;
    if (fscanf(file, "%lf %lf", &quota, &period) != 2)
        quota = 0;
    fclose(file);
    return quota > 0 && period > 0 ? (int32_t)((quota + period - 1) / period) : 0;
}

static int32_t cores[CPU_SETSIZE];

/* Loops run on TVM's threads if there are no workers. */
static bool start_workers(void) {
    const char *bind = getenv("TVM_BIND_THREADS"), *text = getenv("TVM_NUM_THREADS");
    TVMFFISafeCallType start = own_function(RH_START, "");
    if (start == NULL || (bind != NULL && strcmp(bind, "1") == 0))
        return true;
    cpu_set_t allowed;
    bool is_counted[CPU_SETSIZE] = {false};
    int32_t num_cpus = 0, num_cores = 0, tasks = 1, first_kind = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return true;
    for (int32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        cores[cpu] = cpu;
        if (!CPU_ISSET(cpu, &allowed))
            continue;
        num_cpus = cpu + 1;
        cores[cpu] = core_of(cpu);
        if (num_cores == 0)
            first_kind = kind_of(cpu);
        else if (kind_of(cpu) != first_kind)
            tasks = RH_TASKS_OF_UNLIKE_CORES;
        num_cores += !is_counted[cores[cpu]];
        is_counted[cores[cpu]] = true;
    }
    int32_t quota = cpu_quota(), threads = num_cores;
    if (quota > 0 && quota < threads)
        threads = quota;
    if (rh_width > 0 && rh_width < threads)
        threads = rh_width;
    if (text == NULL)
        text = getenv("OMP_NUM_THREADS");
    if (text != NULL && atoi(text) > 0)
        threads = atoi(text);
    if (threads > RH_MAX_THREADS)
        threads = RH_MAX_THREADS;
    TVMFFIAny args[] = {integer((intptr_t)ffi.ErrorMoveFromRaised), integer((intptr_t)ffi.ErrorSetRaised),
                        integer((intptr_t)ffi.ObjectDecRef), integer(threads > 0 ? threads : 1),
                        integer(RH_SPIN_NANOSECONDS), integer((intptr_t)cores), integer(num_cpus), integer(tasks)};
    TVMFFIAny result = none();
    if (start(NULL, args, 8, &result) != 0 || result.v_int64 != 0)
        return true;
    TVMFFIAny address = integer(call_own(RH_LAUNCH, ""));
    for (int32_t i = 0;; i++) {
        char number[16];
        snprintf(number, sizeof number, "%d", i);
        TVMFFISafeCallType set = own_function(RH_LAUNCH_SETTER, number);
        if (set == NULL)
            return true;
        set(NULL, &address, 1, &result);
    }
}

/* ---- Refusals, which kernels call by global names ---- */

/* An index, a value or a divisor: relax_hetero.h replaces the number of the check by its text. */
static int refuse(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    FAIL(RH_REFUSED " check %lld, found %lld, expected %lld to %lld", (long long)args[0].v_int64,
         (long long)args[1].v_int64, (long long)args[2].v_int64, (long long)args[3].v_int64);
}

/* Names and values of sizes, of a call that they make impossible; a name may be followed by " is" and its origin. */
static void write_sizes(char *text, size_t bytes, const TVMFFIAny *sizes, int32_t count) {
    int used = text[0] = 0;
    for (int32_t i = 0; i + 1 < count && used < (int)bytes - 80; i += 2) {
        const char *name = text_of(&sizes[i]), *end = strstr(name, " is ");
        used += snprintf(text + used, bytes - (size_t)used, "%s%.*s = %lld", i ? ", " : " (",
                         end == NULL ? 50 : (int)(end - name), name, (long long)sizes[i + 1].v_int64);
    }
    if (used > 0)
        snprintf(text + used, bytes - (size_t)used, ")");
}

static int refuse_sizes(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    char sizes[512];
    write_sizes(sizes, sizeof sizes, args + 2, count - 2);
    FAIL("function '%s': %s%s", text_of(&args[0]), text_of(&args[1]), sizes);
}

static int refuse_bytes(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    double needed = args[2].type_index == kTVMFFIFloat ? args[2].v_float64 : (double)args[2].v_int64;
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    char sizes[512];
    *result = none();
    if (needed <= memory)
        return 0;
    write_sizes(sizes, sizeof sizes, args + 3, count - 3);
    return fail("MemoryError", "function '%s': %s takes %.0f bytes, found %.0f bytes of memory%s", text_of(&args[0]),
                text_of(&args[1]), needed, memory, sizes);
}

/* Define them, unless Python or a file that was loaded before has. */
static bool define_refusals(void) {
    const char *const names[] = {"relax_hetero.refuse", "relax_hetero.refuse_sizes", "relax_hetero.refuse_bytes"};
    const TVMFFISafeCallType functions[] = {refuse, refuse_sizes, refuse_bytes};
    for (int i = 0; i < 3; i++) {
        TVMFFIByteArray name = {names[i], strlen(names[i])};
        TVMFFIObjectHandle function = NULL;
        if (ffi.FunctionGetGlobal(&name, &function) != 0)
            return false;
        if (function == NULL && (ffi.FunctionCreate(NULL, functions[i], NULL, &function) != 0 ||
                                 ffi.FunctionSetGlobal(&name, function, 0) != 0))
            return false;
        ffi.ObjectDecRef(function);
    }
    return true;
}

/* With another length kernels would read and write other addresses. */
static int check_vectors(void) {
    int length = rh_sve_bytes > 0 ? prctl(PR_SVE_GET_VL, 0, 0, 0, 0) : 0; /* negative on CPUs without SVE */
    if (length >= 0 && (length & PR_SVE_VL_LEN_MASK) == rh_sve_bytes)
        return 0;
    return fail("RuntimeError", "the file was compiled for vectors of SVE of %d bits, which this process lacks",
                8 * rh_sve_bytes);
}

/* The machine of these devices, made in their first call. */
static struct machine *machine_on(const DLDevice *devices) {
    size_t bytes = (size_t)rh_info.num_devices * sizeof *devices;
    struct machine *each = __atomic_load_n(&machines, __ATOMIC_ACQUIRE);
    for (; each != NULL; each = each->next)
        if (memcmp(each->devices, devices, bytes) == 0)
            return each;
    pthread_mutex_lock(&lock);
    for (each = machines; each != NULL && memcmp(each->devices, devices, bytes) != 0;)
        each = each->next;
    if (each == NULL && (each = calloc(1, sizeof *each + bytes)) == NULL) {
        fail("MemoryError", "no memory for a machine");
    } else if (each->constants.type_index == kTVMFFINone) {
        memcpy(each->devices, devices, bytes);
        if (check_vectors() == 0 && map_weights() == 0 &&
            (machines != NULL || (start_workers() && define_refusals())) && place_constants(each) == 0) {
            each->next = machines;
            __atomic_store_n(&machines, each, __ATOMIC_RELEASE);
        } else {
            free(each);
            each = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
    return each;
}

/* ---- Checks of arguments ---- */

static void write_type(char *text, size_t bytes, const DLTensor *tensor) {
    static const char *const kinds[] = {"int", "uint", "float", "object", "bfloat", "complex", "bool"};
    int used = tensor->dtype.code < 7 ? snprintf(text, bytes, "%s%d[", kinds[tensor->dtype.code], tensor->dtype.bits)
                                      : snprintf(text, bytes, "type code %d[", tensor->dtype.code);
    for (int32_t i = 0; i < tensor->ndim && used < (int)bytes - 32; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
    snprintf(text + used, bytes - (size_t)used, "] on device %d:%d", tensor->device.device_type,
             tensor->device.device_id);
}

static bool overlaps(const DLTensor *a, const DLTensor *b) {
    const char *x = address_of(a), *y = address_of(b);
    return is_host(a->device) == is_host(b->device) && x < y + bytes_of(b) && y < x + bytes_of(a);
}

/* Whether a tensor has the type that an input expects. */
static bool fits(const rh_value_info *input, const DLTensor *tensor) {
    if (input->dtype.bits != 0 && memcmp(&input->dtype, &tensor->dtype, sizeof tensor->dtype) != 0)
        return false;
    if (input->ndim >= 0 && input->ndim != tensor->ndim)
        return false;
    for (int32_t i = 0; input->shape != NULL && i < tensor->ndim; i++)
        if (input->shape[i] >= 0 && input->shape[i] != tensor->shape[i])
            return false;
    return true;
}

static int check_layout(const rh_function_info *function, const rh_value_info *input, const DLTensor *tensor) {
    if (!is_contiguous(tensor))
        FAIL("function '%s', argument '%s': found strides, expected a contiguous tensor", function->name, input->name);
    if (tensor->byte_offset != 0 || (intptr_t)tensor->data % rh_alignment != 0)
        FAIL("function '%s', argument '%s': found the address %p with offset %lld, expected a multiple of %lld "
             "without an offset", function->name, input->name, tensor->data, (long long)tensor->byte_offset,
             (long long)rh_alignment);
    return 0;
}

/* Tensors in a tuple, whose types TVM checks. */
static int check_fields(const rh_function_info *function, const rh_value_info *input, TVMFFIAny value) {
    const TVMFFISeqCell *fields = fields_of(value);
    const DLTensor *tensor = tensor_of(value);
    int status = tensor == NULL ? 0 : check_layout(function, input, tensor);
    for (int64_t i = 0; fields != NULL && i < fields->size && status == 0; i++)
        status = check_fields(function, input, ((TVMFFIAny *)fields->data)[i]);
    return status;
}

static int check_argument(const rh_function_info *function, int32_t index, const TVMFFIAny *args) {
    const rh_value_info *input = &function->inputs[index];
    const DLTensor *tensor = tensor_of(args[index]);
    if (input->kind == RH_TUPLE)
        return check_fields(function, input, args[index]);
    if (input->kind != RH_TENSOR || (args[index].type_index == kTVMFFINone && input->flags & RH_HAS_DEFAULT))
        return 0;
    DLDevice device = device_at(machine, input->device);
    if (tensor == NULL)
        FAIL("function '%s', argument '%s': found no tensor, expected %s", function->name, input->name, input->type);
    if (!fits(input, tensor) || !same_device(tensor->device, device)) {
        char found[256];
        write_type(found, sizeof found, tensor);
        FAIL("function '%s', argument '%s': found %s, expected %s on device %d:%d", function->name, input->name, found,
             input->type, device.device_type, device.device_id);
    }
    if (check_layout(function, input, tensor) != 0)
        return -1;
    for (int32_t i = 0; input->flags & RH_DONATED && i < function->num_inputs; i++)
        if (i != index && tensor_of(args[i]) != NULL && overlaps(tensor, tensor_of(args[i])))
            FAIL("function '%s': arguments '%s', which the call overwrites, and '%s' share memory", function->name,
                 input->name, function->inputs[i].name);
    return 0;
}

/* Upper bounds of sizes, for which memory is planned. */
static int check_bounds(int32_t number, const TVMFFIAny *args) {
    const rh_function_info *function = &rh_info.functions[number];
    for (int32_t i = 0; i < rh_num_bounds; i++) {
        const struct bound *bound = &rh_bounds[i];
        if (bound->function != number)
            continue;
        const DLTensor *tensor = tensor_of(args[bound->input]);
        const TVMFFIShapeCell *shape = content(args[bound->input], kTVMFFIShape);
        int64_t size = 0;
        if (tensor != NULL && bound->axis < tensor->ndim)
            size = tensor->shape[bound->axis];
        else if (shape != NULL && bound->axis < (int64_t)shape->size)
            size = shape->data[bound->axis];
        else if (args[bound->input].type_index == kTVMFFIInt)
            size = args[bound->input].v_int64;
        char where[32] = "";
        if (size <= bound->maximum)
            continue;
        if (bound->axis >= 0)
            snprintf(where, sizeof where, " dimension %d", bound->axis);
        FAIL("%s is %lld by argument '%s' of '%s'%s, expected at most %lld, its upper bound: memory is planned for it",
             bound->name, (long long)size, function->inputs[bound->input].name, function->name, where,
             (long long)bound->maximum);
    }
    return 0;
}

/* ---- Packed functions of the bytecode and of kernels ---- */

#define PACKED(name, symbol) PACKED_AS(name, "relax_hetero." symbol)
#define PACKED_AS(name, symbol)                                                                                        \
    __attribute__((visibility("default"))) int name(void *self, const TVMFFIAny *args, int32_t count,                  \
                                                    TVMFFIAny *result) __asm__("__tvm_ffi_" symbol);                   \
    int name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

/* Call the function of Python that has a global name, looked up once. */
static int pass_on(const char *name, TVMFFIObjectHandle *function, const TVMFFIAny *args, int32_t count,
                   TVMFFIAny *result) {
    TVMFFIByteArray text = {name, strlen(name)};
    if (*function == NULL && ffi.FunctionGetGlobal(&text, function) != 0)
        return -1;
    if (*function == NULL)
        return fail("RuntimeError", "%s was called outside of a function of %s", name, path);
    return ffi.FunctionCall(*function, (TVMFFIAny *)args, count, result);
}

/* In calls of rh.vm.VirtualMachine. */
#define PASS_ON(name)                                                                                                  \
    static TVMFFIObjectHandle function_of_python;                                                                      \
    if (machine == NULL)                                                                                               \
        return pass_on(name, &function_of_python, args, count, result);

/* The description, for relax_hetero.h. */
PACKED(describe, "describe") {
    *result = (TVMFFIAny){.type_index = kTVMFFIOpaquePtr, .v_ptr = (void *)&rh_info};
    return 0;
}

/* End the call of this thread. */
static void end_call(bool has_failed) {
    struct gpu *gpu = machine == NULL ? NULL : machine->gpu;
    if (gpu != NULL) {
        if (has_failed)
            reset_mailboxes(gpu);
        pthread_mutex_unlock(&gpu->in_use);
    }
    machine = NULL;
}

/* After a call that has failed, which does not leave: the next call of the thread does the same. */
PACKED(abandon, "abandon") {
    *result = none();
    end_call(true);
    return 0;
}

/* The constants, for the function of a number; a tensor on each device, then the arguments. */
PACKED(enter, "enter") {
    int32_t number = (int32_t)args[0].v_int64;
    const rh_function_info *function = &rh_info.functions[number];
    DLDevice devices[rh_info.num_devices];
    for (int32_t i = 0; i < rh_info.num_devices; i++)
        devices[i] = tensor_of(args[1 + i])->device;
    end_call(true);
    struct machine *each = machine_on(devices);
    if (each == NULL || (each->gpu != NULL && enter_gpu(each->gpu) != 0))
        return -1;
    machine = each;
    args += 1 + rh_info.num_devices;
    int status = 0;
    for (int32_t i = 0; i < function->num_inputs && status == 0; i++)
        status = check_argument(function, i, args);
    if (status != 0 || check_bounds(number, args) != 0) {
        end_call(false);
        return -1;
    }
    *result = shared(machine->constants);
    return 0;
}

/* An argument that the call overwrites although it is not donated, or that has a default value: a function's number,
 * the input's, and the argument. */
PACKED(argument, "argument") {
    const rh_value_info *input = &rh_info.functions[args[0].v_int64].inputs[args[1].v_int64];
    TVMFFIAny value = args[2];
    if (value.type_index == kTVMFFINone)
        value = ((TVMFFIAny *)fields_of(machine->constants)->data)[input->default_constant];
    if (input->flags & RH_COPIED)
        return new_copy(value, tensor_of(value)->device, result);
    *result = shared(value);
    return 0;
}

/* Results that were returned before. */
struct returned {
    const DLTensor *tensor;
    struct returned *next;
};

static void free_returned(struct returned *each) {
    for (struct returned *next; each != NULL; each = next) {
        next = each->next;
        free(each);
    }
}

/* Whether a tensor on another device than the host shares memory with a constant. */
static bool is_in_constants(const DLTensor *tensor) {
    const TVMFFISeqCell *constants = fields_of(machine->constants);
    for (int64_t i = 0; constants != NULL && i < constants->size; i++) {
        const DLTensor *constant = tensor_of(((TVMFFIAny *)constants->data)[i]);
        if (constant != NULL && overlaps(tensor, constant))
            return true;
    }
    return false;
}

/* A result in memory of its own: callers may write to it. */
static int detach(TVMFFIAny value, const rh_function_info *function, const TVMFFIAny *args, struct returned **before,
                  TVMFFIAny *result) {
    const TVMFFISeqCell *fields = fields_of(value);
    const DLTensor *tensor = tensor_of(value);
    if (fields != NULL) {
        TVMFFIAny *detached = calloc((size_t)fields->size + 1, sizeof *detached);
        int status = detached == NULL ? fail("MemoryError", "no memory for a result") : 0;
        for (int64_t i = 0; i < fields->size && status == 0; i++)
            status = detach(((TVMFFIAny *)fields->data)[i], function, args, before, &detached[i]);
        if (status == 0)
            status = call_global("ffi.Array", detached, (int32_t)fields->size, result);
        for (int64_t i = 0; i < fields->size && detached != NULL; i++)
            drop(detached[i]);
        free(detached);
        return status;
    }
    bool is_shared = false;
    if (tensor != NULL && is_host(tensor->device))
        is_shared = address_of(tensor) >= weights && address_of(tensor) < weights_end;
    else if (tensor != NULL)
        is_shared = is_in_constants(tensor);
    for (struct returned *each = *before; tensor != NULL && !is_shared && each != NULL; each = each->next)
        is_shared = overlaps(tensor, each->tensor);
    for (int32_t i = 0; tensor != NULL && !is_shared && i < function->num_inputs; i++)
        is_shared = !(function->inputs[i].flags & RH_DONATED) && tensor_of(args[i]) != NULL &&
                    overlaps(tensor, tensor_of(args[i]));
    if (is_shared)
        return new_copy(value, tensor->device, result);
    if (tensor != NULL) {
        struct returned *own = malloc(sizeof *own);
        if (own == NULL)
            return fail("MemoryError", "no memory for a result");
        *own = (struct returned){tensor, *before};
        *before = own;
    }
    *result = shared(value);
    return 0;
}

/* The result of a call: a function's number, the result, and the arguments. */
PACKED(leave, "leave") {
    struct returned *before = NULL;
    int status = detach(args[1], &rh_info.functions[args[0].v_int64], args + 2, &before, result);
    free_returned(before);
    if (status == 0 && check_reported_values() != 0) {
        drop(*result);
        *result = none();
        status = -1;
    }
    end_call(status != 0);
    return status;
}

PACKED(to_device, "to_device") {
    PASS_ON("relax_hetero.to_device")
    bool must_copy = count > 2 && args[2].v_int64 != 0;
    const DLTensor *tensor = tensor_of(args[0]);
    const TVMFFISeqCell *fields = fields_of(args[0]);
    DLDevice device = device_at(machine, (int32_t)args[1].v_int64);
    if (fields != NULL) {
        TVMFFIAny *moved = calloc((size_t)fields->size + 1, sizeof *moved);
        int status = moved == NULL ? fail("MemoryError", "no memory for a transfer") : 0;
        for (int64_t i = 0; i < fields->size && status == 0; i++) {
            TVMFFIAny field[] = {((TVMFFIAny *)fields->data)[i], args[1], integer(must_copy)};
            status = to_device(NULL, field, 3, &moved[i]);
        }
        if (status == 0)
            status = call_global("ffi.Array", moved, (int32_t)fields->size, result);
        for (int64_t i = 0; i < fields->size && moved != NULL; i++)
            drop(moved[i]);
        free(moved);
        return status;
    }
    if (tensor == NULL)
        FAIL("a transfer to another device found no tensor");
    if (!must_copy && same_device(tensor->device, device)) {
        *result = shared(args[0]);
        return 0;
    }
    if (!must_copy && is_host(tensor->device) && is_host(device))
        return alias(args[0], device, result);
    if (count < 4 || tensor_of(args[3]) == NULL)
        return new_copy(args[0], device, result);
    *result = shared(args[3]);
    return copy(args[0], args[3]);
}

PACKED(pinned_storage, "pinned_storage") {
    PASS_ON("relax_hetero.pinned_storage")
    const TVMFFIShapeCell *size = content(args[0], kTVMFFIShape);
    return allocate(device_at(machine, (int32_t)args[1].v_int64), (DLDataType){kDLUInt, 8, 1}, 1, size->data, result);
}

PACKED(size, "size") {
    *result = shared(args[0]);
    return 0;
}

PACKED(keep, "keep") {
    *result = none();
    return 0;
}

/* A value that a function of the program has returned: its description, and the expected fields of a tuple or -1, rank,
 * element type and extents of a tensor; -1 and "" stand for any. */
PACKED(check_returned, "check_returned") {
    PASS_ON("relax_hetero.check_returned")
    const TVMFFISeqCell *fields = fields_of(args[0]);
    const DLTensor *tensor = tensor_of(args[0]);
    int64_t expected = args[2].v_int64, rank = count > 3 ? args[3].v_int64 : -1;
    char found[256] = "no tensor";
    *result = none();
    if (expected >= 0) {
        if (fields != NULL && fields->size == expected)
            return 0;
        FAIL("%s returned no tuple of %lld, which the model reads", text_of(&args[1]), (long long)expected);
    }
    bool is_good = tensor != NULL && (rank < 0 || rank == tensor->ndim);
    if (is_good && count > 4 && text_of(&args[4])[0] != 0) {
        TVMFFIByteArray name = {text_of(&args[4]), strlen(text_of(&args[4]))};
        DLDataType dtype;
        if (ffi.DataTypeFromString(&name, &dtype) != 0)
            return -1;
        is_good = memcmp(&dtype, &tensor->dtype, sizeof dtype) == 0;
    }
    for (int32_t i = 0; is_good && i + 5 < count; i++)
        is_good = args[i + 5].v_int64 < 0 || args[i + 5].v_int64 == tensor->shape[i];
    if (is_good)
        return 0;
    if (tensor != NULL)
        write_type(found, sizeof found, tensor);
    FAIL("%s returned %s, expected another tensor of %lld dimensions, type %s", text_of(&args[1]), found,
         (long long)rank, count > 4 ? text_of(&args[4]) : "");
}

/* ---- Functions of vm/device/builtins.py, for tensors of CPUs. ---- */

/* The number in a scalar, int64 in memory of the host; -1 with an error for others. */
static int number_in(TVMFFIAny value, int64_t *number) {
    const DLTensor *tensor = tensor_of(value);
    if (tensor == NULL || !is_host(tensor->device) || bytes_of(tensor) != 8)
        FAIL("a loop counts on a device, which needs the package relax_hetero of Python");
    memcpy(number, address_of(tensor), 8);
    return 0;
}

/* A new tensor of rows, or a view of the first rows. */
static int rows_like(const DLTensor *row, const int64_t *extents, int64_t rows, TVMFFIAny *source, TVMFFIAny *result) {
    int64_t shape[16] = {rows}, strides[16], stride = 1;
    int32_t ndim = row->ndim + 1;
    if (ndim > 16)
        FAIL("a loop collects tensors of %d dimensions, expected at most 15", row->ndim);
    memcpy(shape + 1, extents, (size_t)row->ndim * sizeof *shape);
    if (source == NULL)
        return allocate(row->device, row->dtype, ndim, shape, result);
    for (int32_t i = ndim - 1; i >= 0; stride *= shape[i--])
        strides[i] = stride;
    DLTensor view = *tensor_of(*source);
    view.ndim = ndim, view.shape = shape, view.strides = strides;
    TVMFFIObjectHandle handle = NULL;
    if (ffi.TensorCreateUnsafeView(source->v_obj, &view, &handle) != 0)
        return -1;
    *result = object(handle, kTVMFFITensor);
    return 0;
}

static int write_number(TVMFFIAny row, TVMFFIAny rows, int64_t number) {
    const DLTensor *from = tensor_of(row), *to = tensor_of(rows);
    if (!is_host(from->device) || !is_host(to->device))
        FAIL("a loop collects tensors of a GPU, which needs the package relax_hetero of Python");
    memcpy(address_of(to) + number * bytes_of(from), address_of(from), (size_t)bytes_of(from));
    return 0;
}

PACKED(append_row, "append_row") {
    PASS_ON("relax_hetero.append_row")
    const DLTensor *row = tensor_of(args[1]), *rows = tensor_of(args[0]);
    int64_t number, trips;
    if (number_in(args[2], &number) != 0 || number_in(args[3], &trips) != 0)
        return -1;
    TVMFFIAny target = args[0], larger = none();
    if (number == 0) {
        int64_t bytes = bytes_of(row), capacity = trips > 1 ? trips : 1;
        if (bytes > 0 && capacity > (64 << 20) / bytes && capacity > 16)
            capacity = 16;
        if (rows_like(row, row->shape, capacity, NULL, &larger) != 0)
            return -1;
    } else if (rows->ndim != row->ndim + 1 ||
               memcmp(rows->shape + 1, row->shape, (size_t)row->ndim * sizeof *row->shape) != 0) {
        FAIL("trip %lld of a loop collects a tensor of another shape than the trips before it", (long long)number);
    } else if (number == rows->shape[0]) {
        if (rows_like(row, row->shape, 2 * number, NULL, &larger) != 0)
            return -1;
        memcpy(address_of(tensor_of(larger)), address_of(rows), (size_t)bytes_of(rows));
    }
    *result = is_object(larger) ? larger : shared(target);
    return write_number(args[1], *result, number);
}

PACKED(new_rows, "new_rows") {
    PASS_ON("relax_hetero.new_rows")
    const TVMFFIShapeCell *shape = content(args[0], kTVMFFIShape);
    TVMFFIByteArray name = {text_of(&args[1]), strlen(text_of(&args[1]))};
    DLTensor row = {NULL, tensor_of(args[2])->device, (int32_t)shape->size, {0}, NULL, NULL, 0};
    int64_t trips;
    if (ffi.DataTypeFromString(&name, &row.dtype) != 0 || number_in(args[2], &trips) != 0)
        return -1;
    return rows_like(&row, shape->data, trips > 0 ? trips : 0, NULL, result);
}

PACKED(write_row, "write_row") {
    PASS_ON("relax_hetero.write_row")
    int64_t number;
    if (number_in(args[2], &number) != 0)
        return -1;
    *result = shared(args[0]);
    return write_number(args[1], args[0], number);
}

PACKED(taken_rows, "taken_rows") {
    PASS_ON("relax_hetero.taken_rows")
    const DLTensor *rows = tensor_of(args[0]);
    int64_t count_taken;
    if (number_in(args[1], &count_taken) != 0)
        return -1;
    DLTensor row = *rows;
    row.ndim--;
    TVMFFIAny source = args[0];
    return rows_like(&row, rows->shape + 1, count_taken, &source, result);
}

/* Functions of TVM's compiler package, which its runtime lacks. */

PACKED_AS(shape_to_tensor, "relax.run.shape_to_tensor") {
    PASS_ON("relax.run.shape_to_tensor")
    const TVMFFIShapeCell *shape = content(args[0], kTVMFFIShape);
    int64_t size = (int64_t)shape->size;
    if (allocate(device_at(machine, -1), int64_type, 1, &size, result) != 0)
        return -1;
    memcpy(address_of(tensor_of(*result)), shape->data, shape->size * sizeof *shape->data);
    return 0;
}

static bool is_zero(const char *element, size_t bytes, DLDataType dtype) {
    unsigned char bits = 0, last = (unsigned char)element[bytes - 1];
    for (size_t i = 0; i + 1 < bytes; i++)
        bits |= (unsigned char)element[i];
    if (dtype.code == kDLFloat || dtype.code == kDLBfloat) /* also -0 */
        last &= 0x7f;
    return (bits | last) == 0;
}

/* Positions of nonzero elements, int64[rank, count]; a scalar counts as a vector. */
PACKED_AS(nonzero, "relax.run.nonzero") {
    PASS_ON("relax.run.nonzero")
    const DLTensor *tensor = tensor_of(args[0]);
    if (!is_host(tensor->device) || tensor->dtype.bits % 8 != 0 || tensor->dtype.lanes != 1)
        FAIL("NonZero of a GPU's or of packed elements needs the package relax_hetero of Python");
    size_t bytes = tensor->dtype.bits / 8;
    int64_t elements = bytes_of(tensor) / (int64_t)bytes, found = 0, one = 1;
    const int64_t *shape = tensor->ndim > 0 ? tensor->shape : &one;
    int64_t rank = tensor->ndim > 0 ? tensor->ndim : 1;
    for (int64_t i = 0; i < elements; i++)
        found += !is_zero(address_of(tensor) + i * (int64_t)bytes, bytes, tensor->dtype);
    int64_t extents[] = {rank, found};
    if (allocate(tensor->device, int64_type, 2, extents, result) != 0)
        return -1;
    int64_t *positions = (int64_t *)address_of(tensor_of(*result)), column = 0;
    for (int64_t i = 0; i < elements; i++) {
        if (is_zero(address_of(tensor) + i * (int64_t)bytes, bytes, tensor->dtype))
            continue;
        for (int64_t axis = rank - 1, rest = i; axis >= 0; rest /= shape[axis--])
            positions[axis * found + column] = rest % shape[axis];
        column++;
    }
    return 0;
}
