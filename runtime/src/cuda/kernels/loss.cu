// Softmax, divergence and arg-max: a block of 256 threads per row.

// Logits become probabilities; negative_entropy = sum of p * ln(p), in nats; argmax is the first largest logit.
extern "C" __global__ void softmax_targets(float* logits, u64 stride, u32 cols, float* negative_entropy, u32* argmax) {
    float* row = logits + blockIdx.x * stride;
    const Place top = block_largest(row, cols);
    float sum = 0.0f, weighted = 0.0f;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        const float shifted = row[c] - top.value, e = expf(shifted);
        sum += e;
        weighted += e > 0.0f ? e * shifted : 0.0f; // a logit of minus infinity weighs nothing
        row[c] = e;
    }
    sum = block_sum(sum);
    weighted = block_sum(weighted);
    const float inverse = 1.0f / sum;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        row[c] *= inverse;
    }
    if (threadIdx.x == 0) {
        negative_entropy[blockIdx.x] = weighted * inverse - logf(sum);
        argmax[blockIdx.x] = top.index;
    }
}

// KL(p || softmax(logits)) of row i against row target_of[i] of p; logits become coefficients[i] * (softmax - p).
extern "C" __global__ void kl_divergence(float* logits, u64 stride, u32 cols, const float* probabilities, u64 p_stride,
                                         const float* negative_entropy, const u32* target_of, const float* coefficients,
                                         float* losses, u32* argmax) {
    float* row = logits + blockIdx.x * stride;
    const u32 target = target_of[blockIdx.x];
    const float* p = probabilities + target * p_stride;
    const Place top = block_largest(row, cols);
    float sum = 0.0f, cross = 0.0f;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        const float shifted = row[c] - top.value, e = expf(shifted);
        cross += p[c] * shifted;
        sum += e;
        row[c] = e;
    }
    sum = block_sum(sum);
    cross = block_sum(cross);
    const float inverse = 1.0f / sum, coefficient = coefficients[blockIdx.x];
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        row[c] = coefficient * (row[c] * inverse - p[c]);
    }
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = negative_entropy[target] - cross + logf(sum);
        argmax[blockIdx.x] = top.index;
    }
}

// The first largest element of each row.
extern "C" __global__ void argmax(const float* x, u64 stride, u32 cols, u32* out) {
    const Place top = block_largest(x + blockIdx.x * stride, cols);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = top.index;
    }
}

// 1 for each row with an element that is no number or larger than `largest` in magnitude, else 0.
extern "C" __global__ void beyond(const float* x, u64 stride, u32 cols, float largest, u32* out) {
    const float* row = x + blockIdx.x * stride;
    float found = 0.0f;
    for (u32 c = threadIdx.x; c < cols; c += blockDim.x) {
        found += fabsf(row[c]) <= largest ? 0.0f : 1.0f;
    }
    found = block_sum(found);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = found > 0.0f ? 1u : 0u;
    }
}
