// Root-mean-square norms: a block of 256 threads per row.

// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon).
extern "C" __global__ void rms_norm(const float* x, u64 x_stride, const float* weight, float epsilon, float* y,
                                    u64 y_stride, float* rstd, u32 cols) {
    const float* from = x + blockIdx.x * x_stride;
    float* to = y + blockIdx.x * y_stride;
    float squares = 0.0f;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        squares += from[c] * from[c];
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares) / (float)cols + epsilon);
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        to[c] = from[c] * inverse * weight[c];
    }
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = inverse;
    }
}

// dx += the input gradient.
extern "C" __global__ void rms_norm_backward(const float* x, u64 x_stride, const float* weight, const float* rstd,
                                             const float* dy, u64 dy_stride, float* dx, u64 dx_stride, u32 cols) {
    const float* from = x + blockIdx.x * x_stride;
    const float* gradient = dy + blockIdx.x * dy_stride;
    float* to = dx + blockIdx.x * dx_stride;
    const float inverse = rstd[blockIdx.x];
    float product = 0.0f;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        product += gradient[c] * weight[c] * from[c];
    }
    const float along = block_sum(product) * inverse * inverse * inverse / (float)cols;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        to[c] += gradient[c] * weight[c] * inverse - from[c] * along;
    }
}

// The weight gradient of `rows_per_part` rows each: parts [parts, cols]; blockIdx.x is the part, columns by y.
extern "C" __global__ void rms_norm_weight_parts(const float* x, u64 x_stride, const float* rstd, const float* dy,
                                                 u64 dy_stride, float* parts, u32 rows, u32 rows_per_part, u32 cols) {
    const u32 first = blockIdx.x * rows_per_part;
    const u32 end = first + rows_per_part < rows ? first + rows_per_part : rows;
    for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < cols; c += gridDim.y * blockDim.x) {
        float sum = 0.0f;
        for (u32 row = first; row < end; ++row) {
            sum += x[row * x_stride + c] * rstd[row] * dy[row * dy_stride + c];
        }
        parts[(u64)blockIdx.x * cols + c] = sum;
    }
}

// target += the sum of parts [count, cols], in order.
extern "C" __global__ void add_parts(const float* parts, u32 count, float* target, u32 cols) {
    for (u32 c = blockIdx.x * blockDim.x + threadIdx.x; c < cols; c += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (u32 part = 0; part < count; ++part) {
            sum += parts[(u64)part * cols + c];
        }
        target[c] += sum;
    }
}
