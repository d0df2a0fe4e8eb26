// Decode kernels for CPU, float32, one thread: each replaces dozens of small tensor calls.
// Plain C interface, no torch headers; built on demand by library.py as one unit with the files
// included at the end. native*.py check every argument. Meaning: ops/reference. All arrays are
// contiguous unless a comment says otherwise.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
constexpr int SUMS = 24;  // vectors of running sums that fit in registers
#else
constexpr int64_t LANES = 8;
constexpr int SUMS = 12;
#endif
constexpr int64_t AHEAD = 16;  // rows of a weight that are asked for before they are needed
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

// This thread's buffer of n elements, one for each type; a kernel asks for it once.
template <typename T>
inline T* scratch(int64_t n) {
    static thread_local std::vector<T> held;
    if (static_cast<int64_t>(held.size()) < n) held.resize(n);
    return held.data();
}

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

// sums[i] = a_i . b for four rows: four chains of additions hide each other's latency.
inline void dot4(const float* a0, const float* a1, const float* a2, const float* a3,
                 const float* b, int64_t n, float* sums) {
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < n; ++i) {
        s0 += a0[i] * b[i];
        s1 += a1[i] * b[i];
        s2 += a2[i] * b[i];
        s3 += a3[i] * b[i];
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

inline float inverse_rms(const float* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// A number that is larger for a larger x, then for a lower index.
inline uint64_t ordered(float x, int64_t index) {
    int32_t bits;
    x += 0.0f;  // -0 to 0
    std::memcpy(&bits, &x, 4);
    const uint32_t key = bits < 0 ? ~static_cast<uint32_t>(bits) : bits | 0x80000000u;
    return static_cast<uint64_t>(key) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}

inline int64_t index_of(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

// y[n] += a * x[n]
inline void axpy(float* y, float a, const float* x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// y[n] += a[n] * x[n]
inline void axpy_each(float* y, const float* a, const float* x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += a[i] * x[i];
}

// y = normed x [n] times scale [n]
inline void norm_row(const float* x, const float* scale, float* y, int64_t n, float eps) {
    const float r = inverse_rms(x, n, eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * scale[i];
}

// y[R rows] = x[R][K] x w, in V vectors of columns of w [K][N]: one after the other, but the last
// one begins at column `last`. Rows of x are apart by x_stride, those of y by N.
template <int R, int V>
inline void columns(const float* x, int64_t x_stride, const float* w, float* y, int64_t K,
                    int64_t N, int64_t last) {
    const auto at = [last](int v) { return v + 1 < V ? v * LANES : last; };
    const bool is_long = R > 1 && K >= 8 * AHEAD;  // one row keeps up with memory by itself
    vec sums[R][V] = {};
    for (int64_t k = 0; k < K; ++k, w += N) {
        if (is_long)
            for (int v = 0; v < V; ++v) __builtin_prefetch(w + AHEAD * N + v * LANES);
        vec part[V];
        for (int v = 0; v < V; ++v) part[v] = load(w + at(v));
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] += x[r * x_stride + k] * part[v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(y + r * N + at(v), sums[r][v]);
}

// The same for all columns [N], as many vectors at a time as there are registers for their sums.
template <int R>
void rows(const float* x, int64_t x_stride, const float* w, float* y, int64_t K, int64_t N) {
    constexpr int V = SUMS / R < 12 ? SUMS / R : 12;
    for (int64_t n = 0, taken; n < N; n += taken * LANES) {
        const int64_t vectors = (N - n + LANES - 1) / LANES;  // the last one may begin before
        taken = vectors >= V ? V : vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
        const auto part = taken == V   ? columns<R, V>
                          : taken == 4 ? columns<R, 4>
                          : taken == 2 ? columns<R, 2>
                                       : columns<R, 1>;
        const int64_t last = std::min((taken - 1) * LANES, N - LANES - n);
        part(x, x_stride, w + n, y + n, K, N, last);
    }
}

// y[T,N] = x[T,K] x w[K,N], rows of x apart by x_stride: a column-major weight [N,K]. Each output
// is one chain of additions, whatever T is.
void linear(const float* x, int64_t x_stride, const float* w, float* y, int64_t T, int64_t K,
            int64_t N) {
    if (N < LANES) {
        for (int64_t t = 0; t < T; ++t)
            for (int64_t n = 0; n < N; ++n) {
                float sum = 0.0f;
                for (int64_t k = 0; k < K; ++k) sum += x[t * x_stride + k] * w[k * N + n];
                y[t * N + n] = sum;
            }
        return;
    }
    for (int64_t taken; T > 0; T -= taken, x += taken * x_stride, y += taken * N) {
        taken = T < 4 ? T : T % 4 == 1 ? 3 : 4;  // no row is left alone
        const auto some = taken == 4   ? rows<4>
                          : taken == 3 ? rows<3>
                          : taken == 2 ? rows<2>
                                       : rows<1>;
        some(x, x_stride, w, y, K, N);
    }
}

}  // namespace

extern "C" {

// x [T,K], rows apart by x_stride; w: a column-major weight [N,K]; y [T,N].
void nrank_linear(const float* x, int64_t x_stride, const float* w, float* y, int64_t T, int64_t K,
                  int64_t N) {
    linear(x, x_stride, w, y, T, K, N);
}

// streams [T,S,H]; scale [S,H]; down [S*H, R+I] and up [R, S*H] (both column-major weights);
// mixed [T,H]; inject [T,I] with I = S or 0.
void nrank_hyper_mix(const float* streams, const float* scale, const float* down, const float* up,
                     float* mixed, float* inject, int64_t T, int64_t S, int64_t H, int64_t R,
                     int64_t I, float eps) {
    const int64_t width = S * H, outs = R + I;
    float* normed = scratch<float>(T * (2 * width + outs));
    float *gate = normed + T * width, *low = gate + T * width;
    for (int64_t i = 0; i < T * S; ++i)
        norm_row(streams + i * H, scale + i % S * H, normed + i * H, H, eps);
    linear(normed, width, down, low, T, width, outs);
    for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < I; ++i) inject[t * I + i] = 2.0f * sigmoid(low[t * outs + R + i]);
        for (int64_t r = 0; r < R; ++r) low[t * outs + r] = silu(low[t * outs + r]);
    }
    linear(low, outs, up, gate, T, R, width);
    const float share = 1.0f / static_cast<float>(S);
    for (int64_t t = 0; t < T; ++t) {
        const float *g = gate + t * width, *n = normed + t * width;
        float* out = mixed + t * H;
#pragma omp simd
        for (int64_t h = 0; h < H; ++h) out[h] = share * sigmoid(g[h]) * n[h];
        for (int64_t s = 1; s < S; ++s) {
#pragma omp simd
            for (int64_t h = 0; h < H; ++h) out[h] += share * sigmoid(g[s * H + h]) * n[s * H + h];
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

// x [groups,inner,d] with the two strides; y contiguous.
void nrank_rms_norm(const float* x, int64_t stride, int64_t inner_stride, const float* scale,
                    float* y, int64_t groups, int64_t inner, int64_t d, float eps) {
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t i = 0; i < inner; ++i)
            norm_row(x + g * stride + i * inner_stride, scale, y + (g * inner + i) * d, d, eps);
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

// embedding [T,D]; streams [T,S,H]; key [S*H,D] and value [H,D] column-major; norms [S,H];
// gated, normed [T,S,H].
void nrank_ngram_gate(const float* embedding, const float* streams, const float* key,
                      const float* value, const float* norm_key, const float* norm_query,
                      const float* norm_conv, float* gated, float* normed, int64_t T, int64_t S,
                      int64_t H, int64_t D, float eps) {
    float* keys = scratch<float>((T * S + T + 1) * H);
    float *values = keys + T * S * H, *query = values + T * H;
    linear(embedding, D, key, keys, T, D, S * H);
    linear(embedding, D, value, values, T, D, H);
    for (int64_t t = 0; t < T; ++t)
        for (int64_t s = 0; s < S; ++s) {
            const int64_t row = (t * S + s) * H;
            norm_row(keys + row, norm_key + s * H, keys + row, H, eps);
            norm_row(streams + row, norm_query + s * H, query, H, eps);
            const float score = dot(keys + row, query, H) / std::sqrt(static_cast<float>(H));
            const float size = std::fabs(score), root = std::sqrt(size > 1e-6f ? size : 1e-6f);
            const float gate = sigmoid(score > 0.0f ? root : score < 0.0f ? -root : 0.0f * score);
#pragma omp simd
            for (int64_t h = 0; h < H; ++h) gated[row + h] = gate * values[t * H + h];
            norm_row(gated + row, norm_conv + s * H, normed + row, H, eps);
        }
}

}  // extern "C"

#include "attention.cpp"
#include "delta.cpp"
#include "experts.cpp"
#include "packed.cpp"
#include "sampling.cpp"
