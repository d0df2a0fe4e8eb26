// Part of kernels.cpp: products with low-bit weights, straight from their codes. Meaning:
// ops/reference/packed.py. A row of outputs has the same bits however many rows go together.

#ifdef __AVX2__
#include <immintrin.h>
#endif

extern "C" {

// A bank of packed matrices [experts, rows, columns]; native_packed.py has the same fields.
struct Packed {
    const uint8_t* codes;
    const void *scale, *zero;  // [experts, down, across]; zero may be null
    const float* whole;        // [experts, stacked] or null
    int64_t bits, is_float4, scale_type, zero_type;
    int64_t rows, columns, group, block_rows, stacked, down, across;
};

}  // extern "C"

namespace {

enum Stored : int64_t { F32, F16, BF16, E4M3, E8M0, I8 };
constexpr int64_t CHUNK = 32;  // codes decoded at once; half as many floats, in groups of 16

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float from_half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, size = h & 0x7FFF;
    if (size >= 0x7C00) return from_bits(sign | 0x7F800000 | (size & 0x3FF) << 13);
    const float scaled = from_bits(size << 13) * from_bits(0x77800000);  // 2^112: the bias
    return sign ? -scaled : scaled;
}

inline float from_e4m3(uint8_t b) {
    const float size = from_bits(static_cast<uint32_t>(b & 0x7F) << 20) * from_bits(0x7B800000);
    return b & 0x80 ? -size : size;  // 2^120: the bias; NaN was refused by the loader
}

inline void to_floats(const void* from, int64_t type, int64_t first, int64_t n, float* to) {
    const auto at = static_cast<const uint8_t*>(from);
    if (type == F32) std::memcpy(to, at + 4 * first, n * sizeof(float));
    const auto half = reinterpret_cast<const uint16_t*>(at) + first;
    int64_t i = 0;
    if (type == F16) {
#ifdef __F16C__
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(half + i))));
#endif
#ifdef __F16C__
        for (; i < n; ++i) to[i] = _cvtsh_ss(half[i]);
#endif
        for (; i < n; ++i) to[i] = from_half(half[i]);
    }
    if (type == BF16)
        for (; i < n; ++i) to[i] = from_bits(static_cast<uint32_t>(half[i]) << 16);
    if (type == E4M3)
        for (; i < n; ++i) to[i] = from_e4m3(at[first + i]);
    if (type == E8M0)
        for (; i < n; ++i) to[i] = from_bits(at[first + i] ? at[first + i] << 23 : 1 << 22);
    if (type == I8)
        for (; i < n; ++i) to[i] = static_cast<int8_t>(at[first + i]);
}

// Scales and zero points of one row after the other, some rows of them converted at once.
struct RowScales {
    static constexpr int64_t TILE = 32;  // blocks of rows that are held

    const Packed& w;
    int64_t expert, first = 0, last = 0;  // blocks held
    float *scales, *zeros, *scale, *zero;  // room for room_for(w) floats from `scales` on

    static int64_t room_for(const Packed& w) { return 2 * TILE * w.across; }

    RowScales(const Packed& w, int64_t expert, float* room)
        : w(w), expert(expert), scales(room), zeros(room + TILE * w.across) {}

    void at(int64_t row) {
        const int64_t block = w.block_rows == 1 ? row : block_of(row);
        if (block < first || block >= last) hold(block);
        scale = scales + (block - first) * w.across;
        zero = zeros + (block - first) * w.across;
    }

  private:
    int64_t block_of(int64_t row) const {
        const int64_t part = w.rows / w.stacked, stored = row / part;
        const int64_t height = w.block_rows ? w.block_rows : part;
        return stored * (w.down / w.stacked) + (row - stored * part) / height;
    }

    void hold(int64_t block) {
        const int64_t part = w.down / w.stacked, stored = block / part;
        first = block;
        last = std::min(first + TILE, (stored + 1) * part);
        const int64_t from = (expert * w.down + first) * w.across, n = (last - first) * w.across;
        to_floats(w.scale, w.scale_type, from, n, scales);
        float factor = w.is_float4 ? 0.5f : 1.0f;  // levels are kept as twice their value
        if (w.whole) factor *= w.whole[expert * w.stacked + stored];
        if (factor != 1.0f)
            for (int64_t g = 0; g < n; ++g) scales[g] *= factor;
        if (w.zero) to_floats(w.zero, w.zero_type, from, n, zeros);
    }
};

// CHUNK codes as signed bytes, in registers where there are some for them.
struct Bytes {
#ifdef __AVX2__
    __m128i half[2];
#else
    int8_t at[CHUNK];
#endif
};

alignas(16) constexpr int8_t SIGNED4[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
alignas(16) constexpr int8_t FLOAT4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t SIGNED2[16] = {0, 1, -2, -1};

enum Kind { INT2, INT4, FLOAT4_KIND, INT8 };

template <int KIND>
constexpr const int8_t* levels() {
    return KIND == INT2 ? SIGNED2 : KIND == INT4 ? SIGNED4 : FLOAT4;
}

#ifdef __AVX2__

// N codes (32 or 16) from p on.
template <int KIND, int N>
inline Bytes decode(const uint8_t* p) {
    const auto from = reinterpret_cast<const __m128i*>(p);
    Bytes out;
    out.half[1] = _mm_setzero_si128();
    if constexpr (KIND == INT8) {
        out.half[0] = _mm_loadu_si128(from);
        if constexpr (N == CHUNK) out.half[1] = _mm_loadu_si128(from + 1);
        return out;
    }
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(levels<KIND>()));
    const __m128i low = _mm_set1_epi8(15), two = _mm_set1_epi8(3);
    const bool is_whole = KIND != INT2 && N == CHUNK;
    __m128i v = is_whole ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
    __m128i a = _mm_and_si128(v, low), b = _mm_and_si128(_mm_srli_epi16(v, 4), low);
    if constexpr (KIND == INT2) {  // pairs of codes first
        v = _mm_unpacklo_epi8(a, b);
        a = _mm_and_si128(v, two);
        b = _mm_and_si128(_mm_srli_epi16(v, 2), two);
    }
    a = _mm_shuffle_epi8(table, a);
    b = _mm_shuffle_epi8(table, b);
    out.half[0] = _mm_unpacklo_epi8(a, b);
    if constexpr (N == CHUNK) out.half[1] = _mm_unpackhi_epi8(a, b);
    return out;
}

// LANES of the codes from `first` on.
inline vec floats_of(const Bytes& b, int64_t first) {
    const __m128i half = b.half[first / 16];
#ifdef __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half));
#else
    const __m128i part = first % 16 ? _mm_srli_si128(half, 8) : half;
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part));
#endif
}

#else

template <int KIND, int N>
inline Bytes decode(const uint8_t* p) {
    Bytes out;
    constexpr int BITS = KIND == INT2 ? 2 : KIND == INT8 ? 8 : 4;
    for (int i = 0; i < N; ++i)
        out.at[i] = KIND == INT8 ? static_cast<int8_t>(p[i])
                                 : levels<KIND>()[p[i * BITS / 8] >> i * BITS % 8 & ((1 << BITS) - 1)];
    return out;
}

inline vec floats_of(const Bytes& b, int64_t first) {
    float all[LANES];
    for (int64_t i = 0; i < LANES; ++i) all[i] = b.at[first + i];
    return load(all);
}

#endif

inline float sum_of(vec v) {
    float all[LANES];
    store(all, v);
    for (int64_t n = LANES / 2; n; n /= 2)  // pairs: a chain of additions would be waited for
        for (int64_t i = 0; i < n; ++i) all[i] += all[i + n];
    return all[0];
}

inline int64_t bytes_for(int64_t codes, int64_t bits) { return codes * bits / 8; }

// out[M] = one row of weights times M inputs: inputs in fp32 [M, stride].
template <int KIND, int N, int M>
void dot_floats(const Packed& w, const uint8_t* codes, const RowScales& s, const float* x,
                int64_t stride, const float* sums, float* out, int64_t out_stride) {
    constexpr int64_t BITS = KIND == INT2 ? 2 : KIND == INT8 ? 8 : 4;
    vec total[M] = {};
    float rest[M] = {};
    for (int64_t g = 0, k = 0; g < w.across; ++g) {
        const int64_t end = std::min(k + w.group, w.columns);
        vec part[2][M] = {};  // two chains of additions an input
        for (; k + N <= end; k += N) {
            const Bytes b = decode<KIND, N>(codes + bytes_for(k, BITS));
            for (int64_t i = 0; i < N; i += LANES) {
                const vec v = floats_of(b, i);
                vec* of = part[i / LANES % 2];
                for (int m = 0; m < M; ++m) of[m] += load(x + m * stride + k + i) * v;
            }
        }
        for (int m = 0; m < M; ++m) total[m] += (part[0][m] + part[1][m]) * s.scale[g];
        if constexpr (KIND == INT8)
            for (; k < end; ++k)
                for (int m = 0; m < M; ++m)
                    rest[m] += x[m * stride + k] * static_cast<int8_t>(codes[k]) * s.scale[g];
        if (w.zero)
            for (int m = 0; m < M; ++m) rest[m] -= s.scale[g] * s.zero[g] * sums[m * w.across + g];
    }
    for (int m = 0; m < M; ++m) out[m * out_stride] = sum_of(total[m]) + rest[m];
}

typedef int32_t ints __attribute__((vector_size(32)));
typedef float eight __attribute__((vector_size(32)));

inline eight floats_of(ints v) {
#ifdef __AVX2__
    return (eight)_mm256_cvtepi32_ps((__m256i)v);
#else
    return __builtin_convertvector(v, eight);
#endif
}

// Sums of products of N signed bytes, added to eight running sums.
template <int N>
inline ints add_products(ints sums, const Bytes& a, const int8_t* b) {
#ifdef __AVX2__
    const auto from = reinterpret_cast<const __m128i*>(b);
    const __m256i w = _mm256_set_m128i(a.half[1], a.half[0]);
    const __m256i x = N == CHUNK ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b))
                                 : _mm256_zextsi128_si256(_mm_loadu_si128(from));
    const __m256i size = _mm256_abs_epi8(w), with_sign = _mm256_sign_epi8(x, w);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (ints)_mm256_dpbusd_epi32((__m256i)sums, size, with_sign);
#else
    const __m256i pairs = _mm256_maddubs_epi16(size, with_sign);  // at most 2 * 128 * 127
    return (ints)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
#else
    for (int i = 0; i < N; ++i) sums[i % 8] += a.at[i] * b[i];
    return sums;
#endif
}

// The same for inputs in bytes [M, stride] with a step each.
template <int KIND, int N, int M>
void dot_bytes(const Packed& w, const uint8_t* codes, const RowScales& s, const int8_t* x,
               int64_t stride, const float* sums, const float* steps, float* out,
               int64_t out_stride) {
    constexpr int64_t BITS = KIND == INT2 ? 2 : KIND == INT8 ? 8 : 4;
    eight total[M] = {};
    float rest[M] = {};
    for (int64_t g = 0, k = 0; g < w.across; ++g) {
        const int64_t end = std::min(k + w.group, w.columns);
        ints part[M] = {};
        for (; k + N <= end; k += N) {
            const Bytes b = decode<KIND, N>(codes + bytes_for(k, BITS));
            for (int m = 0; m < M; ++m) part[m] = add_products<N>(part[m], b, x + m * stride + k);
        }
        for (int m = 0; m < M; ++m)
            total[m] += floats_of(part[m]) * s.scale[g];
        if constexpr (KIND == INT8) {
            int32_t left[M] = {};
            for (; k < end; ++k)
                for (int m = 0; m < M; ++m)
                    left[m] += x[m * stride + k] * static_cast<int8_t>(codes[k]);
            for (int m = 0; m < M; ++m) rest[m] += s.scale[g] * static_cast<float>(left[m]);
        }
        if (w.zero)
            for (int m = 0; m < M; ++m) rest[m] -= s.scale[g] * s.zero[g] * sums[m * w.across + g];
    }
    for (int m = 0; m < M; ++m) {
        float all[8], sum = 0.0f;
        std::memcpy(all, &total[m], sizeof all);
        for (float one : all) sum += one;
        out[m * out_stride] = (sum + rest[m]) * steps[m];
    }
}

// Inputs of a product [M, K]: as they are, or in bytes, with sums of groups for zero points.
struct Inputs {
    const float* x;
    int64_t stride;
    const int8_t* bytes = nullptr;  // [M, K] when rounded
    const float *steps = nullptr, *sums = nullptr;
};

template <int KIND, int N>
void product_of(const Packed& w, int64_t expert, const Inputs& in, float* y, int64_t M) {
    const int64_t K = w.columns, row_bytes = (K * w.bits + 7) / 8;
    std::vector<float>& room = *[] {
        static thread_local std::vector<float> held;
        return &held;
    }();
    const int64_t needed = RowScales::room_for(w);
    if (static_cast<int64_t>(room.size()) < needed) room.resize(needed);
    RowScales scales(w, expert, room.data());
    for (int64_t n = 0; n < w.rows; ++n) {
        scales.at(n);
        const uint8_t* codes = w.codes + (expert * w.rows + n) * row_bytes;
        for (int64_t m = 0, taken; m < M; m += taken) {
            taken = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
            const float* sums = in.sums ? in.sums + m * w.across : nullptr;
            float* out = y + m * w.rows + n;
            if (in.bytes) {
                const auto dot = taken == 4   ? dot_bytes<KIND, N, 4>
                                 : taken == 2 ? dot_bytes<KIND, N, 2>
                                              : dot_bytes<KIND, N, 1>;
                dot(w, codes, scales, in.bytes + m * K, K, sums, in.steps + m, out, w.rows);
            } else {
                const auto dot = taken == 4   ? dot_floats<KIND, N, 4>
                                 : taken == 2 ? dot_floats<KIND, N, 2>
                                              : dot_floats<KIND, N, 1>;
                dot(w, codes, scales, in.x + m * in.stride, in.stride, sums, out, w.rows);
            }
        }
    }
}

#include "nibbles.cpp"

// Rows of x [M, K] in 255 steps of their largest value each, as the reference rounds them.
void round_rows(const float* x, int64_t stride, int8_t* bytes, float* steps, int64_t M,
                int64_t K) {
    for (int64_t m = 0; m < M; ++m) {
        const float* row = x + m * stride;
        float largest = 0.0f;
        bool is_finite = true;
        for (int64_t k = 0; k < K; ++k) {
            const float size = std::fabs(row[k]);
            largest = size > largest ? size : largest;
            is_finite = is_finite && size <= 3.4e38f;
        }
        const float step = largest / 127.0f, by = step > 0.0f ? step : 1.0f;
        steps[m] = is_finite ? step : from_bits(0x7FC00000);  // NaN: the row is caught later
        for (int64_t k = 0; k < K; ++k)
            bytes[m * K + k] = is_finite ? static_cast<int8_t>(std::rint(row[k] / by)) : 0;
    }
}

// y [M, rows] = x [M, columns] times the transpose of one matrix of the bank.
void product(const Packed& w, int64_t expert, const float* x, int64_t stride, float* y, int64_t M,
             bool in_bytes) {
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> floats;
    const int64_t K = w.columns;
    Inputs in{x, stride};
    if (static_cast<int64_t>(floats.size()) < M * (1 + w.across)) floats.resize(M * (1 + w.across));
    if (in_bytes) {
        if (static_cast<int64_t>(bytes.size()) < M * K) bytes.resize(M * K);
        round_rows(x, stride, bytes.data(), floats.data(), M, K);
        in.bytes = bytes.data();
        in.steps = floats.data();
    }
    if (w.zero) {
        float* sums = floats.data() + M;
        for (int64_t m = 0; m < M; ++m)
            for (int64_t g = 0; g < w.across; ++g) {
                const int64_t first = g * w.group, end = std::min(first + w.group, K);
                float sum = 0.0f;
                for (int64_t k = first; k < end; ++k)
                    sum += in_bytes ? bytes[m * K + k] : x[m * stride + k];
                sums[m * w.across + g] = sum;
            }
        in.sums = sums;
    }
#ifdef __AVX2__
    if (!in_bytes && has_nibble_product(w)) {
        static thread_local std::vector<float> apart;
        const auto needed = static_cast<size_t>(M * K + RowScales::room_for(w));
        if (apart.size() < needed) apart.resize(needed);
        float* room = apart.data() + M * K;
        split_pairs(x, stride, apart.data(), M, K);
#ifdef __AVX512F__
        if (w.group % CHUNK)
            return nibble_product<false>(w, expert, apart.data(), in.sums, y, M, room);
#endif
        return nibble_product<true>(w, expert, apart.data(), in.sums, y, M, room);
    }
#endif
    const auto of = w.bits == 8   ? product_of<INT8, CHUNK>
                    : w.bits == 2 ? product_of<INT2, CHUNK>
                    : w.is_float4 ? product_of<FLOAT4_KIND, CHUNK / 2>
                                  : product_of<INT4, CHUNK>;
    of(w, expert, in, y, M);
}

template <int KIND, int N>
void unpack_of(const Packed& w, int64_t expert, float* out) {
    const int64_t K = w.columns, row_bytes = (K * w.bits + 7) / 8;
    std::vector<float> room(RowScales::room_for(w));
    RowScales scales(w, expert, room.data());
    for (int64_t n = 0; n < w.rows; ++n, out += K) {
        scales.at(n);
        const uint8_t* codes = w.codes + (expert * w.rows + n) * row_bytes;
        for (int64_t g = 0, k = 0; g < w.across; ++g) {
            const int64_t end = std::min(k + w.group, K);
            const float scale = scales.scale[g], zero = w.zero ? scales.zero[g] : 0.0f;
            for (; k + N <= end; k += N) {
                const Bytes b = decode<KIND, N>(codes + bytes_for(k, w.bits));
                for (int64_t i = 0; i < N; i += LANES)
                    store(out + k + i, (floats_of(b, i) - zero) * scale);
            }
            for (; k < end; ++k)  // 8-bit codes only: the others come in whole chunks
                out[k] = (static_cast<int8_t>(codes[k]) - zero) * scale;
        }
    }
}

}  // namespace

extern "C" {

// One matrix of the bank as fp32 [rows, columns].
void nrank_unpack(const Packed* w, int64_t expert, float* out) {
    const auto of = w->bits == 8   ? unpack_of<INT8, CHUNK>
                    : w->bits == 2 ? unpack_of<INT2, CHUNK>
                    : w->is_float4 ? unpack_of<FLOAT4_KIND, CHUNK / 2>
                                   : unpack_of<INT4, CHUNK>;
    of(*w, expert, out);
}

// x [T, columns], rows apart by stride; y [T, rows].
void nrank_packed_linear(const float* x, int64_t stride, const Packed* w, float* y, int64_t T,
                         int in_bytes) {
    product(*w, 0, x, stride, y, T, in_bytes);
}

// As nrank_moe, from packed banks: gate_up [El, 2I, H], down [El, H, I].
void nrank_packed_moe(const float* x, const float* weights, const int64_t* local,
                      const Packed* gate_up, const Packed* down, float* out, int64_t T, int64_t k,
                      int in_bytes) {
    const int64_t H = gate_up->columns, I = down->columns;
    int64_t *order = scratch<int64_t>(T * k), routes = 0;
    for (int64_t i = 0; i < T * k; ++i)
        if (local[i] >= 0) order[routes++] = i;
    std::sort(order, order + routes, [local](int64_t a, int64_t b) {
        return local[a] != local[b] ? local[a] < local[b] : a < b;
    });
    float* in = scratch<float>(2 * T * (H + I));
    float *routed = in + T * H, *hidden = routed + T * H;
    std::memset(out, 0, T * H * sizeof(float));
    for (int64_t first = 0, last; first < routes; first = last) {
        const int64_t expert = local[order[first]];
        for (last = first; last < routes && local[order[last]] == expert; ++last)
            std::memcpy(in + (last - first) * H, x + order[last] / k * H, H * sizeof(float));
        const int64_t M = last - first;
        product(*gate_up, expert, in, H, hidden, M, in_bytes);
        for (int64_t m = 0; m < M; ++m) {
            float *gate = hidden + m * 2 * I, *up = gate + I, weight = weights[order[first + m]];
#pragma omp simd
            for (int64_t i = 0; i < I; ++i) gate[i] = weight * silu(gate[i]) * up[i];
        }
        product(*down, expert, hidden, 2 * I, routed, M, in_bytes);
        for (int64_t m = 0; m < M; ++m)
            axpy(out + order[first + m] / k * H, 1.0f, routed + m * H, H);
    }
}

}  // extern "C"
