// Which experts of a mixture a token goes to: one warp per token.

#define SOFTMAX 0
#define SOFTMAX_OF_CHOSEN 1
#define SIGMOID 2

// The first largest of `count` values; all lanes get it.
__device__ inline Place first_largest(const float* values, u32 count) {
    Place place;
    place.value = -infinity();
    place.index = 0xffffffffu;
    for (u32 index = threadIdx.x; index < count; index += 32) {
        Place here;
        here.value = values[index];
        here.index = index;
        place = larger(place, here);
    }
    place = lane_largest(place);
    place.index = place.index == 0xffffffffu ? 0u : place.index;
    return place;
}

// logits [tokens, experts]; chosen, weights [tokens, top], in falling order of the scores. `choice_bias` [experts] or null
// counts for the choice only. With groups, a token goes to the `groups_chosen` groups whose two best experts have the
// largest scores together; the others' experts count 0. Shared memory: 2 * experts + 2 * groups floats.
extern "C" __global__ void route(const float* logits, u64 stride, u32 experts, u32 top, u32 scoring,
                                 const float* choice_bias, u32 groups, u32 groups_chosen, u32 normalised, float factor,
                                 u32* chosen, float* weights) {
    extern __shared__ float shared[];
    float* scores = shared;
    float* choice = scores + experts;
    float* sums = choice + experts;
    float* kept = sums + groups;
    const float* row = logits + blockIdx.x * stride;
    u32* chosen_here = chosen + (u64)blockIdx.x * top;
    float* weights_here = weights + (u64)blockIdx.x * top;

    if (scoring == SOFTMAX) {
        float largest = -infinity(), sum = 0.0f;
        for (u32 e = threadIdx.x; e < experts; e += 32) {
            largest = fmaxf(largest, row[e]);
        }
        largest = lane_max(largest, 32);
        for (u32 e = threadIdx.x; e < experts; e += 32) {
            scores[e] = expf(row[e] - largest);
            sum += scores[e];
        }
        sum = lane_sum(sum, 32);
        for (u32 e = threadIdx.x; e < experts; e += 32) {
            scores[e] /= sum;
        }
    } else {
        for (u32 e = threadIdx.x; e < experts; e += 32) {
            scores[e] = scoring == SIGMOID ? 1.0f / (1.0f + expf(-row[e])) : row[e];
        }
    }
    for (u32 e = threadIdx.x; e < experts; e += 32) {
        choice[e] = scores[e] + (choice_bias ? choice_bias[e] : 0.0f);
    }
    __syncwarp();

    if (groups > 0) {
        const u32 size = experts / groups;
        for (u32 g = threadIdx.x; g < groups; g += 32) {
            const float* group = choice + g * size;
            u32 best = 0;
            for (u32 e = 1; e < size; ++e) {
                best = group[e] > group[best] ? e : best;
            }
            float second = -infinity();
            for (u32 e = 0; e < size; ++e) {
                second = e == best ? second : fmaxf(second, group[e]);
            }
            sums[g] = group[best] + (size > 1 ? second : 0.0f);
            kept[g] = 0.0f;
        }
        __syncwarp();
        for (u32 round = 0; round < groups_chosen; ++round) {
            const Place best = first_largest(sums, groups);
            __syncwarp();
            if (threadIdx.x == 0) {
                kept[best.index] = 1.0f;
                sums[best.index] = -infinity();
            }
            __syncwarp();
        }
        for (u32 e = threadIdx.x; e < groups * size; e += 32) {
            choice[e] = kept[e / size] != 0.0f ? choice[e] : 0.0f;
        }
        __syncwarp();
    }

    for (u32 place = 0; place < top; ++place) {
        const Place best = first_largest(choice, experts);
        __syncwarp();
        if (threadIdx.x == 0) {
            chosen_here[place] = best.index;
            weights_here[place] = scores[best.index];
            choice[best.index] = -infinity();
        }
        __syncwarp();
    }

    if (threadIdx.x == 0) {
        if (scoring == SOFTMAX_OF_CHOSEN) {
            const float largest = weights_here[0];
            for (u32 place = 0; place < top; ++place) {
                weights_here[place] = expf(weights_here[place] - largest);
            }
        }
        float divisor = 1.0f;
        if (normalised || scoring == SOFTMAX_OF_CHOSEN) {
            float sum = 0.0f;
            for (u32 place = 0; place < top; ++place) {
                sum += weights_here[place];
            }
            divisor = sum + 1e-20f; // DeepSeek's: all sigmoids can be 0
        }
        for (u32 place = 0; place < top; ++place) {
            weights_here[place] = weights_here[place] / divisor * factor;
        }
    }
}
