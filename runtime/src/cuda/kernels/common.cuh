// What all kernels share. This text stands before each of them, so none includes a header and NVRTC needs no folder.
//
// Rules of all kernels: matrices are row-major; sums have an order that depends on the shape only; a row's result does
// not depend on the rows beside it; no atomics, no inline PTX, no tensor-core intrinsics (products are cuBLASLt's).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WHOLE_WARP 0xffffffffu

__device__ inline float infinity() {
    return __uint_as_float(0x7f800000u);
}

// bf16 has the upper half of an f32's bits.
__device__ inline float from_bf16(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

// To the nearest, ties to even; what is not a number stays so.
__device__ inline u16 to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (u16)((bits >> 16) | 64u);
    }
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// IEEE binary16, exactly.
__device__ inline float from_f16(u16 bits) {
    const u32 sign = (u32)(bits & 0x8000u) << 16;
    const u32 exponent = (bits >> 10) & 31u;
    const u32 mantissa = bits & 1023u;
    if (exponent == 31u) {
        return __uint_as_float(sign | 0x7f800000u | (mantissa << 13));
    }
    if (exponent == 0u) {
        const float magnitude = (float)mantissa / 16777216.0f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// OCP's E4M3: no infinities, one pattern that is not a number.
__device__ inline float from_e4m3(u8 code) {
    const u32 sign = (u32)(code & 128u) << 24;
    const u32 exponent = (code >> 3) & 15u;
    const u32 mantissa = code & 7u;
    if (exponent == 15u && mantissa == 7u) {
        return __uint_as_float(sign | 0x7fc00000u);
    }
    if (exponent == 0u) {
        return __uint_as_float(sign | __float_as_uint((float)mantissa / 512.0f));
    }
    return __uint_as_float(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// OCP's E2M1.
__device__ inline float from_e2m1(u32 code) {
    const u32 sign = (code & 8u) << 28;
    const u32 exponent = (code >> 1) & 3u;
    const u32 mantissa = code & 1u;
    if (exponent == 0u) {
        return __uint_as_float(sign | (mantissa ? 0x3f000000u : 0u));
    }
    return __uint_as_float(sign | ((exponent + 126u) << 23) | (mantissa << 22));
}

// OCP's E8M0: 2^(exponent - 127); the smallest one is subnormal.
__device__ inline float power_of_two(u8 exponent) {
    if (exponent == 0u) {
        return __uint_as_float(1u << 22);
    }
    return exponent == 255u ? __uint_as_float(0x7fc00000u) : __uint_as_float((u32)exponent << 23);
}

// Sum over the `width` neighbours of a lane, a power of two; all of them get it.
__device__ inline float lane_sum(float value, int width) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(WHOLE_WARP, value, offset);
    }
    return value;
}

__device__ inline float lane_max(float value, int width) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(WHOLE_WARP, value, offset));
    }
    return value;
}

// Sum over a block of whole warps, of float, double or u64; all threads get it.
template <typename T>
__device__ inline T block_sum(T value) {
    __shared__ T parts[32];
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(WHOLE_WARP, value, offset);
    }
    __syncthreads(); // an earlier sum may still be read
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = value;
    }
    __syncthreads();
    T sum = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) {
        sum += parts[warp];
    }
    return sum;
}

// A value and where it is.
struct Place {
    float value;
    u32 index;
};

// The larger one; of equal ones the first.
__device__ inline Place larger(Place a, Place b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ inline Place lane_largest(Place place) {
    for (int offset = 16; offset > 0; offset /= 2) {
        Place other;
        other.value = __shfl_xor_sync(WHOLE_WARP, place.value, offset);
        other.index = __shfl_xor_sync(WHOLE_WARP, place.index, offset);
        place = larger(place, other);
    }
    return place;
}

// The first largest element of a row over a block of whole warps; all threads get it.
__device__ inline Place block_largest(const float* row, u32 cols) {
    __shared__ Place parts[32];
    Place place;
    place.value = -infinity();
    place.index = 0xffffffffu;
    for (u32 col = threadIdx.x; col < cols; col += blockDim.x) {
        Place here;
        here.value = row[col];
        here.index = col;
        place = larger(place, here);
    }
    place = lane_largest(place);
    __syncthreads(); // an earlier result may still be read
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = place;
    }
    __syncthreads();
    place = parts[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) {
        place = larger(place, parts[warp]);
    }
    // A row of nothing but what is no number.
    place.index = place.index == 0xffffffffu ? 0u : place.index;
    return place;
}
