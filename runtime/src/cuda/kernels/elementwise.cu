// Operations on single elements. Flat kernels take any grid; row kernels take a row per blockIdx.x and columns by y.

#define EACH(i, n)                                                                                                     \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)
#define EACH_COLUMN(c, cols)                                                                                           \
    for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < (cols); c += gridDim.y * blockDim.x)

// out = gate * sigmoid(gate) * up.
extern "C" __global__ void swiglu(const float* gate, const float* up, float* out, u64 n) {
    EACH(i, n) {
        out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

// Replaces gate and up by their gradients.
extern "C" __global__ void swiglu_backward(float* gate, float* up, const float* dout, u64 n) {
    EACH(i, n) {
        const float g = gate[i], sigmoid = 1.0f / (1.0f + expf(-g)), silu = g * sigmoid;
        gate[i] = dout[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
        up[i] = dout[i] * silu;
    }
}

// out = gelu(g) * u by the tanh approximation, which is g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g^3)).
extern "C" __global__ void geglu(const float* gate, const float* up, float* out, u64 n) {
    EACH(i, n) {
        const float g = gate[i], cubed = g * g * g * 0.044715f + g;
        out[i] = g / (1.0f + expf(-1.5957692f * cubed)) * up[i];
    }
}

// out = g * sigmoid(alpha * g) * (u + 1), g cut at the limit from above and u at both sides.
extern "C" __global__ void clamped_glu(const float* gate, const float* up, float alpha, float limit, float* out, u64 n) {
    EACH(i, n) {
        const float g = gate[i] > limit ? limit : gate[i];
        const float u = up[i] > limit ? limit : (up[i] < -limit ? -limit : up[i]);
        out[i] = g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
    }
}

extern "C" __global__ void add(float* target, const float* source, u64 n) {
    EACH(i, n) {
        target[i] += source[i];
    }
}

extern "C" __global__ void fill(float* x, float value, u64 n) {
    EACH(i, n) {
        x[i] = value;
    }
}

extern "C" __global__ void scale(float* x, float factor, u64 n) {
    EACH(i, n) {
        x[i] *= factor;
    }
}

// x = cap * tanh(x / cap).
extern "C" __global__ void softcap(float* x, float cap, u64 n) {
    EACH(i, n) {
        x[i] = cap - 2.0f * cap / (expf(2.0f * x[i] / cap) + 1.0f);
    }
}

// Adds bias [cols] to every row of x [rows, cols].
extern "C" __global__ void add_bias(float* x, u64 stride, const float* bias, u32 cols) {
    float* row = x + blockIdx.x * stride;
    EACH_COLUMN(c, cols) {
        row[c] += bias[c];
    }
}

extern "C" __global__ void copy_rows(const float* source, u64 source_stride, float* target, u64 target_stride, u32 cols) {
    const float* from = source + blockIdx.x * source_stride;
    float* to = target + blockIdx.x * target_stride;
    EACH_COLUMN(c, cols) {
        to[c] = from[c];
    }
}

// f32 to bf16, rows with strides of their own: operands of products.
extern "C" __global__ void narrow(const float* source, u64 source_stride, u16* target, u64 target_stride, u32 cols) {
    const float* from = source + blockIdx.x * source_stride;
    u16* to = target + blockIdx.x * target_stride;
    EACH_COLUMN(c, cols) {
        to[c] = to_bf16(from[c]);
    }
}

// bf16 to f32.
extern "C" __global__ void widen(const u16* source, u64 source_stride, float* target, u64 target_stride, u32 cols) {
    const u16* from = source + blockIdx.x * source_stride;
    float* to = target + blockIdx.x * target_stride;
    EACH_COLUMN(c, cols) {
        to[c] = from_bf16(from[c]);
    }
}

// Turns the pairs of every head of x [rows, heads * head_dim] by the angles of the row's position; cos, sin
// [positions, pairs]. Pairs are (i, i + pairs) or neighbours, from `offset` on; sign -1 turns back.
extern "C" __global__ void rotate(float* x, u32 heads, u32 head_dim, u32 pairs, u32 offset, u32 neighbours,
                                  const float* cos_table, const float* sin_table, const u32* positions, float sign) {
    float* row = x + (u64)blockIdx.x * heads * head_dim;
    const u64 angles = (u64)positions[blockIdx.x] * pairs;
    EACH_COLUMN(c, heads * pairs) {
        const u32 head = c / pairs, pair = c % pairs;
        float* turned = row + head * head_dim + offset;
        float* first = turned + (neighbours ? 2 * pair : pair);
        float* second = turned + (neighbours ? 2 * pair + 1 : pair + pairs);
        const float cosine = cos_table[angles + pair], sine = sin_table[angles + pair] * sign;
        const float a = *first, b = *second;
        *first = a * cosine - b * sine;
        *second = b * cosine + a * sine;
    }
}
