// What happens to whole parameter buffers: AdamW, norms, checks.

// Elements that one block sums: fixed, so the order of a sum depends on its length only.
#define ELEMENTS_PER_BLOCK 16384

// One AdamW update with decoupled decay; the host has folded the corrections of both moments into `step` and `root`.
extern "C" __global__ void adamw(float* parameters, float* m, float* v, const float* gradient, float gradient_scale,
                                 float new1, float beta2, float new2, float keep, float step, float root, float epsilon,
                                 u64 n) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const float g = gradient[i] * gradient_scale;
        const float first = m[i] + new1 * (g - m[i]);
        const float second = v[i] * beta2 + new2 * g * g;
        m[i] = first;
        v[i] = second;
        parameters[i] = parameters[i] * keep - step * (first / (sqrtf(second) / root + epsilon));
    }
}

// parts[b] = the sum of squares of block b's elements.
extern "C" __global__ void sum_of_squares_parts(const float* x, u64 n, double* parts) {
    const u64 first = (u64)blockIdx.x * ELEMENTS_PER_BLOCK;
    const u64 end = first + ELEMENTS_PER_BLOCK < n ? first + ELEMENTS_PER_BLOCK : n;
    double sum = 0.0;
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        sum += (double)x[i] * (double)x[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
    }
}

// The sum of the parts; one block.
extern "C" __global__ void sum_parts(const double* parts, u64 count, double* sum) {
    double part = 0.0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        part += parts[i];
    }
    part = block_sum(part);
    if (threadIdx.x == 0) {
        *sum = part;
    }
}

// Sets `found` to 1 if an element is infinite or no number; threads that write all write the same.
extern "C" __global__ void find_not_finite(const float* x, u64 n, u32* found) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        if ((__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u) {
            *found = 1;
        }
    }
}

// What an element adds to the checksum: see device/checksum.rs.
__device__ inline u64 checksum_of(u32 bits, u32 place) {
    u32 key = (place ^ (place >> 16)) * 0x7feb352du;
    key = (key ^ (key >> 15)) * 0x846ca68bu;
    key ^= key >> 16;
    return (u64)(bits ^ key) * (u64)(key * 0x9e3779b1u | 1u);
}

// parts[b] = the sum modulo 2^64 of what block b's elements add.
extern "C" __global__ void checksum_parts(const u32* words, u64 n, u64* parts) {
    const u64 first = (u64)blockIdx.x * ELEMENTS_PER_BLOCK;
    const u64 end = first + ELEMENTS_PER_BLOCK < n ? first + ELEMENTS_PER_BLOCK : n;
    u64 sum = 0;
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        sum += checksum_of(words[i], (u32)i);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
    }
}

// The sum of the parts modulo 2^64; one block.
extern "C" __global__ void sum_words(const u64* parts, u64 count, u64* sum) {
    u64 part = 0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        part += parts[i];
    }
    part = block_sum(part);
    if (threadIdx.x == 0) {
        *sum = part;
    }
}
