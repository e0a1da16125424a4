// Lets g++ compile the text of a CUDA C++ kernel and run it on the CPU, one fiber per CUDA thread.
//
// It is stricter than a GPU: threads of a block that wait at different barriers, a shuffle whose mask names a lane that
// is not there, and a write behind the block's shared memory are errors; shared memory starts as not-a-number. Threads
// run one at a time, from the first to the last or (STANDIN_REVERSE) from the last to the first, each until it waits: a
// forgotten barrier shows as a difference between the two orders.
//
// Not here: atomics, inline PTX, tensor cores, textures, several blocks at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <tuple>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// A kernel's declaration of dynamic shared memory is left out by the stand-in compiler: the array is the one below.
#define __shared__ static

struct standin_index {
    unsigned x, y, z;
};
static standin_index threadIdx, blockIdx, blockDim, gridDim;

// Dynamic shared memory of the block, and a strip behind it that nobody may write to.
alignas(256) static float shared[64 * 1024 + 64];

namespace standin {

const unsigned WARP = 32;
const size_t STACK_BYTES = 64 * 1024;
const uint32_t POISON = 0x7fedbeefu; // not a number

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

#if defined(__x86_64__)
// Saves the callee's registers and the stack pointer to *from and goes on with the stack `to`.
extern "C" __attribute__((visibility("hidden"))) void standin_switch(void** from, void* to);
asm(R"(
.text
.hidden standin_switch
.type standin_switch, @function
standin_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size standin_switch, .-standin_switch
)");
struct Context {
    void* stack = nullptr;
};
inline void change(Context& from, Context& to) {
    standin_switch(&from.stack, to.stack);
}
inline void prepare(Context& context, char* stack, void (*entry)()) {
    // As if `entry` had been called: the stack is 8 off a multiple of 16.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES - 16);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) {
        *--top = nullptr;
    }
    context.stack = top;
}
#else
struct Context {
    ucontext_t state;
};
inline void change(Context& from, Context& to) {
    swapcontext(&from.state, &to.state);
}
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = STACK_BYTES;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#endif

struct Thread {
    Context context;
    State state = READY;
    unsigned mask = 0;     // lanes that it waits for
    unsigned exchanges = 0; // shuffles so far
    standin_index index;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<uint64_t> lanes; // two values of each thread: a shuffle uses the other one than the shuffle before
    Context scheduler;
    unsigned current = 0, alive = 0, waiting = 0;
    void (*body)(void*) = nullptr;
    void* arguments = nullptr;
    const char* fault = nullptr;
};
static Block block;

inline void leave() {
    change(block.threads[block.current].context, block.scheduler);
}

inline void release_block() {
    if (block.waiting > 0 && block.waiting == block.alive) {
        for (Thread& thread : block.threads) {
            thread.state = thread.state == AT_BLOCK_BARRIER ? READY : thread.state;
        }
        block.waiting = 0;
    }
}

inline void run_thread() {
    block.body(block.arguments);
    block.threads[block.current].state = DONE;
    --block.alive;
    release_block();
    leave();
}

inline void fail(const char* why) {
    block.fault = block.fault ? block.fault : why;
    for (;;) {
        leave();
    }
}

inline void wait_for_block() {
    Thread& self = block.threads[block.current];
    self.state = AT_BLOCK_BARRIER;
    ++block.waiting;
    release_block();
    if (self.state != READY) {
        leave();
    }
}

// Waits for the lanes of `mask`, which wait with the same mask.
inline void wait_for_warp(unsigned mask) {
    const unsigned own = block.current, first = own / WARP * WARP;
    Thread& self = block.threads[own];
    if (!(mask >> (own - first) & 1)) {
        fail("a lane is not in the mask of its own shuffle");
    }
    self.state = AT_WARP_BARRIER;
    self.mask = mask;
    bool all = true;
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) {
            continue;
        }
        if (first + lane >= block.threads.size() || block.threads[first + lane].state == DONE) {
            fail("a shuffle's mask names a lane that has ended or never was");
        }
        const Thread& other = block.threads[first + lane];
        all = all && other.state == AT_WARP_BARRIER && other.mask == mask;
    }
    if (!all) {
        leave();
        return;
    }
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (mask >> lane & 1) {
            block.threads[first + lane].state = READY;
        }
    }
}

template <class T> T exchange(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "shuffles move 8 bytes at most");
    const unsigned own = block.current, first = own / WARP * WARP, parity = block.threads[own].exchanges++ % 2;
    memcpy(&block.lanes[2 * own + parity], &value, sizeof(T));
    wait_for_warp(mask);
    if (!(mask >> source & 1)) {
        fail("a shuffle reads a lane that is not in its mask");
    }
    memcpy(&value, &block.lanes[2 * (first + source) + parity], sizeof(T));
    return value;
}

struct Launch {
    unsigned grid[3], threads[3], shared_bytes;
    int reverse;
    const char* fault; // out: what went wrong
};

inline bool run_block(unsigned shared_bytes, bool reverse, char* stacks) {
    const unsigned count = block.threads.size();
    for (size_t i = 0; i < sizeof(shared) / sizeof(float); ++i) {
        memcpy(shared + i, &POISON, sizeof(float));
    }
    block.alive = count;
    block.waiting = 0;
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = block.threads[i];
        thread.state = READY;
        thread.exchanges = 0;
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        prepare(thread.context, stacks + i * STACK_BYTES, run_thread);
    }
    while (block.alive > 0) {
        bool moved = false;
        for (unsigned place = 0; place < count; ++place) {
            const unsigned i = reverse ? count - 1 - place : place;
            if (block.threads[i].state != READY) {
                continue;
            }
            moved = true;
            block.current = i;
            threadIdx = block.threads[i].index;
            change(block.scheduler, block.threads[i].context);
            if (block.fault) {
                return false;
            }
        }
        if (!moved) {
            block.fault = "threads of a block wait at different barriers";
            return false;
        }
    }
    for (size_t i = (shared_bytes + 3) / 4; i < sizeof(shared) / sizeof(float); ++i) {
        if (memcmp(shared + i, &POISON, sizeof(float)) != 0) {
            block.fault = "a block wrote behind its shared memory";
            return false;
        }
    }
    return true;
}

template <class... A> struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I> void run(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    }
    static void body(void* self) {
        static_cast<Call*>(self)->run(std::index_sequence_for<A...>());
    }
};

template <class... A> int launch(Launch* how, void** arguments, void (*kernel)(A...)) {
    const unsigned count = how->threads[0] * how->threads[1] * how->threads[2];
    if (count == 0 || count > 1024 || how->shared_bytes > sizeof(shared) - 256) {
        how->fault = "a launch of a shape that no GPU takes";
        return 1;
    }
    static char* stacks = nullptr;
    if (!stacks) {
        void* memory = mmap(nullptr, 1024 * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            how->fault = "no memory for the threads' stacks";
            return 1;
        }
        stacks = static_cast<char*>(memory);
    }
    Call<A...> call{kernel, arguments};
    block.body = &Call<A...>::body;
    block.arguments = &call;
    block.fault = nullptr;
    block.threads.assign(count, Thread());
    block.lanes.assign(2 * count, 0);
    gridDim = {how->grid[0], how->grid[1], how->grid[2]};
    blockDim = {how->threads[0], how->threads[1], how->threads[2]};
    const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    for (uint64_t place = 0; place < blocks; ++place) {
        const uint64_t b = how->reverse ? blocks - 1 - place : place;
        blockIdx = {unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y),
                    unsigned(b / (uint64_t(gridDim.x) * gridDim.y))};
        if (!run_block(how->shared_bytes, how->reverse, stacks)) {
            how->fault = block.fault;
            return 1;
        }
    }
    return 0;
}

} // namespace standin

// The launcher of a kernel, found by its name.
#define STANDIN_KERNEL(NAME)                                                                                           \
    extern "C" __attribute__((visibility("default"))) int standin_launch_##NAME(standin::Launch* how, void** arguments) {                                     \
        return standin::launch(how, arguments, &NAME);                                                                 \
    }

inline void __syncthreads() {
    standin::wait_for_block();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    standin::wait_for_warp(mask);
}
template <class T> T __shfl_sync(unsigned mask, T value, int source) {
    return standin::exchange(mask, value, unsigned(source) % standin::WARP);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flipped) {
    return standin::exchange(mask, value, (standin::block.current % standin::WARP) ^ unsigned(flipped));
}

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
// One rounding each, never fused.
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float __fadd_rn(float a, float b) {
    volatile float sum = a + b;
    return sum;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
