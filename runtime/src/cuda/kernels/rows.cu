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
// columns (compressed-tensors' pack-quantized).
struct PackedForm {
    const u32* words;
    u64 words_per_row;
    const float* scales;
    u64 groups;
    u32 bits;
    u32 group;
    __device__ float at(u64 row, u32 col) const {
        const u32 per_word = 32u / bits;
        const u32 word = words[row * words_per_row + col / per_word];
        const u32 code = (word >> (col % per_word * bits)) & ((1u << bits) - 1u);
        return (float)((int)code - (1 << (bits - 1))) * scales[row * groups + col / group];
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

extern "C" __global__ void unpack_packed(const u32* words, u64 words_per_row, const float* scales, u64 groups, u32 bits,
                                         u32 group, WHERE, TO(float)) {
    const PackedForm form = {words, words_per_row, scales, groups, bits, group};
    UNPACK;
}

extern "C" __global__ void unpack_packed_bf16(const u32* words, u64 words_per_row, const float* scales, u64 groups,
                                              u32 bits, u32 group, WHERE, TO(u16)) {
    const PackedForm form = {words, words_per_row, scales, groups, bits, group};
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
