// SPDX-License-Identifier: Apache-2.0
// As much of CUDA's runtime and driver as torch and Triton call, on a machine without a GPU.
//
// Device memory is host memory, every call has done its work when it returns, and kernels do nothing. What stays real
// is all above: torch's allocator, streams and events as torch keeps them, its checks of arguments and devices,
// Triton's compiler. Launches that a GPU would refuse are refused, and so are memory that is used up, pages that are
// locked twice and times of events that were not told to note them.
//
// CUDA_STAND_IN=nothing: large copies do nothing either, and what is brought to the host is zero, so that an epoch
// takes the host's own time. Otherwise copies copy, and sitecustomize.py beside this file computes torch's operators.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define SUCCEEDS(name, ...) \
    cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

enum { CAPABILITY_MAJOR = 9, PROCESSORS = 132, THREADS_OF_A_BLOCK = 1024, BLOCKS_ACROSS = 65535 };
enum { SHARED_BYTES = 232448 };
static const size_t SMALL_BYTES = 65536;
static const size_t MEMORY_BYTES = (size_t)80 << 30;
static const size_t PAGE_BYTES = (size_t)2 << 20;

static __thread cudaError_t last_error;

static cudaError_t refuse(cudaError_t error) { return last_error = error; }

static int does_nothing(void) {
    static int known = -1;
    if (known < 0) {
        const char *mode = getenv("CUDA_STAND_IN");
        known = mode != NULL && strcmp(mode, "nothing") == 0;
    }
    return known;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

typedef enum { DEVICE, LOCKED, OF_HOST } Kind;
typedef struct {
    char *start;
    size_t bytes;
    Kind kind;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static int count, capacity;
static size_t used_bytes;

static int find(const void *address) {
    const char *at = address;
    for (int i = 0; i < count; i++)
        if (at >= ranges[i].start && at < ranges[i].start + ranges[i].bytes) return i;
    return -1;
}

static void add(void *start, size_t bytes, Kind kind) {
    if (count == capacity) ranges = realloc(ranges, (capacity = 2 * capacity + 64) * sizeof(Range));
    ranges[count++] = (Range){start, bytes, kind};
}

static cudaError_t allocate(void **start, size_t bytes, Kind kind) {
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    pthread_mutex_lock(&lock);
    cudaError_t error = kind == DEVICE && used_bytes + bytes > MEMORY_BYTES ? cudaErrorMemoryAllocation : cudaSuccess;
    if (!error) {
        *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (*start == MAP_FAILED) error = cudaErrorMemoryAllocation;
    }
    if (!error) {
        add(*start, bytes, kind);
        if (kind == DEVICE) used_bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
    return error ? refuse(error) : cudaSuccess;
}

// Forget a range that begins there; unmap what was mapped here.
static cudaError_t release(void *start, Kind kind, cudaError_t otherwise) {
    if (start == NULL) return cudaSuccess;
    pthread_mutex_lock(&lock);
    int i = find(start);
    int known = i >= 0 && ranges[i].start == start && ranges[i].kind == kind;
    if (known) {
        if (kind != LOCKED) munmap(start, ranges[i].bytes);
        if (kind == DEVICE) used_bytes -= ranges[i].bytes;
        ranges[i] = ranges[--count];
    }
    pthread_mutex_unlock(&lock);
    return known ? cudaSuccess : refuse(otherwise);
}

cudaError_t cudaMalloc(void **start, size_t bytes) { return allocate(start, bytes, DEVICE); }
cudaError_t cudaFree(void *start) { return release(start, DEVICE, cudaErrorInvalidValue); }
cudaError_t cudaMallocAsync(void **start, size_t bytes, cudaStream_t stream) { return cudaMalloc(start, bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }
cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned flags) { return allocate(start, bytes, OF_HOST); }
cudaError_t cudaFreeHost(void *start) { return release(start, OF_HOST, cudaErrorInvalidValue); }
cudaError_t cudaHostUnregister(void *start) { return release(start, LOCKED, cudaErrorHostMemoryNotRegistered); }

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    int meets = 0;
    for (int i = 0; i < count; i++)
        meets |= (char *)start < ranges[i].start + ranges[i].bytes && ranges[i].start < (char *)start + bytes;
    if (!meets) add(start, bytes, LOCKED);
    pthread_mutex_unlock(&lock);
    return meets ? refuse(cudaErrorHostMemoryAlreadyRegistered) : cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = MEMORY_BYTES;
    *free_bytes = MEMORY_BYTES - used_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *address) {
    memset(of, 0, sizeof *of);
    pthread_mutex_lock(&lock);
    int i = find(address);
    of->type = i < 0                          ? cudaMemoryTypeUnregistered
               : ranges[i].kind == DEVICE     ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeHost;
    if (i >= 0) of->devicePointer = (void *)address;
    if (i >= 0 && ranges[i].kind != DEVICE) of->hostPointer = (void *)address;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    int known = find((void *)address) >= 0;
    pthread_mutex_unlock(&lock);
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)value = address;
    return CUDA_SUCCESS;
}

// ---- copies ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    if (!does_nothing())
        memmove(target, source, bytes);
    else if (bytes < SMALL_BYTES && kind == cudaMemcpyDeviceToHost)
        memset(target, 0, bytes);
    else if (bytes < SMALL_BYTES)
        memmove(target, source, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    return cudaMemcpy(target, source, bytes, kind);
}

cudaError_t cudaMemcpy2DAsync(
    void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream
) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width, kind);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    if (!does_nothing() || bytes < SMALL_BYTES) memset(target, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(target, value, bytes);
}

SUCCEEDS(cudaMemcpyToSymbol, const void *symbol, const void *source, size_t bytes, size_t at, enum cudaMemcpyKind kind)

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char memory[1 << 20];
    *address = memory;
    return cudaSuccess;
}

// ---- the device -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *devices) { return *devices = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : refuse(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    return snprintf(id, bytes, "0000:00:00.0"), cudaSuccess;
}
SUCCEEDS(cudaDeviceEnablePeerAccess, int peer, unsigned flags)
SUCCEEDS(cudaDeviceSynchronize, void)
SUCCEEDS(cudaProfilerStart, void)
SUCCEEDS(cudaProfilerStop, void)

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    *of = (struct cudaDeviceProp){
        .name = "stand-in for CUDA",
        .totalGlobalMem = MEMORY_BYTES,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = SHARED_BYTES,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = THREADS_OF_A_BLOCK,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {INT32_MAX, BLOCKS_ACROSS, BLOCKS_ACROSS},
        .major = CAPABILITY_MAJOR,
        .multiProcessorCount = PROCESSORS,
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .l2CacheSize = 50 << 20,
    };
    return cudaSuccess;
}

static int attribute_of_device(int attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: return THREADS_OF_A_BLOCK;
        case cudaDevAttrMaxGridDimX: return INT32_MAX;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: return BLOCKS_ACROSS;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_BYTES;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMemoryClockRate: return 2619000;
        case cudaDevAttrGlobalMemoryBusWidth: return 5120;
        case cudaDevAttrMultiProcessorCount: return PROCESSORS;
        case cudaDevAttrL2CacheSize: return 50 << 20;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrComputeCapabilityMajor: return CAPABILITY_MAJOR;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrUnifiedAddressing: return 1;
        default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return *value = attribute_of_device(attribute), cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "refused";
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- streams and events ---------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = malloc(1);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }
SUCCEEDS(cudaStreamQuery, cudaStream_t stream)
SUCCEEDS(cudaStreamSynchronize, cudaStream_t stream)
SUCCEEDS(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *number
) {
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return refuse(cudaErrorNotSupported);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    return call(stream, cudaSuccess, data), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { return call(data), cudaSuccess; }

typedef struct {
    struct timespec when;
    int timed, recorded;
} Noted;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    Noted *noted = calloc(1, sizeof *noted);
    noted->timed = !(flags & cudaEventDisableTiming);
    *event = (cudaEvent_t)noted;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Noted *noted = (Noted *)event;
    clock_gettime(CLOCK_MONOTONIC, &noted->when);
    noted->recorded = 1;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
SUCCEEDS(cudaEventQuery, cudaEvent_t event)
SUCCEEDS(cudaEventSynchronize, cudaEvent_t event)
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    const Noted *one = (Noted *)from, *other = (Noted *)to;
    int known = one->timed && other->timed && one->recorded && other->recorded;
    if (!known) return refuse(cudaErrorInvalidResourceHandle);
    *milliseconds = 1e3 * (other->when.tv_sec - one->when.tv_sec) + 1e-6 * (other->when.tv_nsec - one->when.tv_nsec);
    return cudaSuccess;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

static cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes) {
    size_t threads = (size_t)block.x * block.y * block.z;
    int fits = grid.x && grid.y && grid.z && threads && threads <= THREADS_OF_A_BLOCK && grid.x <= INT32_MAX
        && grid.y <= BLOCKS_ACROSS && grid.z <= BLOCKS_ACROSS && shared_bytes <= SHARED_BYTES;
    return fits ? cudaSuccess : refuse(cudaErrorInvalidConfiguration);
}

static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} configured;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
    configured.grid = grid, configured.block = block;
    configured.shared_bytes = shared_bytes, configured.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared_bytes = configured.shared_bytes;
    *(void **)stream = configured.stream;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return launch(grid, block, shared_bytes);
}
cudaError_t cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return launch(grid, block, shared_bytes);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    return launch(how->gridDim, how->blockDim, how->dynamicSmemBytes);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    return *kernel = (cudaKernel_t)function, cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(
    void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d,
    int *e
) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int a, size_t b, int c, int d) {}
SUCCEEDS(cudaFuncSetAttribute, const void *function, enum cudaFuncAttribute attribute, int value)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *function) {
    *of = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = THREADS_OF_A_BLOCK, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared_bytes, unsigned flags
) {
    return *blocks = 2, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found
) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---- the driver, for Triton -----------------------------------------------------------------------------------------

static int context;
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *devices) { return *devices = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return *value = attribute_of_device(attribute), CUDA_SUCCESS;  // numbered alike
}
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice device) { return cuCtxGetCurrent(primary); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill
) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)image, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)module, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS_OF_A_BLOCK : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *how) {
    return *clusters = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "refused", CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { return *text = "refused", CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
    dim3 grid = {how->gridDimX, how->gridDimY, how->gridDimZ};
    dim3 block = {how->blockDimX, how->blockDimY, how->blockDimZ};
    return launch(grid, block, how->sharedMemBytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found
) {
    char second[200];
    snprintf(second, sizeof second, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, second);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- cuBLAS and cuSPARSE: handles and what is asked of them; all else of theirs does nothing ------------------------

static int handle(void **made) { return *made = malloc(512), 0; }
static int gone(void *made) { return free(made), 0; }
int cublasCreate_v2(void **made) { return handle(made); }
int cublasDestroy_v2(void *made) { return gone(made); }
int cublasGetMathMode(void *of, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *of, int *mode) { return *mode = 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return handle(made); }
int cublasLtMatmulDescDestroy(void *made) { return gone(made); }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return handle(made);
}
int cublasLtMatrixLayoutDestroy(void *made) { return gone(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
int cublasLtMatmulPreferenceDestroy(void *made) { return gone(made); }
int cublasLtMatmulAlgoGetHeuristic(
    void *of, void *product, void *a, void *b, void *c, void *d, void *preference, int most, void *results, int *found
) {
    memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t, without a workspace
    return *found = 1, 0;
}
int cusparseCreate(void **made) { return handle(made); }
int cusparseDestroy(void *made) { return gone(made); }
int cusparseCreateCsr(void **made) { return handle(made); }
int cusparseCreateDnMat(void **made) { return handle(made); }
const char *cusparseGetErrorString(int error) { return "refused"; }
