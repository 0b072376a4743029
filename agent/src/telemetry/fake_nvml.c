/* A stand-in for NVIDIA's management library, built and loaded by the tests: one card that answers a few questions. With
   NVML_INIT_RESULT other than 0 it is a stub that has no driver to talk to. */
#include <stdint.h>
#include <string.h>

#ifndef NVML_INIT_RESULT
#define NVML_INIT_RESULT 0
#endif

typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;

int nvmlInit_v2(void) { return NVML_INIT_RESULT; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { strncpy(text, "999.1", length); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned int length) { (void)device; strncpy(text, "Test Card", length); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned int length) { (void)device; strncpy(text, "GPU-test", length); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) { (void)device; rates->gpu = 42; rates->memory = 7; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    (void)device;
    memory->total = 1ull << 34;
    memory->used = 1ull << 33;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) { (void)device; (void)milliwatts; return 3; /* not supported */ }
