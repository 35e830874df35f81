/* The part of CUDA 13's declarations that this library defines, for machines without CUDA's headers.
 * With -DCUDA_HEADERS the real headers are used, and the compiler compares every signature and constant. */
#pragma once
#ifdef CUDA_HEADERS
#include <cuda.h>
#include <cuda_runtime_api.h>
#else
#include <stddef.h>
#include <stdint.h>

typedef int CUresult, CUdevice, CUdevice_attribute, CUpointer_attribute, CUmemAllocationGranularity_flags;
typedef int CUdriverProcAddressQueryResult, cudaError_t;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef uint64_t cuuint64_t;
typedef struct CUctx *CUcontext;
typedef struct CUstream *cudaStream_t;
typedef struct CUevent *cudaEvent_t;
typedef struct CUmempool *cudaMemPool_t;
typedef struct CUgraph *cudaGraph_t;
typedef struct CUgraphNode *cudaGraphNode_t;
typedef struct CUkern *cudaKernel_t;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int type, requestedHandleTypes; CUmemLocation location; void *unused; char flags[8]; } CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct { char reserved[64]; } cudaIpcMemHandle_t, cudaIpcEventHandle_t;
typedef struct { unsigned x, y, z; } dim3;
typedef struct cudaGraphEdgeData_st cudaGraphEdgeData;
typedef struct cudaLaunchConfig_st cudaLaunchConfig_t;

enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaPointerAttributes { enum cudaMemoryType type; int device; void *devicePointer, *hostPointer; long reserved[8]; };
struct cudaFuncAttributes { size_t sizes[3]; int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, rest[24]; };
struct cudaDeviceProp { /* only what is set; not CUDA's layout */
    char name[256]; CUuuid uuid; size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
    textureAlignment; int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, regsPerBlock; int
    regsPerMultiprocessor, l2CacheSize, unifiedAddressing, canMapHostMemory, concurrentKernels, maxGridSize[3]; int maxThreadsDim[3],
    pciBusID, memoryBusWidth, asyncEngineCount;
};

enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_DEVICE =
    101, CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_ALREADY_MAPPED = 208, CU_GET_PROC_ADDRESS_SUCCESS = 0, cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2, cudaErrorInitializationError = 3, cudaErrorNoDevice = 100, cudaErrorInvalidDevice = 101,
    cudaErrorDeviceUninitialized = 201, cudaErrorMapBufferObjectFailed = 205, cudaErrorInvalidResourceHandle = 400, cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712, cudaErrorHostMemoryNotRegistered = 713, cudaErrorLaunchFailure = 719, cudaErrorNotSupported
    = 801, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8, CU_DEVICE_ATTRIBUTE_WARP_SIZE
    = 10, CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
    = 41, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_POINTER_ATTRIBUTE_CONTEXT = 1, CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11, CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};
CUresult cuGetErrorString(CUresult, const char **);
CUresult cuGetErrorName(CUresult, const char **);
CUresult cuDeviceGetUuid_v2(CUuuid *, CUdevice);
CUresult cuDeviceGetPCIBusId(char *, int, CUdevice);
CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice);
CUresult cuGetProcAddress_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
#endif
