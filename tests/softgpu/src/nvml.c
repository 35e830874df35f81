/* libnvidia-ml.so.1, as pynvml and torch ask it. A device's handle is its physical number plus one. */
#include "softgpu.h"

enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { char legacy_id[16]; unsigned domain, bus, device, id, subsystem; char id_text[32]; } pci_t;
static int number(void *device) { return (int)(uintptr_t)device - 1; }

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "error of the GPU in software" : "success"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = sg_device_count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(uintptr_t)(index + 1);
    return (int)index < sg_device_count() ? 0 : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    return nvmlDeviceGetHandleByIndex_v2(strtol(uuid + strlen(uuid) - 2, 0, 16), device);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    unsigned domain, bus;
    return sscanf(id, "%x:%x", &domain, &bus) == 2 ? nvmlDeviceGetHandleByIndex_v2(bus - 1, device) : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = number(device); return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { snprintf(name, size, SG_NAME); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a%02x", number(device));
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9, *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    uint64_t free_bytes, total;
    sg_info(number(device), &free_bytes, &total);
    *memory = (memory_t){total, free_bytes, total - free_bytes};
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
    memory_t plain;
    nvmlDeviceGetMemoryInfo(device, &plain);
    *memory = (memory_v2_t){memory->version, plain.total, 0, plain.free, plain.used};
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = number(device) + 1;
    snprintf(pci->id_text, sizeof pci->id_text, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    return 0;
}
int nvmlDeviceGetP2PStatus(void *device, void *peer, int what, int *status) { *status = 0; return 0; }
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) { *current = *pending = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) { *count = 0; return 0; }
/* torch looks these up when memory is out */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_t *pci) { return NOT_SUPPORTED; }
/* torch asks before it makes expandable segments; all zero is a device that is in no fabric */
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; } fabric_v2_t;
int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_v2_t *info) { *info = (fabric_v2_t){.version = info->version}; return 0; }
