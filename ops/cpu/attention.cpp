// Part of kernels.cpp: rotation, index keys, block selection and attention over pages.

namespace {

// cos and sin [2*half] of a position; both halves are equal.
inline void rope_row(int64_t position, const float* frequency, float* cos, float* sin,
                     int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position) * frequency[i];
        cos[i] = cos[half + i] = std::cos(angle);
        sin[i] = sin[half + i] = std::sin(angle);
    }
}

// y [d] = x [d] with its first `rotary` dimensions rotated, rotate-half; x may not be y.
inline void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t d,
                   int64_t rotary) {
    const int64_t half = rotary / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        y[i] = x[i] * cos[i] - x[half + i] * sin[i];
        y[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
    std::memcpy(y + rotary, x + rotary, (d - rotary) * sizeof(float));
}

struct Pooling {
    const float *scale, *frequency;
    float* mean;  // [d + 4 * half]: room for the rotation, too
    int64_t r, d, half;
    float eps;
};

// y [d] = mean of the r raw keys `key(t)`, normed, rotated as the token at `first`.
template <typename Key>
inline void pool_key(Key key, int64_t first, const Pooling& p, float* y) {
    float *cos = p.mean + p.d, *sin = cos + 2 * p.half;
    std::memcpy(p.mean, key(0), p.d * sizeof(float));
    for (int64_t t = 1; t < p.r; ++t) axpy(p.mean, 1.0f, key(t), p.d);
#pragma omp simd
    for (int64_t j = 0; j < p.d; ++j) p.mean[j] /= static_cast<float>(p.r);
    norm_row(p.mean, p.scale, p.mean, p.d, p.eps);
    rope_row(first, p.frequency, cos, sin, p.half);
    rotate(p.mean, cos, sin, y, p.d, 2 * p.half);
}

// scores[n] = scale * q [d] . row `slots[t]` of `keys`, whose rows are `stride` apart; their top.
inline float score(const float* q, const float* keys, int64_t stride, const int64_t* slots,
                   float* scores, int64_t n, int64_t d, float scale) {
    float top = -INFINITY;
    int64_t t = 0;
    for (; t + 4 <= n; t += 4) {
        dot4(keys + slots[t] * stride, keys + slots[t + 1] * stride, keys + slots[t + 2] * stride,
             keys + slots[t + 3] * stride, q, d, scores + t);
        for (int64_t i = t; i < t + 4; ++i) {
            scores[i] *= scale;
            top = scores[i] > top ? scores[i] : top;
        }
    }
    for (; t < n; ++t) {
        scores[t] = scale * dot(q, keys + slots[t] * stride, d);
        top = scores[t] > top ? scores[t] : top;
    }
    return top;
}

// out [V vectors] = sum of weights[t] * row `slots[t]` of `values`, in two chains
template <int V>
inline void mix_columns(const float* values, int64_t stride, const int64_t* slots,
                        const float* weights, float* out, int64_t n) {
    vec even[V] = {}, odd[V] = {};
    int64_t t = 0;
    for (; t + 2 <= n; t += 2) {
        const float *a = values + slots[t] * stride, *b = values + slots[t + 1] * stride;
        for (int v = 0; v < V; ++v) {
            even[v] += weights[t] * load(a + v * LANES);
            odd[v] += weights[t + 1] * load(b + v * LANES);
        }
    }
    if (t < n)
        for (int v = 0; v < V; ++v)
            even[v] += weights[t] * load(values + slots[t] * stride + v * LANES);
    for (int v = 0; v < V; ++v) store(out + v * LANES, even[v] + odd[v]);
}

inline void mix(const float* values, int64_t stride, const int64_t* slots, const float* weights,
                float* out, int64_t n, int64_t d) {
    int64_t j = 0;
    for (; j + 4 * LANES <= d; j += 4 * LANES)
        mix_columns<4>(values + j, stride, slots, weights, out + j, n);
    for (; j + 2 * LANES <= d; j += 2 * LANES)
        mix_columns<2>(values + j, stride, slots, weights, out + j, n);
    for (; j + LANES <= d; j += LANES)
        mix_columns<1>(values + j, stride, slots, weights, out + j, n);
    if (j == d) return;
    std::memset(out + j, 0, (d - j) * sizeof(float));
    for (int64_t t = 0; t < n; ++t)
        axpy(out + j, weights[t], values + slots[t] * stride + j, d - j);
}

}  // namespace

extern "C" {

// positions [n]; frequency [half]; cos, sin [n, 2*half].
void nrank_rope_tables(const int64_t* positions, const float* frequency, float* cos, float* sin,
                       int64_t n, int64_t half) {
    for (int64_t i = 0; i < n; ++i)
        rope_row(positions[i], frequency, cos + i * 2 * half, sin + i * 2 * half, half);
}

// x, y [T,heads,d]; cos, sin [T,rotary]: rotate-half over the first `rotary` dimensions.
void nrank_rope(const float* x, const float* cos, const float* sin, float* y, int64_t T,
                int64_t heads, int64_t d, int64_t rotary) {
    for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < heads; ++h)
            rotate(x + (t * heads + h) * d, cos + t * rotary, sin + t * rotary,
                   y + (t * heads + h) * d, d, rotary);
}

// raw [N,r,d] -> y [N,d]: mean, norm, rotation of first [N].
void nrank_index_keys(const float* raw, const float* scale, const int64_t* first,
                      const float* frequency, float* y, int64_t N, int64_t r, int64_t d,
                      int64_t half, float eps) {
    const Pooling pooling = {scale, frequency, scratch<float>(d + 4 * half), r, d, half, eps};
    for (int64_t i = 0; i < N; ++i)
        pool_key([=](int64_t t) { return raw + (i * r + t) * d; }, first[i], pooling, y + i * d);
}

// query [B,Q,h,d]; pool [pages,blocks,d]; table [B,P] with row stride; positions [B,Q];
// ids [B,Q,K], filled up with -1.
void nrank_select_blocks(const float* query, const float* pool, const int64_t* table,
                         int64_t table_stride, const int64_t* positions, int64_t* ids,
                         int64_t B, int64_t Q, int64_t h, int64_t d, int64_t blocks, int64_t K,
                         int64_t block_tokens) {
    const float root = std::sqrt(static_cast<float>(d));
    for (int64_t row = 0; row < B * Q; ++row) {
        const int64_t n = (positions[row] + 1) / block_tokens;
        const int64_t* pages = table + row / Q * table_stride;
        const float* q = query + row * h * d;
        uint64_t* found = scratch<uint64_t>(n);
        for (int64_t i = 0; i < n; ++i) {
            const float* key = pool + (pages[i / blocks] * blocks + i % blocks) * d;
            float sum = 0.0f, part[4];
            int64_t head = 0;
            for (; head + 4 <= h; head += 4) {
                const float* four = q + head * d;
                dot4(four, four + d, four + 2 * d, four + 3 * d, key, d, part);
                for (int p = 0; p < 4; ++p) sum += part[p] > 0.0f ? part[p] : 0.0f;
            }
            for (; head < h; ++head) {
                const float one = dot(q + head * d, key, d);
                sum += one > 0.0f ? one : 0.0f;
            }
            found[i] = ordered(sum / root, i);
        }
        const int64_t taken = n < K ? n : K;
        std::partial_sort(found, found + taken, found + n, std::greater<uint64_t>());
        for (int64_t i = 0; i < K; ++i)
            ids[row * K + i] = i < taken ? index_of(found[i]) : -1;
    }
}

// query, out [B,Q,nq,d]; pools [pages,page,nkv,d]; table [B,P] with row stride; positions [B,Q];
// blocks [B,Q,K] or null (all tokens up to the position); groups [nkv]; a row sees `longest` tokens
// at most.
void nrank_attention(const float* query, const float* k_pool, const float* v_pool,
                     const int64_t* table, int64_t table_stride, const int64_t* positions,
                     const int64_t* blocks, const int64_t* groups, float* out, int64_t longest,
                     int64_t B, int64_t Q, int64_t nq, int64_t nkv, int64_t d, int64_t page,
                     int64_t K, int64_t block, float scale) {
    float* scores = scratch<float>(longest);
    int64_t* slots = scratch<int64_t>(longest);
    for (int64_t row = 0; row < B * Q; ++row) {
        const int64_t position = positions[row], *pages = table + row / Q * table_stride;
        float* o = out + row * nq * d;
        if (position < 0) {
            std::memset(o, 0, nq * d * sizeof(float));
            continue;
        }
        int64_t n = 0, tail = 0;
        if (blocks) {
            for (int64_t i = 0; i < K; ++i) {
                const int64_t id = blocks[row * K + i];
                for (int64_t t = id * block; id >= 0 && t < (id + 1) * block; ++t)
                    slots[n++] = pages[t / page] * page + t % page;
            }
            tail = (position + 1) / block * block;
        }
        for (int64_t t = tail; t <= position; ++t) slots[n++] = pages[t / page] * page + t % page;
        int64_t head = 0;
        for (int64_t kv = 0; kv < nkv; ++kv)
            for (int64_t i = 0; i < groups[kv]; ++i, ++head) {
                const float *q = query + (row * nq + head) * d, *keys = k_pool + kv * d;
                const float top = score(q, keys, nkv * d, slots, scores, n, d, scale);
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t t = 0; t < n; ++t) sum += scores[t] = fast_exp(scores[t] - top);
#pragma omp simd
                for (int64_t t = 0; t < n; ++t) scores[t] /= sum;
                mix(v_pool + kv * d, nkv * d, slots, scores, o + head * d, n, d);
            }
    }
}

}  // extern "C"
