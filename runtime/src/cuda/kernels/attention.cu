// Softmax attention over the keys that each query sees, and over diagonal keys that belong to one query alone.
//
// Compiled once per pair of widths: HEAD_DIM (queries and keys) and VALUE_DIM (values). A block of 128 threads, 16 rows
// of 8, takes a tile of queries and walks over tiles of keys in shared memory; scores exist for one pair of tiles at a
// time, so memory is linear in tokens.
//
// ATTENTION-1: key tiles start at the query's document, and hidden keys add exact zeros in their place, so a query's
// result has the same bits whatever other queries share its tile.

#define THREADS 128
#define ROWS 16
#define COLUMNS 8

#define WIDE (HEAD_DIM > 128 || VALUE_DIM > 128)
#define QUERIES_PER_THREAD (WIDE ? 2 : 4)
#define TILE_QUERIES (ROWS * QUERIES_PER_THREAD)
#define KEYS_PER_THREAD 4
#define TILE_KEYS (COLUMNS * KEYS_PER_THREAD)
#define VALUES_PER_THREAD ((VALUE_DIM + COLUMNS - 1) / COLUMNS)
#define DIMS_PER_THREAD ((HEAD_DIM + COLUMNS - 1) / COLUMNS)

// One more than the width: rows of a tile begin in different banks of the shared memory.
#define HEAD_PITCH (HEAD_DIM + 1)
#define VALUE_PITCH (VALUE_DIM + 1)
#define SCORE_PITCH (TILE_KEYS + 1)

// Copies `count` of `tile_rows` rows of `width` elements into shared memory and fills the rest with zeros.
__device__ inline void load_tile(float* tile, u32 pitch, u32 width, u32 tile_rows, const float* from, u64 stride,
                                 u32 count) {
    for (u32 i = threadIdx.x; i < tile_rows * width; i += THREADS) {
        const u32 row = i / width, d = i % width;
        tile[row * pitch + d] = row < count ? from[row * stride + d] : 0.0f;
    }
}

// tiles [any, 4]: first query, queries, first key (of the document, or of its first tile that a window leaves), end of
// the keys. visible [queries, 2]: first key, end. sinks [heads] or null; softcap 0: none.
// Grid: tiles, heads. Shared memory in floats: TILE_QUERIES * HEAD_PITCH + TILE_KEYS * max(HEAD_PITCH, VALUE_PITCH) +
// TILE_QUERIES * SCORE_PITCH.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_forward(const float* q, const float* k, const float* v, const float* k_diagonal, const float* v_diagonal,
                      const u32* visible, const u32* tiles, const float* sinks, float softcap, float scale, u32 queries,
                      u32 heads, u32 kv_heads, u32 diagonals, float* out, float* lse) {
    extern __shared__ float shared[];
    float* q_tile = shared;
    float* kv_tile = q_tile + TILE_QUERIES * HEAD_PITCH;
    float* p_tile = kv_tile + TILE_KEYS * (HEAD_PITCH > VALUE_PITCH ? HEAD_PITCH : VALUE_PITCH);

    const u32* tile = tiles + 4 * blockIdx.x;
    const u32 first = tile[0], count = tile[1], first_key = tile[2], end_key = tile[3];
    const u32 head = blockIdx.y, kv_head = head / (heads / kv_heads);
    const u32 row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const u64 q_stride = (u64)heads * HEAD_DIM, k_stride = (u64)kv_heads * HEAD_DIM;
    const u64 v_stride = (u64)kv_heads * VALUE_DIM, out_stride = (u64)heads * VALUE_DIM;

    float top[QUERIES_PER_THREAD], sum[QUERIES_PER_THREAD], result[QUERIES_PER_THREAD][VALUES_PER_THREAD];
    u32 from[QUERIES_PER_THREAD], to[QUERIES_PER_THREAD];
#pragma unroll
    for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
        const u32 query = row + ROWS * r;
        top[r] = sinks ? sinks[head] : -infinity();
        sum[r] = sinks ? 1.0f : 0.0f;
        from[r] = query < count ? visible[2 * (first + query)] : 0;
        to[r] = query < count ? visible[2 * (first + query) + 1] : 0;
#pragma unroll
        for (u32 j = 0; j < VALUES_PER_THREAD; ++j) {
            result[r][j] = 0.0f;
        }
    }
    load_tile(q_tile, HEAD_PITCH, HEAD_DIM, TILE_QUERIES, q + first * q_stride + head * HEAD_DIM, q_stride, count);

    for (u32 key0 = first_key; key0 < end_key; key0 += TILE_KEYS) {
        const u32 keys = end_key - key0 < TILE_KEYS ? end_key - key0 : TILE_KEYS;
        __syncthreads();
        load_tile(kv_tile, HEAD_PITCH, HEAD_DIM, TILE_KEYS, k + key0 * k_stride + kv_head * HEAD_DIM, k_stride, keys);
        __syncthreads();

        float score[QUERIES_PER_THREAD][KEYS_PER_THREAD] = {};
#pragma unroll 4
        for (u32 d = 0; d < HEAD_DIM; ++d) {
            float key[KEYS_PER_THREAD];
#pragma unroll
            for (u32 c = 0; c < KEYS_PER_THREAD; ++c) {
                key[c] = kv_tile[(column + COLUMNS * c) * HEAD_PITCH + d];
            }
#pragma unroll
            for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
                const float query = q_tile[(row + ROWS * r) * HEAD_PITCH + d];
#pragma unroll
                for (u32 c = 0; c < KEYS_PER_THREAD; ++c) {
                    score[r][c] += query * key[c];
                }
            }
        }

#pragma unroll
        for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
            float largest = top[r];
#pragma unroll
            for (u32 c = 0; c < KEYS_PER_THREAD; ++c) {
                const u32 key = key0 + column + COLUMNS * c;
                float s = score[r][c] * scale;
                s = softcap > 0.0f ? softcap - 2.0f * softcap / (expf(2.0f * s / softcap) + 1.0f) : s;
                score[r][c] = key >= from[r] && key < to[r] ? s : -infinity();
                largest = fmaxf(largest, score[r][c]);
            }
            largest = lane_max(largest, COLUMNS);
            // Nothing was seen so far: there is nothing to shrink, and minus infinity less itself is no number.
            const bool seen = largest > -infinity();
            const float shrink = seen ? expf(top[r] - largest) : 1.0f;
            float part = 0.0f;
#pragma unroll
            for (u32 c = 0; c < KEYS_PER_THREAD; ++c) {
                const float p = seen ? expf(score[r][c] - largest) : 0.0f;
                p_tile[(row + ROWS * r) * SCORE_PITCH + column + COLUMNS * c] = p;
                part += p;
            }
            sum[r] = sum[r] * shrink + lane_sum(part, COLUMNS);
            top[r] = largest;
#pragma unroll
            for (u32 j = 0; j < VALUES_PER_THREAD; ++j) {
                result[r][j] *= shrink;
            }
        }

        __syncthreads();
        load_tile(kv_tile, VALUE_PITCH, VALUE_DIM, TILE_KEYS, v + key0 * v_stride + kv_head * VALUE_DIM, v_stride, keys);
        __syncthreads();
#pragma unroll 2
        for (u32 key = 0; key < TILE_KEYS; ++key) {
            float p[QUERIES_PER_THREAD];
#pragma unroll
            for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
                p[r] = p_tile[(row + ROWS * r) * SCORE_PITCH + key];
            }
#pragma unroll
            for (u32 j = 0; j < VALUES_PER_THREAD; ++j) {
                const u32 d = column + COLUMNS * j;
                const float value = d < VALUE_DIM ? kv_tile[key * VALUE_PITCH + d] : 0.0f;
#pragma unroll
                for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
                    result[r][j] += p[r] * value;
                }
            }
        }
    }
    __syncthreads(); // without any key tile the queries were not waited for yet

#pragma unroll
    for (u32 r = 0; r < QUERIES_PER_THREAD; ++r) {
        const u32 query = row + ROWS * r;
        const bool is_there = query < count;
        for (u32 step = 0; step < diagonals; ++step) {
            const u64 place = ((u64)step * queries + first + query) * kv_heads + kv_head;
            float dot = 0.0f;
            for (u32 d = column; is_there && d < HEAD_DIM; d += COLUMNS) {
                dot += q_tile[query * HEAD_PITCH + d] * k_diagonal[place * HEAD_DIM + d];
            }
            const float s = lane_sum(dot, COLUMNS) * scale;
            const float largest = fmaxf(top[r], s);
            const float shrink = expf(top[r] - largest), p = expf(s - largest);
            sum[r] = sum[r] * shrink + p;
            top[r] = largest;
#pragma unroll
            for (u32 j = 0; j < VALUES_PER_THREAD; ++j) {
                const u32 d = column + COLUMNS * j;
                const float value = is_there && d < VALUE_DIM ? v_diagonal[place * VALUE_DIM + d] : 0.0f;
                result[r][j] = result[r][j] * shrink + p * value;
            }
        }
        if (is_there) {
            const float inverse = 1.0f / sum[r];
            float* to_row = out + (first + query) * out_stride + head * VALUE_DIM;
#pragma unroll
            for (u32 j = 0; j < VALUES_PER_THREAD; ++j) {
                const u32 d = column + COLUMNS * j;
                if (d < VALUE_DIM) {
                    to_row[d] = result[r][j] * inverse;
                }
            }
            if (column == 0) {
                lse[(u64)(first + query) * heads + head] = top[r] + logf(sum[r]);
            }
        }
    }
}

// The backward pass is a draft's: values are as wide as keys, no sinks, no cap. Its tiles are smaller, for four of them
// lie in shared memory at a time.
#if HEAD_DIM == VALUE_DIM

#define BACK_PER_THREAD (HEAD_DIM > 128 ? 1 : 2)
#define BACK_QUERIES (ROWS * BACK_PER_THREAD)
#define BACK_KEYS BACK_QUERIES
#define BACK_COLUMNS_PER_THREAD (BACK_KEYS / COLUMNS)
#define BACK_PITCH (BACK_KEYS + 1)

// a[r][c] = row r of x_tile times row c of y_tile, and b of the other two tiles.
__device__ inline void two_products(const float* x_tile, const float* y_tile, const float* x2_tile, const float* y2_tile,
                                    u32 row, u32 column, float a[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD],
                                    float b[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD]) {
#pragma unroll
    for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
#pragma unroll
        for (u32 c = 0; c < BACK_COLUMNS_PER_THREAD; ++c) {
            a[r][c] = 0.0f;
            b[r][c] = 0.0f;
        }
    }
#pragma unroll 4
    for (u32 d = 0; d < HEAD_DIM; ++d) {
        float y[BACK_COLUMNS_PER_THREAD], y2[BACK_COLUMNS_PER_THREAD];
#pragma unroll
        for (u32 c = 0; c < BACK_COLUMNS_PER_THREAD; ++c) {
            y[c] = y_tile[(column + COLUMNS * c) * HEAD_PITCH + d];
            y2[c] = y2_tile[(column + COLUMNS * c) * HEAD_PITCH + d];
        }
#pragma unroll
        for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
            const float x = x_tile[(row + ROWS * r) * HEAD_PITCH + d];
            const float x2 = x2_tile[(row + ROWS * r) * HEAD_PITCH + d];
#pragma unroll
            for (u32 c = 0; c < BACK_COLUMNS_PER_THREAD; ++c) {
                a[r][c] += x * y[c];
                b[r][c] += x2 * y2[c];
            }
        }
    }
}

// Gradients of queries, and of the diagonal keys and values, which are added to. delta [queries, heads] becomes the sum
// of p * dp of each softmax. Grid: tiles of BACK_QUERIES queries, kv heads; the heads that share a key take turns, so
// nothing races. Shared memory in floats: 4 * BACK_QUERIES * HEAD_PITCH + BACK_QUERIES * BACK_PITCH.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_backward_queries(const float* q, const float* k, const float* v, const float* k_diagonal,
                               const float* v_diagonal, const u32* visible, const u32* tiles, const float* lse,
                               const float* dout, float scale, u32 queries, u32 heads, u32 kv_heads, u32 diagonals,
                               float* dq, float* dk_diagonal, float* dv_diagonal, float* delta) {
    extern __shared__ float shared[];
    float* q_tile = shared;
    float* dout_tile = q_tile + BACK_QUERIES * HEAD_PITCH;
    float* k_tile = dout_tile + BACK_QUERIES * HEAD_PITCH;
    float* v_tile = k_tile + BACK_KEYS * HEAD_PITCH;
    float* ds_tile = v_tile + BACK_KEYS * HEAD_PITCH;

    const u32* tile = tiles + 4 * blockIdx.x;
    const u32 first = tile[0], count = tile[1], first_key = tile[2], end_key = tile[3];
    const u32 kv_head = blockIdx.y, group = heads / kv_heads;
    const u32 row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const u64 q_stride = (u64)heads * HEAD_DIM, k_stride = (u64)kv_heads * HEAD_DIM;

    for (u32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        __syncthreads();
        load_tile(q_tile, HEAD_PITCH, HEAD_DIM, BACK_QUERIES, q + first * q_stride + head * HEAD_DIM, q_stride, count);
        load_tile(dout_tile, HEAD_PITCH, HEAD_DIM, BACK_QUERIES, dout + first * q_stride + head * HEAD_DIM, q_stride,
                  count);
        u32 from[BACK_PER_THREAD], to[BACK_PER_THREAD];
        float log_sum[BACK_PER_THREAD], along[BACK_PER_THREAD], gradient[BACK_PER_THREAD][DIMS_PER_THREAD];
#pragma unroll
        for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
            const u32 query = row + ROWS * r;
            from[r] = query < count ? visible[2 * (first + query)] : 0;
            to[r] = query < count ? visible[2 * (first + query) + 1] : 0;
            log_sum[r] = query < count ? lse[(u64)(first + query) * heads + head] : 0.0f;
            along[r] = 0.0f;
#pragma unroll
            for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
                gradient[r][j] = 0.0f;
            }
        }

        // The first walk finds delta, the second the gradient that needs it.
        for (u32 walk = 0; walk < 2; ++walk) {
            for (u32 key0 = first_key; key0 < end_key; key0 += BACK_KEYS) {
                const u32 keys = end_key - key0 < BACK_KEYS ? end_key - key0 : BACK_KEYS;
                __syncthreads();
                load_tile(k_tile, HEAD_PITCH, HEAD_DIM, BACK_KEYS, k + key0 * k_stride + kv_head * HEAD_DIM, k_stride,
                          keys);
                load_tile(v_tile, HEAD_PITCH, HEAD_DIM, BACK_KEYS, v + key0 * k_stride + kv_head * HEAD_DIM, k_stride,
                          keys);
                __syncthreads();
                float score[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD], dp[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD];
                two_products(q_tile, k_tile, dout_tile, v_tile, row, column, score, dp);
#pragma unroll
                for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
#pragma unroll
                    for (u32 c = 0; c < BACK_COLUMNS_PER_THREAD; ++c) {
                        const u32 key = key0 + column + COLUMNS * c;
                        const bool sees = key >= from[r] && key < to[r];
                        const float p = sees ? expf(score[r][c] * scale - log_sum[r]) : 0.0f;
                        if (walk == 0) {
                            along[r] += p * dp[r][c];
                        } else {
                            ds_tile[(row + ROWS * r) * BACK_PITCH + column + COLUMNS * c] =
                                p * (dp[r][c] - along[r]) * scale;
                        }
                    }
                }
                if (walk == 0) {
                    continue;
                }
                __syncthreads();
                for (u32 key = 0; key < BACK_KEYS; ++key) {
#pragma unroll
                    for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
                        const float ds = ds_tile[(row + ROWS * r) * BACK_PITCH + key];
#pragma unroll
                        for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
                            const u32 d = column + COLUMNS * j;
                            gradient[r][j] += d < HEAD_DIM ? ds * k_tile[key * HEAD_PITCH + d] : 0.0f;
                        }
                    }
                }
            }
            __syncthreads(); // without any key tile the queries were not waited for yet
#pragma unroll
            for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
                const u32 query = row + ROWS * r;
                const bool is_there = query < count;
                along[r] = walk == 0 ? lane_sum(along[r], COLUMNS) : along[r];
                for (u32 step = 0; step < diagonals; ++step) {
                    const u64 place = (((u64)step * queries + first + query) * kv_heads + kv_head) * HEAD_DIM;
                    float dot = 0.0f, dp = 0.0f;
                    for (u32 d = column; is_there && d < HEAD_DIM; d += COLUMNS) {
                        dot += q_tile[query * HEAD_PITCH + d] * k_diagonal[place + d];
                        dp += dout_tile[query * HEAD_PITCH + d] * v_diagonal[place + d];
                    }
                    const float p = expf(lane_sum(dot, COLUMNS) * scale - log_sum[r]);
                    dp = lane_sum(dp, COLUMNS);
                    // A query's diagonal is added to its delta in the first walk; until then it lacks what comes later.
                    if (walk == 0) {
                        along[r] += p * dp;
                        continue;
                    }
                    const float ds = p * (dp - along[r]) * scale;
#pragma unroll
                    for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
                        const u32 d = column + COLUMNS * j;
                        if (is_there && d < HEAD_DIM) {
                            gradient[r][j] += ds * k_diagonal[place + d];
                            dk_diagonal[place + d] += ds * q_tile[query * HEAD_PITCH + d];
                            dv_diagonal[place + d] += p * dout_tile[query * HEAD_PITCH + d];
                        }
                    }
                }
            }
        }

#pragma unroll
        for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
            const u32 query = row + ROWS * r;
            if (query >= count) {
                continue;
            }
#pragma unroll
            for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
                const u32 d = column + COLUMNS * j;
                if (d < HEAD_DIM) {
                    dq[(first + query) * q_stride + head * HEAD_DIM + d] = gradient[r][j];
                }
            }
            if (column == 0) {
                delta[(u64)(first + query) * heads + head] = along[r];
            }
        }
    }
}

// Adds the gradients of keys and values that many queries share. tiles [any, 4]: first key, keys, first query, end of the
// queries that see any of them. Grid: tiles of BACK_KEYS keys, kv heads. Shared memory in floats: 4 * BACK_KEYS *
// HEAD_PITCH + 2 * BACK_KEYS * BACK_PITCH.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_backward_keys(const float* q, const float* k, const float* v, const u32* visible, const u32* tiles,
                            const float* lse, const float* delta, const float* dout, float scale, u32 heads,
                            u32 kv_heads, float* dk, float* dv) {
    extern __shared__ float shared[];
    float* k_tile = shared;
    float* v_tile = k_tile + BACK_KEYS * HEAD_PITCH;
    float* q_tile = v_tile + BACK_KEYS * HEAD_PITCH;
    float* dout_tile = q_tile + BACK_QUERIES * HEAD_PITCH;
    float* p_tile = dout_tile + BACK_QUERIES * HEAD_PITCH;
    float* ds_tile = p_tile + BACK_KEYS * BACK_PITCH;

    const u32* tile = tiles + 4 * blockIdx.x;
    const u32 first_key = tile[0], keys = tile[1], first_query = tile[2], end_query = tile[3];
    const u32 kv_head = blockIdx.y, group = heads / kv_heads;
    const u32 row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const u64 q_stride = (u64)heads * HEAD_DIM, k_stride = (u64)kv_heads * HEAD_DIM;

    float key_gradient[BACK_PER_THREAD][DIMS_PER_THREAD], value_gradient[BACK_PER_THREAD][DIMS_PER_THREAD];
#pragma unroll
    for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
#pragma unroll
        for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
            key_gradient[r][j] = 0.0f;
            value_gradient[r][j] = 0.0f;
        }
    }
    load_tile(k_tile, HEAD_PITCH, HEAD_DIM, BACK_KEYS, k + first_key * k_stride + kv_head * HEAD_DIM, k_stride, keys);
    load_tile(v_tile, HEAD_PITCH, HEAD_DIM, BACK_KEYS, v + first_key * k_stride + kv_head * HEAD_DIM, k_stride, keys);

    for (u32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (u32 query0 = first_query; query0 < end_query; query0 += BACK_QUERIES) {
            const u32 count = end_query - query0 < BACK_QUERIES ? end_query - query0 : BACK_QUERIES;
            __syncthreads();
            load_tile(q_tile, HEAD_PITCH, HEAD_DIM, BACK_QUERIES, q + query0 * q_stride + head * HEAD_DIM, q_stride,
                      count);
            load_tile(dout_tile, HEAD_PITCH, HEAD_DIM, BACK_QUERIES, dout + query0 * q_stride + head * HEAD_DIM,
                      q_stride, count);
            __syncthreads();
            float score[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD], dp[BACK_PER_THREAD][BACK_COLUMNS_PER_THREAD];
            two_products(k_tile, q_tile, v_tile, dout_tile, row, column, score, dp);
#pragma unroll
            for (u32 c = 0; c < BACK_COLUMNS_PER_THREAD; ++c) {
                const u32 query = column + COLUMNS * c;
                const bool is_there = query < count;
                const u32 from = is_there ? visible[2 * (query0 + query)] : 0;
                const u32 to = is_there ? visible[2 * (query0 + query) + 1] : 0;
                const float log_sum = is_there ? lse[(u64)(query0 + query) * heads + head] : 0.0f;
                const float along = is_there ? delta[(u64)(query0 + query) * heads + head] : 0.0f;
#pragma unroll
                for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
                    const u32 key = first_key + row + ROWS * r;
                    const bool sees = key >= from && key < to && row + ROWS * r < keys;
                    const float p = sees ? expf(score[r][c] * scale - log_sum) : 0.0f;
                    p_tile[(row + ROWS * r) * BACK_PITCH + query] = p;
                    ds_tile[(row + ROWS * r) * BACK_PITCH + query] = p * (dp[r][c] - along) * scale;
                }
            }
            __syncthreads();
            for (u32 query = 0; query < BACK_QUERIES; ++query) {
#pragma unroll
                for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
                    const float p = p_tile[(row + ROWS * r) * BACK_PITCH + query];
                    const float ds = ds_tile[(row + ROWS * r) * BACK_PITCH + query];
#pragma unroll
                    for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
                        const u32 d = column + COLUMNS * j;
                        value_gradient[r][j] += d < HEAD_DIM ? p * dout_tile[query * HEAD_PITCH + d] : 0.0f;
                        key_gradient[r][j] += d < HEAD_DIM ? ds * q_tile[query * HEAD_PITCH + d] : 0.0f;
                    }
                }
            }
        }
    }

#pragma unroll
    for (u32 r = 0; r < BACK_PER_THREAD; ++r) {
        const u32 key = row + ROWS * r;
        if (key >= keys) {
            continue;
        }
#pragma unroll
        for (u32 j = 0; j < DIMS_PER_THREAD; ++j) {
            const u32 d = column + COLUMNS * j;
            if (d < HEAD_DIM) {
                const u64 place = (first_key + key) * k_stride + kv_head * HEAD_DIM + d;
                dk[place] += key_gradient[r][j];
                dv[place] += value_gradient[r][j];
            }
        }
    }
}

#endif
