// A CUDA driver without a GPU: the functions that eaglet calls, "device" memory on the host, kernels run on the CPU.
//
//   g++ -std=c++17 -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 driver.cpp -o libcuda.so.1 -ldl
//
// Kernels are shared objects made by the stand-in for NVRTC and run when they are launched. It is stricter than a
// driver: every copy must lie inside one allocation, memory is full of not-a-number at first, also what a pool gives again, and
// what was written around an allocation ends the process when the allocation is freed.
//
// The environment decides what machine it plays:
//   EAGLET_STANDIN_DEVICES     number of devices (1); CUDA_VISIBLE_DEVICES hides some, by number or uuid
//   EAGLET_STANDIN_MEMORY      bytes of each (8 GiB)
//   EAGLET_STANDIN_CAPABILITY  compute capability (9.0)
//   EAGLET_STANDIN_REVERSE     threads and blocks run from the last to the first
//   EAGLET_STANDIN_POOLS       0: devices have no memory pools
//   EAGLET_STANDIN_ISLANDS     devices cannot read each other's memory
//   EAGLET_STANDIN_FAULT       what goes wrong, by number from 1, separated by commas: alloc:N (that allocation finds no
//                              room), launch:N (that kernel fails), hang:N (that kernel never ends), die:N (the process
//                              is killed in that kernel); with @D only on the machine's device D
//   EAGLET_STANDIN_ONCE        a file that the first fault makes: no fault strikes where it is, in any process

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <csignal>
#include <unistd.h>
#include <vector>

namespace {

enum Code {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
};

// As in cuda_host.h.
struct Launch {
    unsigned grid[3], threads[3], shared_bytes;
    int reverse;
    const char* fault;
};
typedef int (*Launcher)(Launch*, void**);

struct Module {
    void* library;
};
struct Function {
    Launcher launcher;
    std::string name;
    int shared_limit = 48 * 1024;
};
struct Device {
    int machine_number; // whatever this process may see
    size_t used = 0;
    int retained = 0;
};
// Kernels and copies run when they are asked for. What other libraries do on a stream is begun and ends later; until
// then whoever asks for more waits, and queries say "not yet".
struct Stream {
    Device* device;
    uint64_t begun = 0, ended = 0;
};
struct Event {
    Device* device;
    Stream* stream = nullptr;
    uint64_t begun = 0;
};
struct Pool {
    Device* device;
    uint64_t threshold = 0, reserved = 0, used = 0, most_reserved = 0, most_used = 0;
};
struct Allocation {
    size_t bytes;
    Device* device;
    Pool* pool = nullptr;
};
// `CUmemPoolProps`, as far as all versions agree.
struct PoolProperties {
    uint32_t allocation, handles, location;
    int32_t device;
    void* security;
    unsigned char rest[64];
};
// What a pool takes of its device at a time.
const size_t POOL_BYTES = 2 << 20;

const size_t FENCE = 256;
const unsigned char FENCE_BYTE = 0xa5;
const size_t SHARED_MOST = 227 * 1024;

std::mutex lock;
std::condition_variable changed;
bool initialised = false;
Device devices[64];
std::map<uintptr_t, Allocation> allocations;
int sticky = SUCCESS; // a failed kernel poisons its process's context, as on a GPU
long allocated = 0, launched = 0;
thread_local Device* current = nullptr;

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

// What tells the machine's device `number` from all others.
void uuid_of(int number, unsigned char* bytes) {
    memcpy(bytes, "stand-in GPU   ", 15);
    bytes[15] = static_cast<unsigned char>(number);
}

std::string uuid_text(int number) {
    unsigned char bytes[16];
    uuid_of(number, bytes);
    std::string text = "GPU";
    for (int i = 0; i < 16; ++i) {
        char digits[4];
        snprintf(digits, sizeof(digits), "%02x", bytes[i]);
        text += (i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(digits);
    }
    return text;
}

// The machine's numbers of the devices that this process may see. As with the real driver, what it does not know in
// CUDA_VISIBLE_DEVICES hides all that follows.
std::vector<int> visible() {
    const long setting_count = setting("EAGLET_STANDIN_DEVICES", 1);
    const int count = int(setting_count < 0 ? 0 : setting_count > 64 ? 64 : setting_count);
    std::vector<int> seen;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int i = 0; i < count; ++i) {
            seen.push_back(i);
        }
        return seen;
    }
    for (std::string names = text; !names.empty();) {
        const std::string name = names.substr(0, names.find(','));
        names = names.size() > name.size() ? names.substr(name.size() + 1) : "";
        int found = -1;
        for (int i = 0; i < count; ++i) {
            if (name == std::to_string(i) || (name.rfind("GPU-", 0) == 0 && uuid_text(i).rfind(name, 0) == 0)) {
                found = i;
            }
        }
        if (found < 0) {
            break;
        }
        seen.push_back(found);
    }
    return seen;
}

int device_count() {
    return int(visible().size());
}

size_t device_memory() {
    return size_t(setting("EAGLET_STANDIN_MEMORY", 8L << 30));
}

// Whether faults may strike: once in all processes that name the same file.
bool is_first() {
    const char* once = getenv("EAGLET_STANDIN_ONCE");
    if (!once || !*once) {
        return true;
    }
    const int file = open(once, O_CREAT | O_EXCL | O_WRONLY, 0644);
    if (file >= 0) {
        close(file);
    }
    return file >= 0;
}

// Whether the fault `kind` is to strike at this number.
bool strikes(const char* kind, long number) {
    const char* text = getenv("EAGLET_STANDIN_FAULT");
    for (std::string faults = text ? text : ""; !faults.empty();) {
        const std::string fault = faults.substr(0, faults.find(','));
        faults = faults.size() > fault.size() ? faults.substr(fault.size() + 1) : "";
        const size_t colon = fault.find(':');
        const size_t at = fault.find('@');
        const bool here = at == std::string::npos || (current && atol(fault.c_str() + at + 1) == current->machine_number);
        if (colon != std::string::npos && fault.substr(0, colon) == kind && here &&
            atol(fault.c_str() + colon + 1) == number) {
            return is_first();
        }
    }
    return false;
}

int usable() {
    return !initialised ? NOT_INITIALIZED : !current ? INVALID_CONTEXT : sticky;
}

// Whether the bytes lie inside one allocation.
bool holds(uintptr_t pointer, size_t bytes) {
    auto after = allocations.upper_bound(pointer);
    if (after == allocations.begin()) {
        return false;
    }
    --after;
    return pointer + bytes <= after->first + after->second.bytes;
}

void check_fence(uintptr_t pointer, size_t bytes) {
    const unsigned char* before = reinterpret_cast<unsigned char*>(pointer - FENCE);
    const unsigned char* behind = reinterpret_cast<unsigned char*>(pointer + bytes);
    for (size_t i = 0; i < FENCE; ++i) {
        if (before[i] != FENCE_BYTE || behind[i] != FENCE_BYTE) {
            fprintf(stderr, "stand-in driver: something wrote %s an allocation of %zu bytes\n",
                    before[i] != FENCE_BYTE ? "before" : "behind", bytes);
            abort();
        }
    }
}

// Memory that is full of not-a-number, with a fence around it.
int place(size_t bytes, Pool* pool, uint64_t* pointer) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes + 2 * FENCE) != 0) {
        return OUT_OF_MEMORY;
    }
    unsigned char* start = static_cast<unsigned char*>(memory) + FENCE;
    memset(memory, FENCE_BYTE, FENCE);
    memset(start, 0xff, bytes);
    memset(start + bytes, FENCE_BYTE, FENCE);
    *pointer = reinterpret_cast<uint64_t>(start);
    allocations[*pointer] = {bytes, current, pool};
    return SUCCESS;
}

// Gives memory back to where it came from. What is in a pool stays with its device up to the threshold.
int remove(uint64_t pointer) {
    auto found = allocations.find(pointer);
    if (found == allocations.end()) {
        return INVALID_VALUE;
    }
    const Allocation& gone = found->second;
    check_fence(pointer, gone.bytes);
    if (Pool* pool = gone.pool) {
        pool->used -= gone.bytes;
        const uint64_t kept = std::min(std::max(pool->used, pool->threshold), pool->reserved);
        pool->device->used -= pool->reserved - kept;
        pool->reserved = kept;
    } else {
        gone.device->used -= gone.bytes;
    }
    allocations.erase(found);
    free(reinterpret_cast<void*>(pointer - FENCE));
    return SUCCESS;
}

// Waits until the stream has ended what was begun so far.
void wait_for(Stream* stream, uint64_t begun, std::unique_lock<std::mutex>& guard) {
    changed.wait(guard, [&] { return stream->ended >= begun; });
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define GUARD std::unique_lock<std::mutex> guard(lock)
// Whatever is asked of a stream comes after what was begun on it; no stream is the default one, which is never busy.
#define IN_ORDER                                                                                                       \
    if (stream) {                                                                                                      \
        wait_for(static_cast<Stream*>(stream), static_cast<Stream*>(stream)->begun, guard);                            \
    }                                                                                                                  \
    USABLE
#define USABLE                                                                                                         \
    if (int code = usable()) {                                                                                         \
        return code;                                                                                                   \
    }

API cuInit(unsigned) {
    GUARD;
    const std::vector<int> seen = visible();
    for (size_t i = 0; i < seen.size(); ++i) {
        devices[i].machine_number = seen[i];
    }
    initialised = true;
    return device_count() == 0 ? NO_DEVICE : SUCCESS;
}

API cuDriverGetVersion(int* version) {
    *version = 13020;
    return SUCCESS;
}

API cuGetErrorName(int code, const char** name) {
    switch (code) {
    case SUCCESS: *name = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    default: *name = nullptr; return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuGetErrorString(int code, const char** text) {
    *text = code == LAUNCH_FAILED ? "unspecified launch failure" : "the stand-in driver says so";
    return SUCCESS;
}

API cuDeviceGetCount(int* count) {
    *count = device_count();
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

API cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < device_count() ? SUCCESS : INVALID_DEVICE;
}

API cuDeviceGetName(char* name, int bytes, int device) {
    snprintf(name, size_t(bytes), "stand-in GPU %d", devices[device].machine_number);
    return SUCCESS;
}

API cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    uuid_of(devices[device].machine_number, uuid);
    return SUCCESS;
}

API cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = device_memory();
    return SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, int device) {
    const char* capability = getenv("EAGLET_STANDIN_CAPABILITY");
    int major = 9, minor = 0;
    if (capability) {
        sscanf(capability, "%d.%d", &major, &minor);
    }
    switch (attribute) {
    case 16: *value = 4; break;                    // multiprocessors
    case 33: *value = devices[device].machine_number + 1; break; // PCI bus
    case 34: *value = 0; break;                    // PCI device
    case 50: *value = 0; break;                    // PCI domain
    case 75: *value = major; break;
    case 76: *value = minor; break;
    case 97: *value = int(SHARED_MOST); break;     // shared memory of a block, by permission
    case 115: *value = setting("EAGLET_STANDIN_POOLS", 1) != 0; break;
    default: *value = 0; return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer && !getenv("EAGLET_STANDIN_ISLANDS");
    return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void** context, int device) {
    GUARD;
    if (!initialised) {
        return NOT_INITIALIZED;
    }
    if (device < 0 || device >= device_count()) {
        return INVALID_DEVICE;
    }
    ++devices[device].retained;
    *context = &devices[device];
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    GUARD;
    return --devices[device].retained < 0 ? INVALID_CONTEXT : SUCCESS;
}

API cuCtxSetCurrent(void* context) {
    current = static_cast<Device*>(context);
    return SUCCESS;
}

API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    GUARD;
    USABLE;
    *total = device_memory();
    *free_bytes = *total - current->used;
    return SUCCESS;
}

API cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
    GUARD;
    USABLE;
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (strikes("alloc", ++allocated) || bytes > device_memory() - current->used) {
        return OUT_OF_MEMORY;
    }
    if (int code = place(bytes, nullptr, pointer)) {
        return code;
    }
    current->used += bytes;
    return SUCCESS;
}

API cuMemFree_v2(uint64_t pointer) {
    GUARD;
    return remove(pointer);
}

API cuMemPoolCreate(void** pool, const PoolProperties* properties) {
    GUARD;
    if (!initialised) {
        return NOT_INITIALIZED;
    }
    const PoolProperties& wish = *properties;
    const PoolProperties none = {};
    const bool plain = wish.allocation == 1 && wish.handles == 0 && wish.location == 1 && !wish.security &&
                       memcmp(wish.rest, none.rest, sizeof(none.rest)) == 0;
    if (!plain || wish.device < 0 || wish.device >= device_count()) {
        return INVALID_VALUE;
    }
    *pool = new Pool{&devices[wish.device]};
    return SUCCESS;
}

API cuMemPoolDestroy(void* asked) {
    GUARD;
    USABLE; // a context that has failed gave nothing back
    Pool* pool = static_cast<Pool*>(asked);
    if (pool->used > 0) {
        fprintf(stderr, "stand-in driver: a pool is destroyed of which %llu bytes are in use\n", (unsigned long long)pool->used);
        abort();
    }
    pool->device->used -= pool->reserved;
    delete pool;
    return SUCCESS;
}

API cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    GUARD;
    if (attribute != 4) {
        return INVALID_VALUE;
    }
    memcpy(&static_cast<Pool*>(pool)->threshold, value, sizeof(uint64_t));
    return SUCCESS;
}

API cuMemPoolGetAttribute(void* asked, int attribute, void* value) {
    GUARD;
    const Pool& pool = *static_cast<Pool*>(asked);
    const uint64_t values[] = {pool.threshold, pool.reserved, pool.most_reserved, pool.used, pool.most_used};
    if (attribute < 4 || attribute > 8) {
        return INVALID_VALUE;
    }
    memcpy(value, &values[attribute - 4], sizeof(uint64_t));
    return SUCCESS;
}

API cuMemAllocFromPoolAsync(uint64_t* pointer, size_t bytes, void* asked, void* stream) {
    GUARD;
    IN_ORDER;
    Pool* pool = static_cast<Pool*>(asked);
    if (bytes == 0 || pool->device != current) {
        return INVALID_VALUE;
    }
    const uint64_t used = pool->used + bytes;
    const uint64_t grown = used <= pool->reserved ? 0 : (used - pool->reserved + POOL_BYTES - 1) / POOL_BYTES * POOL_BYTES;
    if (strikes("alloc", ++allocated) || bytes > device_memory() || grown > device_memory() - current->used) {
        return OUT_OF_MEMORY;
    }
    if (int code = place(bytes, pool, pointer)) {
        return code;
    }
    current->used += grown;
    pool->reserved += grown;
    pool->used = used;
    pool->most_reserved = std::max(pool->most_reserved, pool->reserved);
    pool->most_used = std::max(pool->most_used, used);
    return SUCCESS;
}

API cuMemFreeAsync(uint64_t pointer, void* stream) {
    GUARD;
    IN_ORDER;
    return remove(pointer);
}

API cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    GUARD;
    USABLE;
    return posix_memalign(pointer, 4096, bytes) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

API cuMemFreeHost(void* pointer) {
    free(pointer);
    return SUCCESS;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    GUARD;
    IN_ORDER;
    if (!holds(to, bytes)) {
        return INVALID_VALUE;
    }
    memcpy(reinterpret_cast<void*>(to), from, bytes);
    return SUCCESS;
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    GUARD;
    IN_ORDER;
    if (!holds(from, bytes)) {
        return INVALID_VALUE;
    }
    memcpy(to, reinterpret_cast<void*>(from), bytes);
    return SUCCESS;
}

API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    GUARD;
    IN_ORDER;
    if (!holds(from, bytes) || !holds(to, bytes)) {
        return INVALID_VALUE;
    }
    memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return SUCCESS;
}

API cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
    GUARD;
    IN_ORDER;
    if (!holds(to, bytes)) {
        return INVALID_VALUE;
    }
    memset(reinterpret_cast<void*>(to), value, bytes);
    return SUCCESS;
}

API cuStreamCreate(void** stream, unsigned) {
    GUARD;
    USABLE;
    *stream = new Stream{current, 0, 0};
    return SUCCESS;
}

API cuStreamDestroy_v2(void* stream) {
    delete static_cast<Stream*>(stream);
    return SUCCESS;
}

API cuStreamSynchronize(void* stream) {
    GUARD;
    IN_ORDER;
    return SUCCESS;
}

API cuStreamQuery(void* stream) {
    GUARD;
    USABLE;
    const Stream* asked = static_cast<Stream*>(stream);
    return asked->ended < asked->begun ? NOT_READY : SUCCESS;
}

API cuStreamWaitEvent(void*, void* event, unsigned) {
    GUARD;
    USABLE;
    Event* mark = static_cast<Event*>(event);
    if (mark->stream) {
        wait_for(mark->stream, mark->begun, guard);
    }
    return usable();
}

// For the stand-in of another library: something begins on the stream, or ends.
extern "C" __attribute__((visibility("default"))) void standin_stream_begin(void* stream) {
    GUARD;
    ++static_cast<Stream*>(stream)->begun;
}

extern "C" __attribute__((visibility("default"))) void standin_stream_end(void* stream) {
    GUARD;
    ++static_cast<Stream*>(stream)->ended;
    changed.notify_all();
}

API cuEventCreate(void** event, unsigned) {
    GUARD;
    USABLE;
    *event = new Event{current, nullptr, 0};
    return SUCCESS;
}

API cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    return SUCCESS;
}

API cuEventRecord(void* event, void* stream) {
    GUARD;
    USABLE;
    Event* mark = static_cast<Event*>(event);
    mark->stream = static_cast<Stream*>(stream);
    mark->begun = mark->stream->begun;
    return SUCCESS;
}

API cuEventQuery(void* event) {
    GUARD;
    USABLE;
    const Event* mark = static_cast<Event*>(event);
    return mark->stream && mark->stream->ended < mark->begun ? NOT_READY : SUCCESS;
}

API cuEventSynchronize(void* event) {
    GUARD;
    USABLE;
    Event* mark = static_cast<Event*>(event);
    if (mark->stream) {
        wait_for(mark->stream, mark->begun, guard);
    }
    return usable();
}

API cuModuleLoadData(void** module, const void* image) {
    GUARD;
    USABLE;
    // A module is an ELF file, here as on a GPU; its section headers are the last thing in it.
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof(header));
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_type != ET_DYN) {
        return INVALID_IMAGE;
    }
    const size_t bytes = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
    const int file = memfd_create("module", 0);
    if (file < 0 || write(file, image, bytes) != ssize_t(bytes)) {
        return OUT_OF_MEMORY;
    }
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "stand-in driver: %s\n", dlerror());
        close(file);
        return INVALID_IMAGE;
    }
    // The file stays open: the loader tells libraries apart by their paths.
    *module = new Module{library};
    return SUCCESS;
}

API cuModuleUnload(void* module) {
    Module* loaded = static_cast<Module*>(module);
    dlclose(loaded->library);
    delete loaded;
    return SUCCESS;
}

API cuModuleGetFunction(void** function, void* module, const char* name) {
    GUARD;
    USABLE;
    void* launcher = dlsym(static_cast<Module*>(module)->library, (std::string("standin_launch_") + name).c_str());
    if (!launcher) {
        return NOT_FOUND;
    }
    *function = new Function{reinterpret_cast<Launcher>(launcher), name}; // as on a GPU, it is the module's
    return SUCCESS;
}

API cuFuncGetAttribute(int* value, int attribute, void* function) {
    switch (attribute) {
    case 0: *value = 1024; break; // threads of a block
    case 1:                       // static shared memory
    case 3: *value = 0; break;    // local memory
    case 4: *value = 32; break;   // registers
    case 8: *value = static_cast<Function*>(function)->shared_limit; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8 || value < 0 || size_t(value) > SHARED_MOST) {
        return INVALID_VALUE;
    }
    static_cast<Function*>(function)->shared_limit = value;
    return SUCCESS;
}

API cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void**) {
    GUARD;
    USABLE;
    Function* kernel = static_cast<Function*>(function);
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_x > 0x7fffffffu || grid_y > 65535 || grid_z > 65535 ||
        block_x * block_y * block_z == 0 || block_x * block_y * block_z > 1024 ||
        shared_bytes > unsigned(kernel->shared_limit)) {
        return INVALID_VALUE;
    }
    ++launched;
    if (strikes("die", launched)) {
        raise(SIGKILL);
    }
    if (strikes("hang", launched)) {
        ++static_cast<Stream*>(stream)->begun; // and nothing ends it
        return SUCCESS;
    }
    IN_ORDER;
    if (strikes("launch", launched)) {
        sticky = LAUNCH_FAILED;
        return SUCCESS; // launches are asynchronous: the failure shows when somebody waits
    }
    Launch how = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes,
                  getenv("EAGLET_STANDIN_REVERSE") != nullptr, nullptr};
    if (kernel->launcher(&how, arguments) != 0) {
        fprintf(stderr, "stand-in driver: kernel %s: %s\n", kernel->name.c_str(), how.fault);
        sticky = LAUNCH_FAILED;
    }
    return SUCCESS;
}
