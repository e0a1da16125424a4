// Rows by their numbers: gather, scatter, and weights that stay packed until they are used. The host has checked the
// numbers before it sends them. blockIdx.x is the row of the result, columns by y.

#define EACH_COLUMN(c, cols)                                                                                           \
    for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < (cols); c += gridDim.y * blockDim.x)

// out[i] = table[rows[i]].
extern "C" __global__ void gather(const float* table, u64 table_stride, const u32* rows, float* out, u64 out_stride,
                                  u32 cols) {
    const float* from = table + rows[blockIdx.x] * table_stride;
    float* to = out + blockIdx.x * out_stride;
    EACH_COLUMN(c, cols) {
        to[c] = from[c];
    }
}

// target[touched[b]] += factors[i] * source[i] for i in order[starts[b]..starts[b + 1]], in this order; without factors
// every one is 1. Each target row belongs to one block, so nothing races and the order is that of the caller's list.
extern "C" __global__ void scatter_add(const float* source, u64 source_stride, const u32* touched, const u32* starts,
                                       const u32* order, const float* factors, float* target, u64 target_stride,
                                       u32 cols) {
    float* to = target + touched[blockIdx.x] * target_stride;
    const u32 start = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    EACH_COLUMN(c, cols) {
        float sum = to[c];
        for (u32 place = start; place < end; ++place) {
            const u32 from = order[place];
            sum += (factors ? factors[from] : 1.0f) * source[from * source_stride + c];
        }
        to[c] = sum;
    }
}

__device__ inline void put(float* to, float value) {
    *to = value;
}

__device__ inline void put(u16* to, float value) {
    *to = to_bf16(value);
}

struct F32Form {
    const float* values;
    u64 width;
    __device__ float at(u64 row, u32 col) const {
        return values[row * width + col];
    }
};

struct Bf16Form {
    const u16* values;
    u64 width;
    __device__ float at(u64 row, u32 col) const {
        return from_bf16(values[row * width + col]);
    }
};

struct F16Form {
    const u16* values;
    u64 width;
    __device__ float at(u64 row, u32 col) const {
        return from_f16(values[row * width + col]);
    }
};

// Integers of `bits` bits with an offset of half their range, from the low end of 32-bit words on; a scale per group of
// columns (compressed-tensors' pack-quantized), f32, bf16 or f16 by `scale_kind`.
struct PackedForm {
    const u32* words;
    u64 words_per_row;
    const void* scales;
    u64 groups;
    u32 scale_kind;
    u32 bits;
    u32 group;
    __device__ float at(u64 row, u32 col) const {
        const u32 per_word = 32u / bits;
        const u32 word = words[row * words_per_row + col / per_word];
        const u32 code = (word >> (col % per_word * bits)) & ((1u << bits) - 1u);
        return (float)((int)code - (1 << (bits - 1))) * scale(row * groups + col / group);
    }
    __device__ float scale(u64 place) const {
        if (scale_kind == 0u) {
            return ((const float*)scales)[place];
        }
        const u16 bits = ((const u16*)scales)[place];
        return scale_kind == 1u ? from_bf16(bits) : from_f16(bits);
    }
};

// E4M3 floats with a scale per block of rows and columns.
struct Fp8Form {
    const u8* codes;
    u64 width;
    const float* scales;
    u64 scale_cols;
    u32 block_rows;
    u32 block_cols;
    __device__ float at(u64 row, u32 col) const {
        return from_e4m3(codes[row * width + col]) * scales[row / block_rows * scale_cols + col / block_cols];
    }
};

// E2M1 floats, low half of a byte first, with a power of two per 32 columns (gpt-oss).
struct Mxfp4Form {
    const u8* blocks;
    const u8* scales;
    u64 width;
    __device__ float at(u64 row, u32 col) const {
        const u32 code = (blocks[row * (width / 2) + col / 2] >> (col % 2 * 4)) & 15u;
        return from_e2m1(code) * power_of_two(scales[row * (width / 32) + col / 32]);
    }
};

// Numbers of ggml's formats, as in its files.
#define Q4_0 2u
#define Q4_1 3u
#define Q5_0 6u
#define Q5_1 7u
#define Q8_0 8u
#define Q2_K 10u
#define Q3_K 11u
#define Q4_K 12u
#define Q5_K 13u
#define Q6_K 14u

__device__ inline float half_at(const u8* bytes) {
    return from_f16((u16)(bytes[0] | (bytes[1] << 8)));
}

__device__ inline u32 word_at(const u8* bytes) {
    return (u32)bytes[0] | ((u32)bytes[1] << 8) | ((u32)bytes[2] << 16) | ((u32)bytes[3] << 24);
}

// The low and the high four bits of 16 bytes are elements 0 to 15 and 16 to 31.
__device__ inline u32 nibble(const u8* packed, u32 i) {
    return i < 16u ? packed[i] & 15u : (u32)packed[i - 16u] >> 4;
}

// Rounded twice, as the formats are defined: a fused operation would give other bits.
__device__ inline float scaled_up(float factor, u32 value, float offset) {
    return __fadd_rn(__fmul_rn((float)value, factor), offset);
}

// Scale and minimum of one of eight groups of 32 elements, 6 bits each in 12 bytes.
__device__ inline u32 six_bit_scale(const u8* packed, u32 group) {
    return group < 4u ? packed[group] & 63u : (packed[group + 4u] & 15u) | ((u32)(packed[group - 4u] >> 6) << 4);
}

__device__ inline u32 six_bit_minimum(const u8* packed, u32 group) {
    return group < 4u ? packed[group + 4u] & 63u : (u32)(packed[group + 4u] >> 4) | ((u32)(packed[group] >> 6) << 4);
}

// Blocks of 32 or 256 consecutive elements of a row, as ggml-quants.c of ggml defines them; each element's value has the
// bits that it gives.
struct BlockForm {
    const u8* blocks;
    u64 row_bytes;
    u32 format;
    u32 elements;
    u32 bytes;
    __device__ float at(u64 row, u32 col) const {
        const u8* block = blocks + row * row_bytes + (u64)(col / elements) * bytes;
        return element(block, col % elements);
    }
    __device__ float element(const u8* block, u32 i) const {
        switch (format) {
        case Q4_0:
            return (float)((int)nibble(block + 2, i) - 8) * half_at(block);
        case Q4_1:
            return scaled_up(half_at(block), nibble(block + 4, i), half_at(block + 2));
        case Q5_0: {
            const u32 q = nibble(block + 6, i) | ((word_at(block + 2) >> i & 1u) << 4);
            return (float)((int)q - 16) * half_at(block);
        }
        case Q5_1: {
            const u32 q = nibble(block + 8, i) | ((word_at(block + 4) >> i & 1u) << 4);
            return scaled_up(half_at(block), q, half_at(block + 2));
        }
        case Q8_0:
            return (float)(signed char)block[2u + i] * half_at(block);
        case Q2_K: {
            const u32 group = i / 16u, scale = block[group];
            const float factor = __fmul_rn(half_at(block + 80), (float)(scale & 15u));
            const float offset = __fmul_rn(half_at(block + 82), (float)(scale >> 4));
            return scaled_up(factor, two_bits(block + 16, i), -offset);
        }
        case Q3_K: {
            const u32 group = i / 16u;
            const u8* scales = block + 96;
            // Four low bits of 16 scales in 8 bytes, then their two high bits in 4 bytes.
            const u32 low = ((u32)scales[group % 8u] >> (group / 8u * 4u)) & 15u;
            const u32 top = ((u32)scales[8u + group % 4u] >> (group / 4u * 2u)) & 3u;
            const float factor = __fmul_rn(half_at(block + 108), (float)((int)(low | (top << 4)) - 32));
            const u32 third = ((u32)block[group % 2u * 16u + i % 16u] >> (group / 2u)) & 1u;
            return factor * (float)((int)(two_bits(block + 32, i) | (third << 2)) - 4);
        }
        case Q4_K: {
            const u32 group = i / 32u;
            return of_group(block, group, four_bits(block + 16, i));
        }
        case Q5_K: {
            const u32 group = i / 32u;
            const u32 fifth = ((u32)block[16u + i % 32u] >> group) & 1u;
            return of_group(block, group, four_bits(block + 48, i) | (fifth << 4));
        }
        default: { // Q6_K
            const u32 group = i / 16u;
            // Halves of 128 elements; in each, 64 bytes of low bits are two runs of 64 and 32 bytes of high bits four of 32.
            const u32 half = group / 8u, run = group % 8u / 2u, place = i % 32u;
            const u32 low = ((u32)block[half * 64u + run % 2u * 32u + place] >> (run / 2u * 4u)) & 15u;
            const u32 high = ((u32)block[128u + half * 32u + place] >> (run * 2u)) & 3u;
            const float factor = __fmul_rn(half_at(block + 208), (float)(signed char)block[192u + group]);
            return factor * (float)((int)(low | (high << 4)) - 32);
        }
        }
    }
    // 32 bytes hold four runs of 32 elements.
    static __device__ u32 two_bits(const u8* packed, u32 i) {
        return ((u32)packed[i / 128u * 32u + i % 32u] >> (i % 128u / 32u * 2u)) & 3u;
    }
    // 32 bytes hold two runs of 32 elements.
    static __device__ u32 four_bits(const u8* packed, u32 i) {
        return ((u32)packed[i / 64u * 32u + i % 32u] >> (i % 64u / 32u * 4u)) & 15u;
    }
    // A value under the scale and minimum of its group of 32.
    static __device__ float of_group(const u8* block, u32 group, u32 value) {
        const float factor = __fmul_rn(half_at(block), (float)six_bit_scale(block + 4, group));
        const float offset = __fmul_rn(half_at(block + 2), (float)six_bit_minimum(block + 4, group));
        return scaled_up(factor, value, -offset);
    }
};

// out[i] = columns first_col.. of row rows[i], or of row first + i * step without `rows`; as f32, or as bf16 for a product.
template <class Form, class Out>
__device__ inline void unpack(const Form& form, const u32* rows, u32 first, u32 step, u32 first_col, Out* out,
                              u64 out_stride, u32 cols) {
    const u64 row = rows ? rows[blockIdx.x] : (u64)first + (u64)blockIdx.x * step;
    Out* to = out + blockIdx.x * out_stride;
    EACH_COLUMN(c, cols) {
        put(to + c, form.at(row, first_col + c));
    }
}

#define WHERE const u32 *rows, u32 first, u32 step, u32 first_col
#define TO(type) type *out, u64 out_stride, u32 cols
#define UNPACK unpack(form, rows, first, step, first_col, out, out_stride, cols)

extern "C" __global__ void unpack_f32(const float* values, u64 width, WHERE, TO(float)) {
    const F32Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_f32_bf16(const float* values, u64 width, WHERE, TO(u16)) {
    const F32Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_bf16(const u16* values, u64 width, WHERE, TO(float)) {
    const Bf16Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_bf16_bf16(const u16* values, u64 width, WHERE, TO(u16)) {
    const Bf16Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_f16(const u16* values, u64 width, WHERE, TO(float)) {
    const F16Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_f16_bf16(const u16* values, u64 width, WHERE, TO(u16)) {
    const F16Form form = {values, width};
    UNPACK;
}

extern "C" __global__ void unpack_packed(const u32* words, u64 words_per_row, const void* scales, u64 groups,
                                         u32 scale_kind, u32 bits, u32 group, WHERE, TO(float)) {
    const PackedForm form = {words, words_per_row, scales, groups, scale_kind, bits, group};
    UNPACK;
}

extern "C" __global__ void unpack_packed_bf16(const u32* words, u64 words_per_row, const void* scales, u64 groups,
                                              u32 scale_kind, u32 bits, u32 group, WHERE, TO(u16)) {
    const PackedForm form = {words, words_per_row, scales, groups, scale_kind, bits, group};
    UNPACK;
}

extern "C" __global__ void unpack_fp8(const u8* codes, u64 width, const float* scales, u64 scale_cols, u32 block_rows,
                                      u32 block_cols, WHERE, TO(float)) {
    const Fp8Form form = {codes, width, scales, scale_cols, block_rows, block_cols};
    UNPACK;
}

extern "C" __global__ void unpack_fp8_bf16(const u8* codes, u64 width, const float* scales, u64 scale_cols,
                                           u32 block_rows, u32 block_cols, WHERE, TO(u16)) {
    const Fp8Form form = {codes, width, scales, scale_cols, block_rows, block_cols};
    UNPACK;
}

extern "C" __global__ void unpack_mxfp4(const u8* blocks, const u8* scales, u64 width, WHERE, TO(float)) {
    const Mxfp4Form form = {blocks, scales, width};
    UNPACK;
}

extern "C" __global__ void unpack_mxfp4_bf16(const u8* blocks, const u8* scales, u64 width, WHERE, TO(u16)) {
    const Mxfp4Form form = {blocks, scales, width};
    UNPACK;
}

extern "C" __global__ void unpack_blocks(const u8* blocks, u64 row_bytes, u32 format, u32 elements, u32 bytes, WHERE,
                                         TO(float)) {
    const BlockForm form = {blocks, row_bytes, format, elements, bytes};
    UNPACK;
}

extern "C" __global__ void unpack_blocks_bf16(const u8* blocks, u64 row_bytes, u32 format, u32 elements, u32 bytes,
                                              WHERE, TO(u16)) {
    const BlockForm form = {blocks, row_bytes, format, elements, bytes};
    UNPACK;
}
