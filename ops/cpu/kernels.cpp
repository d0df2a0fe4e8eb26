// Decode kernels for CPU, float32, one thread: each replaces dozens of small tensor calls.
// Plain C interface, no torch headers; built on demand by native.py, which also checks every
// argument. Meaning: ops/reference. All arrays are contiguous unless a comment says otherwise.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// exp with at most 2 ulp error; branch-free, so loops over it vectorise. NaN stays NaN.
inline float fast_exp(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.7f ? 88.7f : x;
    const float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors, so that n = 128 does not overflow the exponent field.
    const int32_t whole = static_cast<int32_t>(n), half = whole >> 1;
    const int32_t a = (half + 127) << 23, b = (whole - half + 127) << 23;
    float fa, fb;
    std::memcpy(&fa, &a, 4);
    std::memcpy(&fb, &b, 4);
    return p * fa * fb;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }

inline float dot(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// sums[i] = a[i * stride] . b for four rows: four chains of additions hide each other's latency.
inline void dot4(const float* a, int64_t stride, const float* b, int64_t n, float* sums) {
    const float *a1 = a + stride, *a2 = a + 2 * stride, *a3 = a + 3 * stride;
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < n; ++i) {
        s0 += a[i] * b[i];
        s1 += a1[i] * b[i];
        s2 += a2[i] * b[i];
        s3 += a3[i] * b[i];
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

// y[rows] = a [rows,n] x b [n]
inline void matvec(float* y, const float* a, const float* b, int64_t rows, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dot4(a + r * n, n, b, n, y + r);
    for (; r < rows; ++r) y[r] = dot(a + r * n, b, n);
}

inline float inverse_rms(const float* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// y[n] += a * x[n]
inline void axpy(float* y, float a, const float* x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// y[Hk,dk]: each head of x scaled to the length `root`
inline void unit_heads(float* y, const float* x, float root, int64_t Hk, int64_t dk) {
    for (int64_t h = 0; h < Hk; ++h) {
        const float* in = x + h * dk;
        const float r = root / std::sqrt(dot(in, in, dk) + 1e-6f);
#pragma omp simd
        for (int64_t i = 0; i < dk; ++i) y[h * dk + i] = in[i] * r;
    }
}

// One token of the gated delta rule into S [dk,dv], then out [dv] = S read with query [dk]; without
// out nothing is read. delta [dv] is scratch. One function for a step, a verification and its
// commit, so that a token gives the same bits in all of them.
__attribute__((noinline)) void delta_token(float* S, const float* query, const float* key,
                                           const float* v, float g, float beta, float* delta,
                                           float* out, int64_t dk, int64_t dv) {
    const float decay = fast_exp(g);
    std::memset(delta, 0, dv * sizeof(float));
    for (int64_t i = 0; i < dk; ++i) {
#pragma omp simd
        for (int64_t j = 0; j < dv; ++j) {
            S[i * dv + j] *= decay;
            delta[j] += key[i] * S[i * dv + j];
        }
    }
#pragma omp simd
    for (int64_t j = 0; j < dv; ++j) delta[j] = beta * (v[j] - delta[j]);
    if (out) std::memset(out, 0, dv * sizeof(float));
    for (int64_t i = 0; i < dk; ++i) {
        axpy(S + i * dv, key[i], delta, dv);
        if (out) axpy(out, query[i], S + i * dv, dv);
    }
}

}  // namespace

extern "C" {

// streams [T,S,H]; scale [S,H]; down [S*H, R+I] and up [R, S*H] (both column-major weights);
// mixed [T,H]; inject [T,I] with I = S or 0; scratch [2*S*H + R + I].
void nrank_hyper_mix(const float* streams, const float* scale, const float* down, const float* up,
                     float* mixed, float* inject, float* scratch, int64_t T, int64_t S, int64_t H,
                     int64_t R, int64_t I, float eps) {
    const int64_t width = S * H, outs = R + I;
    float *normed = scratch, *gate = scratch + width, *low = scratch + 2 * width;
    for (int64_t t = 0; t < T; ++t) {
        const float* x = streams + t * width;
        for (int64_t s = 0; s < S; ++s) {
            const float r = inverse_rms(x + s * H, H, eps);
#pragma omp simd
            for (int64_t h = 0; h < H; ++h) normed[s * H + h] = x[s * H + h] * r * scale[s * H + h];
        }
        std::memset(low, 0, outs * sizeof(float));
        for (int64_t k = 0; k < width; ++k) axpy(low, normed[k], down + k * outs, outs);
        for (int64_t i = 0; i < I; ++i) inject[t * I + i] = 2.0f * sigmoid(low[R + i]);
        std::memset(gate, 0, width * sizeof(float));
        for (int64_t r = 0; r < R; ++r) axpy(gate, silu(low[r]), up + r * width, width);
        float* out = mixed + t * H;
        const float share = 1.0f / static_cast<float>(S);
        std::memset(out, 0, H * sizeof(float));
        for (int64_t s = 0; s < S; ++s) {
#pragma omp simd
            for (int64_t h = 0; h < H; ++h)
                out[h] += share * sigmoid(gate[s * H + h]) * normed[s * H + h];
        }
    }
}

// streams [T,S,H] += inject [T,S] x y [T,H]
void nrank_hyper_inject(float* streams, const float* inject, const float* y, int64_t T, int64_t S,
                        int64_t H) {
    for (int64_t t = 0; t < T; ++t)
        for (int64_t s = 0; s < S; ++s)
            axpy(streams + (t * S + s) * H, inject[t * S + s], y + t * H, H);
}

// x [B,C] with row stride x_stride; weight [C,K]; windows [slots,W,C], W = (K-1)*dilation; y [B,C].
void nrank_conv_step(const float* x, int64_t x_stride, const float* weight, float* windows,
                     const int64_t* slots, float* y, int64_t B, int64_t C, int64_t K,
                     int64_t dilation) {
    const int64_t rows = (K - 1) * dilation;
    for (int64_t b = 0; b < B; ++b) {
        float *window = windows + slots[b] * rows * C, *out = y + b * C;
        const float* now = x + b * x_stride;
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) out[c] = weight[c * K + K - 1] * now[c];
        for (int64_t k = 0; k + 1 < K; ++k) {
            const float* past = window + k * dilation * C;
#pragma omp simd
            for (int64_t c = 0; c < C; ++c) out[c] += weight[c * K + k] * past[c];
        }
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) out[c] = silu(out[c]);
        std::memmove(window, window + C, (rows - 1) * C * sizeof(float));
        std::memcpy(window + (rows - 1) * C, now, C * sizeof(float));
    }
}

// Q tokens a row, the windows left as they are: x, y [B*Q,C], else as above.
void nrank_conv_verify(const float* x, int64_t x_stride, const float* weight, const float* windows,
                       const int64_t* slots, float* y, int64_t B, int64_t Q, int64_t C, int64_t K,
                       int64_t dilation) {
    const int64_t rows = (K - 1) * dilation;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t t = 0; t < Q; ++t) {
            const float *window = windows + slots[b] * rows * C, *tokens = x + b * Q * x_stride;
            const float* now = tokens + t * x_stride;
            float* out = y + (b * Q + t) * C;
#pragma omp simd
            for (int64_t c = 0; c < C; ++c) out[c] = weight[c * K + K - 1] * now[c];
            for (int64_t k = 0; k + 1 < K; ++k) {
                const int64_t at = t + k * dilation;
                const float* past = at < rows ? window + at * C : tokens + (at - rows) * x_stride;
#pragma omp simd
                for (int64_t c = 0; c < C; ++c) out[c] += weight[c * K + k] * past[c];
            }
#pragma omp simd
            for (int64_t c = 0; c < C; ++c) out[c] = silu(out[c]);
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
// key_head [Hv]; states [slots,Hv,dk,dv]; o [B,Hv,dv]; scratch [2*Hk*dk + dv].
void nrank_delta_step(const float* q, const float* k, int64_t qk_stride, const float* v,
                      int64_t v_stride, const float* g, const float* beta, const int64_t* key_head,
                      float* states, const int64_t* slots, float* o, float* scratch, int64_t B,
                      int64_t Hk, int64_t Hv, int64_t dk, int64_t dv) {
    float *query = scratch, *key = scratch + Hk * dk, *delta = scratch + 2 * Hk * dk;
    const float root = 1.0f / std::sqrt(static_cast<float>(dk));
    for (int64_t b = 0; b < B; ++b) {
        unit_heads(query, q + b * qk_stride, root, Hk, dk);
        unit_heads(key, k + b * qk_stride, 1.0f, Hk, dk);
        for (int64_t h = 0; h < Hv; ++h) {
            float *S = states + (slots[b] * Hv + h) * dk * dv, *out = o + (b * Hv + h) * dv;
            delta_token(S, query + key_head[h] * dk, key + key_head[h] * dk,
                        v + b * v_stride + h * dv, g[b * Hv + h], beta[b * Hv + h], delta, out, dk,
                        dv);
        }
    }
}

// Q tokens a row, the states left as they are. q, k [B*Q,Hk,dk], v [B*Q,Hv,dv] with row strides;
// g, beta [B*Q,Hv]; o [B*Q,Hv,dv]; scratch [2*Q*Hk*dk + dv + dk*dv].
void nrank_delta_verify(const float* q, const float* k, int64_t qk_stride, const float* v,
                        int64_t v_stride, const float* g, const float* beta,
                        const int64_t* key_head, const float* states, const int64_t* slots,
                        float* o, float* scratch, int64_t B, int64_t Q, int64_t Hk, int64_t Hv,
                        int64_t dk, int64_t dv) {
    const int64_t heads = Hk * dk;
    float *query = scratch, *key = scratch + Q * heads, *delta = scratch + 2 * Q * heads;
    float* S = delta + dv;
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
                            g[row * Hv + h], beta[row * Hv + h], delta, o + (row * Hv + h) * dv, dk,
                            dv);
            }
        }
    }
}

// The first counts[b] of Q tokens a row go into the states; k, v, g, beta as above;
// scratch [Q*Hk*dk + dv].
void nrank_delta_commit(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                        const float* g, const float* beta, const int64_t* key_head, float* states,
                        const int64_t* slots, const int64_t* counts, float* scratch, int64_t B,
                        int64_t Q, int64_t Hk, int64_t Hv, int64_t dk, int64_t dv) {
    const int64_t heads = Hk * dk;
    float *key = scratch, *delta = scratch + Q * heads;
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < counts[b]; ++t)
            unit_heads(key + t * heads, k + (b * Q + t) * k_stride, 1.0f, Hk, dk);
        for (int64_t h = 0; h < Hv; ++h) {
            float* S = states + (slots[b] * Hv + h) * dk * dv;
            for (int64_t t = 0; t < counts[b]; ++t) {
                const int64_t row = b * Q + t;
                delta_token(S, nullptr, key + t * heads + key_head[h] * dk,
                            v + row * v_stride + h * dv, g[row * Hv + h], beta[row * Hv + h], delta,
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

// x [rows,d] contiguous; gate [rows,d] in groups of `heads` rows a token with token stride.
void nrank_gated_norm(const float* x, const float* weight, const float* gate, int64_t gate_stride,
                      float* y, int64_t tokens, int64_t heads, int64_t d, float eps, int is_silu) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            const float *in = x + (t * heads + h) * d, *z = gate + t * gate_stride + h * d;
            const float r = inverse_rms(in, d, eps);
            float* out = y + (t * heads + h) * d;
#pragma omp simd
            for (int64_t i = 0; i < d; ++i) {
                const float s = sigmoid(z[i]);
                out[i] = in[i] * r * weight[i] * (is_silu ? z[i] * s : s);
            }
        }
}

// logits [T,E] with row stride; weights [T,k]; ids [T,k]. Ties go to the lowest id. scratch [E].
void nrank_route(const float* logits, int64_t stride, float* weights, int64_t* ids, float* scratch,
                 int64_t T, int64_t E, int64_t k, int normalise) {
    for (int64_t t = 0; t < T; ++t) {
        const float* row = logits + t * stride;
        float top = row[0], sum = 0.0f, chosen = 0.0f;
        for (int64_t e = 1; e < E; ++e) top = row[e] > top ? row[e] : top;
        for (int64_t e = 0; e < E; ++e) sum += scratch[e] = fast_exp(row[e] - top);
        for (int64_t e = 0; e < E; ++e) scratch[e] /= sum;
        for (int64_t i = 0; i < k; ++i) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; ++e)
                if (scratch[e] >= 0.0f && (best < 0 || scratch[e] > scratch[best])) best = e;
            if (best < 0) best = i;  // all NaN: any ids in range, the row is caught by its logits
            ids[t * k + i] = best;
            weights[t * k + i] = scratch[best];
            chosen += scratch[best];
            scratch[best] = -1.0f;
        }
        if (normalise)
            for (int64_t i = 0; i < k; ++i) weights[t * k + i] /= chosen;
    }
}

// x [T,H]; weights, local [T,k] (local < 0: a peer's expert); gate_up [El,2I,H]; down [El,H,I];
// out [T,H]; scratch [2*I + H].
void nrank_moe(const float* x, const float* weights, const int64_t* local, const float* gate_up,
               const float* down, float* out, float* scratch, int64_t T, int64_t k, int64_t H,
               int64_t I) {
    for (int64_t t = 0; t < T; ++t) {
        const float* in = x + t * H;
        float* y = out + t * H;
        std::memset(y, 0, H * sizeof(float));
        for (int64_t r = 0; r < k; ++r) {
            const int64_t expert = local[t * k + r];
            if (expert < 0) continue;
            const float weight = weights[t * k + r];
            float *hidden = scratch, *up = scratch + I, *routed = scratch + 2 * I;
            matvec(hidden, gate_up + expert * 2 * I * H, in, 2 * I, H);
#pragma omp simd
            for (int64_t i = 0; i < I; ++i) hidden[i] = weight * silu(hidden[i]) * up[i];
            matvec(routed, down + expert * H * I, hidden, H, I);
            axpy(y, 1.0f, routed, H);
        }
    }
}

// x [rows,d] in groups of `inner` contiguous rows, `stride` elements from group to group.
void nrank_rms_norm(const float* x, int64_t stride, const float* scale, float* y, int64_t groups,
                    int64_t inner, int64_t d, float eps) {
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t i = 0; i < inner; ++i) {
            const float* in = x + g * stride + i * d;
            const float r = inverse_rms(in, d, eps);
            float* out = y + (g * inner + i) * d;
#pragma omp simd
            for (int64_t j = 0; j < d; ++j) out[j] = in[j] * r * scale[j];
        }
}

// x, y [T,heads,d]; cos, sin [T,rotary]: rotate-half over the first `rotary` dimensions.
void nrank_rope(const float* x, const float* cos, const float* sin, float* y, int64_t T,
                int64_t heads, int64_t d, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            const float *in = x + (t * heads + h) * d, *c = cos + t * rotary, *s = sin + t * rotary;
            float* out = y + (t * heads + h) * d;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                out[i] = in[i] * c[i] - in[half + i] * s[i];
                out[half + i] = in[half + i] * c[half + i] + in[i] * s[half + i];
            }
            std::memcpy(out + rotary, in + rotary, (d - rotary) * sizeof(float));
        }
}

// ids [n]; table [rows,w]; y [n,w]: row id - start, zeros where another rank owns it.
void nrank_table_rows(const float* table, const int64_t* ids, float* y, int64_t n, int64_t rows,
                      int64_t w, int64_t start) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t row = ids[i] - start;
        if (row >= 0 && row < rows)
            std::memcpy(y + i * w, table + row * w, w * sizeof(float));
        else
            std::memset(y + i * w, 0, w * sizeof(float));
    }
}

// history [B,ctx+Q] -> ids [B,Q,n_heads], n_heads = (n-1)*per; multipliers [n].
void nrank_ngram_ids(const int64_t* history, const int64_t* multipliers, const int64_t* sizes,
                     const int64_t* offsets, int64_t* ids, int64_t B, int64_t Q, int64_t ctx,
                     int64_t n, int64_t per, int64_t eos) {
    for (int64_t b = 0; b < B; ++b)
        for (int64_t q = 0; q < Q; ++q) {
            const int64_t* now = history + b * (ctx + Q) + ctx + q;
            int64_t mixed = now[0] * multipliers[0], *out = ids + (b * Q + q) * (n - 1) * per;
            bool ended = false;  // an end token since: what lies before it is replaced by it
            for (int64_t back = 1; back < n; ++back) {
                ended = ended || now[-back] == eos;
                mixed ^= (ended ? eos : now[-back]) * multipliers[back];
                for (int64_t h = (back - 1) * per; h < back * per; ++h)
                    out[h] = mixed % sizes[h] + offsets[h];
            }
        }
}

// gate_up [T,2I] with row stride; gate [T] with stride: silu(g) * u * sigmoid(gate) -> y [T,I].
void nrank_gated_swiglu(const float* gate_up, int64_t stride, const float* gate,
                        int64_t gate_stride, float* y, int64_t T, int64_t I) {
    for (int64_t t = 0; t < T; ++t) {
        const float *g = gate_up + t * stride, *u = g + I, share = sigmoid(gate[t * gate_stride]);
#pragma omp simd
        for (int64_t i = 0; i < I; ++i) y[t * I + i] = silu(g[i]) * u[i] * share;
    }
}

// query, out [B,Q,nq,d]; pools [pages,page,nkv,d]; table [B,P] with row stride; positions [B,Q];
// blocks [B,Q,K] or null (all tokens up to the position); groups [nkv]; scratch: scores and token
// slots of the longest row.
void nrank_attention(const float* query, const float* k_pool, const float* v_pool,
                     const int64_t* table, int64_t table_stride, const int64_t* positions,
                     const int64_t* blocks, const int64_t* groups, float* out, float* scores,
                     int64_t* slots, int64_t B, int64_t Q, int64_t nq, int64_t nkv, int64_t d,
                     int64_t page, int64_t K, int64_t block, float scale) {
    for (int64_t row = 0; row < B * Q; ++row) {
        const int64_t position = positions[row], *pages = table + row / Q * table_stride;
        float* o = out + row * nq * d;
        std::memset(o, 0, nq * d * sizeof(float));
        if (position < 0) continue;
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
                const float* qh = query + (row * nq + head) * d;
                float top = -INFINITY, sum = 0.0f;
                for (int64_t t = 0; t < n; ++t) {
                    scores[t] = scale * dot(qh, k_pool + (slots[t] * nkv + kv) * d, d);
                    top = scores[t] > top ? scores[t] : top;
                }
#pragma omp simd reduction(+ : sum)
                for (int64_t t = 0; t < n; ++t) sum += scores[t] = fast_exp(scores[t] - top);
                for (int64_t t = 0; t < n; ++t)
                    axpy(o + head * d, scores[t] / sum, v_pool + (slots[t] * nkv + kv) * d, d);
            }
    }
}

}  // extern "C"
