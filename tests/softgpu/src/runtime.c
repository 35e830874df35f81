/* libcudart.so.13: devices, memory, IPC and kernels as torch and vLLM call them. Streams and events are in streams.c. */
#include "softgpu.h"

void sg_make_current(int device);
static __thread cudaError_t last_error;
int sg_error(int error) { return last_error = error; }
int sg_here(void) {
    int error = sg_use(sg_physical(sg_current));
    if (!error) sg_make_current(sg_current);
    return error ? sg_error(error) : 0;
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) { return (*count = sg_visible()) ? 0 : sg_error(cudaErrorNoDevice); }
cudaError_t cudaGetDevice(int *device) { *device = sg_current; return 0; }
cudaError_t cudaSetDevice(int device) {
    if (sg_physical(device) < 0) return sg_error(cudaErrorInvalidDevice);
    sg_current = device;
    return sg_here();
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { const char *text; cuGetErrorString((CUresult)error, &text); return text; }
const char *cudaGetErrorName(cudaError_t error) { const char *text; cuGetErrorName((CUresult)error, &text); return text; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return (cudaError_t)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (sg_physical(device) < 0) return sg_error(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, SG_NAME);
    cuDeviceGetUuid_v2((CUuuid *)&p->uuid, device);
    p->totalGlobalMem = sg_total();
    p->major = 9;
    p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120, p->textureAlignment = 512, p->asyncEngineCount = 3;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->pciBusID = sg_physical(device) + 1;
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) { return (cudaError_t)cuDeviceGetPCIBusId(id, size, device); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return 0; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { return sg_error(cudaErrorNotSupported); }

/* Memory of the device */

cudaError_t cudaMalloc(void **pointer, size_t size) {
    int error = sg_here(), device = sg_physical(sg_current);
    *pointer = 0;
    if (error || !size) return error;
    size = (size + SG_GRAIN - 1) / SG_GRAIN * SG_GRAIN;
    if (sg_fails(SG_FAULT_MALLOC) || sg_charge(device, size)) {
        sg_log("cudaMalloc of %zu bytes on %d: out of memory", size, device);
        return sg_error(cudaErrorMemoryAllocation);
    }
    int fd = sg_memory_file(size);
    void *start = fd < 0 ? MAP_FAILED : mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (start == MAP_FAILED) { perror("softgpu: cudaMalloc"); return sg_error(cudaErrorMemoryAllocation); }
    sg_poison(start, size);
    struct stat status;
    fstat(fd, &status);
    sg_insert((sg_block){(uintptr_t)start, size, SG_MALLOC, device, fd, status.st_ino});
    sg_log("cudaMalloc of %zu bytes on %d", size, device);
    *pointer = start;
    return 0;
}
static sg_block *take(void *pointer, enum sg_kind kind, const char *call) {
    sg_block *block = sg_find((uintptr_t)pointer);
    if (!block || block->start != (uintptr_t)pointer || block->kind != kind) {
        sg_violation("%s(%p): not what such a call takes", call, pointer);
        return 0;
    }
    return sg_take((uintptr_t)pointer);
}
cudaError_t cudaFree(void *pointer) {
    if (!pointer) return 0;
    sg_drain(); /* as CUDA does */
    sg_block *block = take(pointer, SG_MALLOC, "cudaFree");
    if (!block) return sg_error(cudaErrorInvalidValue);
    int openings = sg_openings(block->inode);
    if (openings) sg_violation("cudaFree of %zu bytes that other processes have open %d times", block->size, openings);
    sg_log("cudaFree of %zu bytes on %d", block->size, block->device);
    munmap(pointer, block->size);
    close(block->fd);
    sg_charge(block->device, -(int64_t)block->size);
    free(block);
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    int error = sg_here();
    if (!error) sg_info(sg_physical(sg_current), (uint64_t *)free_bytes, (uint64_t *)total);
    return error;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    sg_block *block = sg_find((uintptr_t)pointer);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    if (!block) return 0;
    attributes->type = block->kind == SG_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = 0;
    for (int i = 0; i < sg_visible(); i++) if (sg_physical(i) == block->device) attributes->device = i;
    attributes->devicePointer = (void *)pointer;
    if (block->kind == SG_HOST) attributes->hostPointer = (void *)pointer;
    return 0;
}

/* Pinned memory of the host */

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    int error = sg_here();
    if (error) return error;
    size = size ? size : 1;
    *pointer = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return sg_error(cudaErrorMemoryAllocation);
    sg_insert((sg_block){(uintptr_t)*pointer, size, SG_HOST, .fd = -1});
    return 0;
}
cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
cudaError_t cudaFreeHost(void *pointer) {
    if (!pointer) return 0;
    sg_drain();
    sg_block *block = take(pointer, SG_HOST, "cudaFreeHost");
    if (!block) return sg_error(cudaErrorInvalidValue);
    munmap(pointer, block->size);
    free(block);
    return 0;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    int error = sg_here();
    if (error) return error;
    if (sg_find((uintptr_t)pointer)) return sg_error(cudaErrorHostMemoryAlreadyRegistered);
    sg_insert((sg_block){(uintptr_t)pointer, size, SG_HOST, .fd = -1});
    return 0;
}
cudaError_t cudaHostUnregister(void *pointer) {
    sg_drain();
    sg_block *block = take(pointer, SG_HOST, "cudaHostUnregister");
    if (!block) return sg_error(cudaErrorHostMemoryNotRegistered);
    free(block);
    return 0;
}
cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned flags) {
    *device_pointer = pointer;
    return sg_find((uintptr_t)pointer) ? 0 : sg_error(cudaErrorInvalidValue);
}

/* Copies */

typedef struct { char *to; const char *from; size_t size; int value; } copy_t;
static void run_copy(void *data) {
    copy_t *copy = data;
    if (copy->from) memmove(copy->to, copy->from, copy->size);
    else memset(copy->to, copy->value, copy->size);
}
static cudaError_t copy(void *to, const void *from, size_t size, int value, cudaStream_t stream, int blocking) {
    copy_t *data = malloc(sizeof *data);
    *data = (copy_t){to, from, size, value};
    /* Memory of the host that is not pinned is copied before the call returns. */
    if (!sg_find((uintptr_t)to) || (from && !sg_find((uintptr_t)from))) blocking = 1;
    if (!blocking) return sg_enqueue(stream, run_copy, data, (sg_range){to, size}, (sg_range){(void *)from, from ? size : 0});
    int error = sg_launch(stream);
    if (!error) run_copy(data);
    free(data);
    return error;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return size ? copy(to, from, size, 0, stream, 0) : 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size, 0, 0, 1); }
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return copy(to, 0, size, value, stream, 0); }
cudaError_t cudaMemset(void *to, int value, size_t size) { return copy(to, 0, size, value, 0, 1); }

/* Memory of other processes: a handle names a memory file of a process. Only cudaMalloc's memory has one, as with a real driver. */

#define SG_HANDLE 0x50f76b0u
typedef struct { uint32_t magic; int32_t pid, fd, device; uint64_t inode, size; char rest[32]; } handle_t;
_Static_assert(sizeof(handle_t) == sizeof(cudaIpcMemHandle_t), "as long as CUDA's");

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    sg_block *block = sg_find((uintptr_t)pointer);
    if (!block || block->kind != SG_MALLOC) return sg_error(cudaErrorInvalidValue);
    handle_t made = {SG_HANDLE, getpid(), block->fd, block->device, block->inode, block->size};
    memcpy(handle, &made, sizeof made);
    return 0;
}
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t given, unsigned flags) {
    int error = sg_here();
    if (error) return error;
    handle_t handle;
    memcpy(&handle, &given, sizeof handle);
    if (handle.magic != SG_HANDLE) return sg_error(cudaErrorInvalidResourceHandle);
    if (handle.pid == getpid()) {
        sg_violation("cudaIpcOpenMemHandle in the process that exported it");
        return sg_error(cudaErrorDeviceUninitialized);
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = sg_fails(SG_FAULT_OPEN) ? -1 : open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    void *start = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &status) && status.st_ino == handle.inode)
        start = mmap(0, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (fd >= 0) close(fd);
    if (start == MAP_FAILED) {
        sg_violation("cudaIpcOpenMemHandle: the memory of process %d cannot be opened", handle.pid);
        return sg_error(cudaErrorMapBufferObjectFailed);
    }
    sg_insert((sg_block){(uintptr_t)start, handle.size, SG_IPC, handle.device, -1, handle.inode});
    sg_count_opening(handle.inode, 1);
    sg_log("opened %zu bytes of process %d, device %d", (size_t)handle.size, handle.pid, handle.device);
    *pointer = start;
    return 0;
}
cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    sg_block *block = sg_find((uintptr_t)pointer);
    if (block) sg_drain_range((void *)block->start, block->size, "cudaIpcCloseMemHandle");
    if (!(block = take(pointer, SG_IPC, "cudaIpcCloseMemHandle"))) return sg_error(cudaErrorInvalidValue);
    munmap(pointer, block->size);
    sg_count_opening(block->inode, -1);
    sg_log("closed %zu bytes", block->size);
    free(block);
    return 0;
}

/* Entry points of the driver */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    CUdriverProcAddressQueryResult status;
    if (result) *result = cudaDriverEntryPointSuccess;
    return (cudaError_t)cuGetProcAddress_v2(name, function, version, flags, &status);
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

/* Kernels: compiled code of the GPU. Their names are known; one that is launched fails, as nothing can execute it. */

typedef struct { const void *entry; const char *name; } kernel_t;
static kernel_t *kernels;
static size_t kernel_count, kernel_room;

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *entry, char *device, const char *name, int limit, void *thread, void *block,
                            void *block_size, void *grid_size, int *warp_size) {
    sg_lock();
    if (kernel_count == kernel_room) kernels = realloc(kernels, (kernel_room = kernel_room * 2 + 1024) * sizeof *kernels);
    kernels[kernel_count++] = (kernel_t){entry, name};
    sg_unlock();
}
static cudaError_t launch(const void *entry) {
    const char *name = "unknown";
    for (size_t i = 0; i < kernel_count; i++) if (kernels[i].entry == entry) name = kernels[i].name;
    sg_violation("a compiled kernel was launched: %.400s", name);
    return sg_error(cudaErrorNotSupported);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return 0; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *entry) { *kernel = (cudaKernel_t)entry; return 0; }
cudaError_t cudaLaunchKernel(const void *entry, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(entry); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *entry, void **arguments) { return launch(entry); }
cudaError_t cudaFuncSetAttribute(const void *entry, enum cudaFuncAttribute attribute, int value) { return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *entry) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return 0;
}
