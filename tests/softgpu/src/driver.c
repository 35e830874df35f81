/* libcuda.so.1: what torch and vLLM's sleeping allocator ask of the driver. Virtual memory management is mmap of memory files. */
#include "softgpu.h"
#include <dlfcn.h>

/* Devices and contexts. A context is the number of its device; each device has one, as the runtime's. */

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x1000 + device); }
static int device_of(CUcontext context) { return (int)(uintptr_t)context - 0x1000; }
static __thread CUcontext current;
static char retained[SG_DEVICES];

CUresult cuInit(unsigned flags) { return sg_visible() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = sg_visible(); return 0; }
CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return sg_physical(index) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) { snprintf(name, size, SG_NAME); return 0; }
CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device) { *size = sg_total(); return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, 0x5a, 15), uuid->bytes[15] = sg_physical(device); return 0; }
CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) { snprintf(id, size, "0000:%02x:00.0", sg_physical(device) + 1); return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 50 << 20; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = sg_physical(device) + 1; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: *value = 1; break;
    default: *value = 0; /* no RDMA, no multicast, no memory pools, no fabric */
    }
    return 0;
}

static const struct { int error; const char *name, *text; } errors[] = {
    {0, "SUCCESS", "no error"}, {1, "INVALID_VALUE", "invalid argument"}, {2, "OUT_OF_MEMORY", "out of memory"},
    {3, "NOT_INITIALIZED", "initialization error"}, {100, "NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "INVALID_DEVICE", "invalid device ordinal"}, {201, "INVALID_CONTEXT", "invalid device context"},
    {205, "MAP_FAILED", "mapping of buffer object failed"}, {208, "ALREADY_MAPPED", "resource already mapped"},
    {400, "INVALID_HANDLE", "invalid resource handle"}, {600, "NOT_READY", "device not ready"},
    {712, "HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "LAUNCH_FAILED", "unspecified launch failure"},
    {801, "NOT_SUPPORTED", "operation not supported (by the GPU in software)"},
};
static int error_at(int error) {
    int last = sizeof errors / sizeof *errors - 1;
    for (int i = 0; i < last; i++) if (errors[i].error == error) return i;
    return last;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = errors[error_at(error)].text; return 0; }
CUresult cuGetErrorName(CUresult error, const char **text) {
    static char names[sizeof errors / sizeof *errors][64];
    int i = error_at(error);
    snprintf(names[i], sizeof names[i], "CUDA_%s%s", errors[i].error ? "ERROR_" : "", errors[i].name);
    *text = names[i];
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult error = sg_use(sg_physical(device));
    if (error) return error;
    retained[device] = 1;
    *context = context_of(device);
    return 0;
}
void sg_make_current(int device) { cuDevicePrimaryCtxRetain(&current, device); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = device < SG_DEVICES && retained[device];
    return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; if (context) sg_current = device_of(context); return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = device_of(current); return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { if (context) *context = current; return 0; }
CUresult cuCtxSynchronize(void) { if (sg_wait) sg_wait(0, 0, "cuCtxSynchronize"); return 0; }
CUresult cuCtxGetFlags(unsigned *flags) { *flags = 0; return 0; }

/* Memory: cuMemCreate makes a memory file, cuMemMap maps it over reserved addresses. */

typedef struct { int fd, device, references; size_t size; } physical_t;

CUresult cuMemGetInfo_v2(size_t *free_, size_t *total) { sg_info(sg_physical(sg_current), (uint64_t *)free_, (uint64_t *)total); return 0; }
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags flags) {
    *size = SG_GRAIN;
    return 0;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
    int device = sg_physical(properties->location.id);
    if (device < 0 || !size || size % SG_GRAIN) return CUDA_ERROR_INVALID_VALUE;
    if (sg_fails(SG_FAULT_MALLOC) || sg_charge(device, size)) {
        sg_log("cuMemCreate of %zu bytes on %d: out of memory", size, device);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical_t *physical = malloc(sizeof *physical);
    *physical = (physical_t){.fd = sg_memory_file(size), .device = device, .references = 1, .size = size};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    sg_log("cuMemCreate of %zu bytes on %d", size, device);
    return 0;
}
static CUresult release(physical_t *physical) { /* the struct stays, to know what is released twice */
    sg_lock();
    int references = physical->references ? --physical->references : -1;
    sg_unlock();
    if (references < 0) {
        sg_violation("cuMemRelease of %zu bytes that are released", physical->size);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (references) return 0;
    sg_log("%zu bytes of cuMemCreate on %d given back", physical->size, physical->device);
    close(physical->fd);
    sg_charge(physical->device, -(int64_t)physical->size);
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return release((physical_t *)(uintptr_t)handle); }

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    char *range = mmap(0, size + SG_GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)range + SG_GRAIN - 1) / SG_GRAIN * SG_GRAIN);
    if (aligned > range) munmap(range, aligned - range);
    munmap(aligned + size, range + SG_GRAIN - aligned);
    *start = (uintptr_t)aligned;
    return 0;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) { return munmap((void *)start, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    physical_t *physical = (physical_t *)(uintptr_t)handle;
    if (sg_find(start)) {
        sg_violation("cuMemMap over what is mapped already");
        return CUDA_ERROR_ALREADY_MAPPED;
    }
    if (mmap((void *)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, offset) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    sg_lock();
    physical->references++;
    sg_unlock();
    sg_insert((sg_block){.start = start, .size = size, .device = physical->device, .kind = SG_MAPPED, .physical = physical});
    return 0;
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count) {
    if (mprotect((void *)start, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    sg_poison((void *)start, size);
    return 0;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    sg_block *block = sg_find(start);
    if (!block || block->start != start || block->kind != SG_MAPPED) {
        sg_violation("cuMemUnmap of %zu bytes that are not mapped", size);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (sg_wait) sg_wait((void *)start, size, "cuMemUnmap");
    block = sg_take(start);
    mmap((void *)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    release(block->physical);
    free(block);
    return 0;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    sg_block *block = sg_find(address);
    if (!block) return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = block->kind == SG_HOST ? 1 : 2; return 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = block->device; return 0;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = block->start; return 0;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = block->size; return 0;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = current; return 0;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)data = block->kind == SG_MALLOC; return 0;
    }
    return cudaErrorNotSupported;
}
static CUresult unsupported(void) { return cudaErrorNotSupported; }
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = library ? dlsym(library, versioned) : 0;
    if (!*function && library) *function = dlsym(library, name);
    if (!*function) sg_log("cuGetProcAddress of %s, which is not implemented", name), *function = (void *)unsupported;
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return 0;
}
