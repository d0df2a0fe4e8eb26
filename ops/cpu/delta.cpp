// Part of kernels.cpp: short convolutions and the gated delta rule, for decode rows of one token
// and of several that are verified.

namespace {

// y[Hk,dk]: each head of x scaled to the length `root`
inline void unit_heads(float* y, const float* x, float root, int64_t Hk, int64_t dk) {
    for (int64_t h = 0; h < Hk; ++h) {
        const float* in = x + h * dk;
        const float r = root / std::sqrt(dot(in, in, dk) + 1e-6f);
#pragma omp simd
        for (int64_t i = 0; i < dk; ++i) y[h * dk + i] = in[i] * r;
    }
}

// V vectors of columns of S [dk,dv]; out may be null.
template <int V>
inline void delta_columns(float* S, const float* query, const float* key, const float* v,
                          float decay, float beta, float* out, int64_t dk, int64_t dv) {
    vec delta[V] = {}, sum[V] = {};
    float* row = S;
    for (int64_t i = 0; i < dk; ++i, row += dv)
        for (int n = 0; n < V; ++n) {
            const vec s = decay * load(row + n * LANES);
            store(row + n * LANES, s);
            delta[n] += key[i] * s;
        }
    for (int n = 0; n < V; ++n) delta[n] = beta * (load(v + n * LANES) - delta[n]);
    row = S;
    for (int64_t i = 0; i < dk; ++i, row += dv)
        for (int n = 0; n < V; ++n) {
            const vec s = load(row + n * LANES) + key[i] * delta[n];
            store(row + n * LANES, s);
            if (out) sum[n] += query[i] * s;
        }
    if (out)
        for (int n = 0; n < V; ++n) store(out + n * LANES, sum[n]);
}

// One token of the gated delta rule into S [dk,dv], then out [dv] = S read with query [dk]; without
// out nothing is read. One function for a step, a verification and its commit, so that a token
// gives the same bits in all of them.
__attribute__((noinline)) void delta_token(float* S, const float* query, const float* key,
                                           const float* v, float g, float beta, float* out,
                                           int64_t dk, int64_t dv) {
    const float decay = fast_exp(g);
    int64_t j = 0;
    const auto at = [&](int64_t j) { return out ? out + j : nullptr; };
    for (; j + 4 * LANES <= dv; j += 4 * LANES)
        delta_columns<4>(S + j, query, key, v + j, decay, beta, at(j), dk, dv);
    for (; j + 2 * LANES <= dv; j += 2 * LANES)
        delta_columns<2>(S + j, query, key, v + j, decay, beta, at(j), dk, dv);
    for (; j + LANES <= dv; j += LANES)
        delta_columns<1>(S + j, query, key, v + j, decay, beta, at(j), dk, dv);
    for (; j < dv; ++j) {
        float read = 0.0f, sum = 0.0f;
        for (int64_t i = 0; i < dk; ++i) read += key[i] * (S[i * dv + j] *= decay);
        const float delta = beta * (v[j] - read);
        for (int64_t i = 0; i < dk; ++i) {
            const float s = S[i * dv + j] += key[i] * delta;
            if (out) sum += query[i] * s;
        }
        if (out) out[j] = sum;
    }
}

// out [C] = silu of the taps [K,C] over rows: `past(k)` is the input under tap k.
template <typename Past>
inline void conv_token(const float* taps, float* out, int64_t C, int64_t K, Past past) {
    const float *now = past(K - 1), *last = taps + (K - 1) * C;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) out[c] = last[c] * now[c];
    for (int64_t k = 0; k + 1 < K; ++k) axpy_each(out, taps + k * C, past(k), C);
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) out[c] = silu(out[c]);
}

}  // namespace

extern "C" {

// x [B,C] with row stride x_stride; taps [K,C]; windows [slots,W,C], W = (K-1)*dilation; y [B,C].
void nrank_conv_step(const float* x, int64_t x_stride, const float* taps, float* windows,
                     const int64_t* slots, float* y, int64_t B, int64_t C, int64_t K,
                     int64_t dilation) {
    const int64_t rows = (K - 1) * dilation;
    for (int64_t b = 0; b < B; ++b) {
        float* window = windows + slots[b] * rows * C;
        const float* now = x + b * x_stride;
        conv_token(taps, y + b * C, C, K,
                   [=](int64_t k) { return k + 1 < K ? window + k * dilation * C : now; });
        std::memmove(window, window + C, (rows - 1) * C * sizeof(float));
        std::memcpy(window + (rows - 1) * C, now, C * sizeof(float));
    }
}

// Q tokens a row, the windows left as they are: x, y [B*Q,C], else as above.
void nrank_conv_verify(const float* x, int64_t x_stride, const float* taps, const float* windows,
                       const int64_t* slots, float* y, int64_t B, int64_t Q, int64_t C, int64_t K,
                       int64_t dilation) {
    const int64_t rows = (K - 1) * dilation;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t t = 0; t < Q; ++t) {
            const float *window = windows + slots[b] * rows * C, *tokens = x + b * Q * x_stride;
            conv_token(taps, y + (b * Q + t) * C, C, K, [=](int64_t k) {
                const int64_t at = t + k * dilation;
                return at < rows ? window + at * C : tokens + (at - rows) * x_stride;
            });
        }
}

// windows [slots,W,C] move on by the first counts[b] of Q rows of x [B*Q,C].
void nrank_window_commit(const float* x, int64_t x_stride, float* windows, const int64_t* slots,
                         const int64_t* counts, int64_t B, int64_t Q, int64_t W, int64_t C) {
    for (int64_t b = 0; b < B; ++b) {
        float* window = windows + slots[b] * W * C;
        const int64_t count = counts[b], kept = count < W ? W - count : 0;
        if (kept) std::memmove(window, window + count * C, kept * C * sizeof(float));
        for (int64_t i = kept; i < W; ++i)
            std::memcpy(window + i * C, x + (b * Q + count - W + i) * x_stride, C * sizeof(float));
    }
}

// q, k [B,Hk,dk] with row stride qk_stride; v [B,Hv,dv] with row stride v_stride; g, beta [B,Hv];
// key_head [Hv]; states [slots,Hv,dk,dv]; o [B,Hv,dv].
void nrank_delta_step(const float* q, const float* k, int64_t qk_stride, const float* v,
                      int64_t v_stride, const float* g, const float* beta, const int64_t* key_head,
                      float* states, const int64_t* slots, float* o, int64_t B, int64_t Hk,
                      int64_t Hv, int64_t dk, int64_t dv) {
    float *query = scratch<float>(2 * Hk * dk), *key = query + Hk * dk;
    const float root = 1.0f / std::sqrt(static_cast<float>(dk));
    for (int64_t b = 0; b < B; ++b) {
        unit_heads(query, q + b * qk_stride, root, Hk, dk);
        unit_heads(key, k + b * qk_stride, 1.0f, Hk, dk);
        for (int64_t h = 0; h < Hv; ++h)
            delta_token(states + (slots[b] * Hv + h) * dk * dv, query + key_head[h] * dk,
                        key + key_head[h] * dk, v + b * v_stride + h * dv, g[b * Hv + h],
                        beta[b * Hv + h], o + (b * Hv + h) * dv, dk, dv);
    }
}

// Q tokens a row, the states left as they are. q, k [B*Q,Hk,dk], v [B*Q,Hv,dv] with row strides;
// g, beta [B*Q,Hv]; o [B*Q,Hv,dv].
void nrank_delta_verify(const float* q, const float* k, int64_t qk_stride, const float* v,
                        int64_t v_stride, const float* g, const float* beta,
                        const int64_t* key_head, const float* states, const int64_t* slots,
                        float* o, int64_t B, int64_t Q, int64_t Hk, int64_t Hv, int64_t dk,
                        int64_t dv) {
    const int64_t heads = Hk * dk;
    float* query = scratch<float>(2 * Q * heads + dk * dv);
    float *key = query + Q * heads, *S = key + Q * heads;
    const float root = 1.0f / std::sqrt(static_cast<float>(dk));
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < Q; ++t) {
            unit_heads(query + t * heads, q + (b * Q + t) * qk_stride, root, Hk, dk);
            unit_heads(key + t * heads, k + (b * Q + t) * qk_stride, 1.0f, Hk, dk);
        }
        for (int64_t h = 0; h < Hv; ++h) {
            std::memcpy(S, states + (slots[b] * Hv + h) * dk * dv, dk * dv * sizeof(float));
            for (int64_t t = 0; t < Q; ++t) {
                const int64_t row = b * Q + t, head = t * heads + key_head[h] * dk;
                delta_token(S, query + head, key + head, v + row * v_stride + h * dv,
                            g[row * Hv + h], beta[row * Hv + h], o + (row * Hv + h) * dv, dk, dv);
            }
        }
    }
}

// The first counts[b] of Q tokens a row go into the states; k, v, g, beta as above.
void nrank_delta_commit(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                        const float* g, const float* beta, const int64_t* key_head, float* states,
                        const int64_t* slots, const int64_t* counts, int64_t B, int64_t Q,
                        int64_t Hk, int64_t Hv, int64_t dk, int64_t dv) {
    const int64_t heads = Hk * dk;
    float* key = scratch<float>(Q * heads);
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < counts[b]; ++t)
            unit_heads(key + t * heads, k + (b * Q + t) * k_stride, 1.0f, Hk, dk);
        for (int64_t h = 0; h < Hv; ++h) {
            float* S = states + (slots[b] * Hv + h) * dk * dv;
            for (int64_t t = 0; t < counts[b]; ++t) {
                const int64_t row = b * Q + t;
                delta_token(S, nullptr, key + t * heads + key_head[h] * dk,
                            v + row * v_stride + h * dv, g[row * Hv + h], beta[row * Hv + h],
                            nullptr, dk, dv);
            }
        }
    }
}

// a, b [N,H] with row stride; a_log, dt_bias [H]; g, beta [N,H].
void nrank_delta_gates(const float* a, const float* b, int64_t stride, const float* a_log,
                       const float* dt_bias, float* g, float* beta, int64_t N, int64_t H) {
    for (int64_t n = 0; n < N; ++n)
        for (int64_t h = 0; h < H; ++h) {
            const float x = a[n * stride + h] + dt_bias[h];
            const float soft = x > 20.0f ? x : std::log1p(std::exp(x));
            g[n * H + h] = -std::exp(a_log[h]) * soft;
            beta[n * H + h] = sigmoid(b[n * stride + h]);
        }
}

}  // extern "C"
