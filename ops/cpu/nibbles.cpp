// Part of packed.cpp: products with four-bit codes whose even and odd columns stay apart, as they
// lie in the nibbles of a byte. Inside its unnamed namespace.

#ifdef __AVX2__

// What the zero points take from output m of a row.
inline float zero_part(const Packed& w, const RowScales& s, const float* sums, int64_t m) {
    float part = 0.0f;
    if (w.zero)
        for (int64_t g = 0; g < w.across; ++g)
            part += s.scale[g] * s.zero[g] * sums[m * w.across + g];
    return part;
}

#ifdef __AVX512F__

typedef __m512 Levels;

inline Levels levels_of(const Packed& w) {
    float levels[16];
    for (int i = 0; i < 16; ++i) levels[i] = w.is_float4 ? FLOAT4[i] : SIGNED4[i];
    return _mm512_loadu_ps(levels);
}

inline bool has_nibble_product(const Packed& w) {
    return w.bits == 4 && w.columns % CHUNK == 0 && (w.group % CHUNK == 0 || w.group == CHUNK / 2);
}

// Four-bit codes of a chunk looked up as floats: even columns in the low nibbles, odd in the high.
// x has them apart in the same way. A group is whole chunks, or half of one (WIDE or not).
template <bool WIDE, int M>
void dot_nibbles(const Packed& w, const uint8_t* codes, const RowScales& s, Levels table,
                 const float* x, const float* sums, float* out, int64_t out_stride) {
    __m512 total[M];
    for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
    const int64_t step = WIDE ? w.group : CHUNK;
    for (int64_t k = 0, g = 0; k < w.columns; g += WIDE ? 1 : 2) {
        __m512 even[M], odd[M];
        for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();
        for (const int64_t end = k + step; k < end; k += CHUNK) {
            const __m128i bytes = _mm_loadu_si128((const __m128i*)(codes + k / 2));
            const __m512i both = _mm512_cvtepu8_epi32(bytes);
            const __m512 low = _mm512_permutexvar_ps(both, table);
            const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table);
            for (int m = 0; m < M; ++m) {
                const float* at = x + m * w.columns + k;
                even[m] = _mm512_fmadd_ps(_mm512_loadu_ps(at), low, even[m]);
                odd[m] = _mm512_fmadd_ps(_mm512_loadu_ps(at + 16), high, odd[m]);
            }
        }
        __m512 scale = _mm512_set1_ps(s.scale[g]);
        if (!WIDE) scale = _mm512_mask_blend_ps(0xFF00, scale, _mm512_set1_ps(s.scale[g + 1]));
        for (int m = 0; m < M; ++m)
            total[m] = _mm512_fmadd_ps(_mm512_add_ps(even[m], odd[m]), scale, total[m]);
    }
    for (int m = 0; m < M; ++m)
        out[m * out_stride] = sum_of((vec)total[m]) - zero_part(w, s, sums, m);
}

#else

struct Levels {};

inline Levels levels_of(const Packed&) { return {}; }

inline bool has_nibble_product(const Packed& w) {
    return w.bits == 4 && !w.is_float4 && w.columns % CHUNK == 0 && w.group % CHUNK == 0;
}

// The same for eight lanes and integer codes, which stand in the highest bits of their lane: times
// 2^28, taken back with the scale. A group is whole chunks.
template <bool WIDE, int M>
void dot_nibbles(const Packed& w, const uint8_t* codes, const RowScales& s, Levels,
                 const float* x, const float* sums, float* out, int64_t out_stride) {
    static_assert(WIDE);
    __m256 total[M];
    for (int m = 0; m < M; ++m) total[m] = _mm256_setzero_ps();
    for (int64_t k = 0, g = 0; k < w.columns; ++g) {
        __m256 even[M], odd[M];
        for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm256_setzero_ps();
        for (const int64_t end = k + w.group; k < end; k += CHUNK)
            for (int64_t i = 0; i < CHUNK / 2; i += 8) {
                const auto from = reinterpret_cast<const __m128i*>(codes + k / 2 + i);
                const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
                const __m256 low = _mm256_cvtepi32_ps(_mm256_slli_epi32(both, 28));
                const __m256i upper = _mm256_srli_epi32(both, 4);
                const __m256 high = _mm256_cvtepi32_ps(_mm256_slli_epi32(upper, 28));
                for (int m = 0; m < M; ++m) {
                    const float* at = x + m * w.columns + k + i;
                    even[m] = _mm256_fmadd_ps(_mm256_loadu_ps(at), low, even[m]);
                    odd[m] = _mm256_fmadd_ps(_mm256_loadu_ps(at + CHUNK / 2), high, odd[m]);
                }
            }
        const __m256 scale = _mm256_set1_ps(s.scale[g] * 0x1p-28f);
        for (int m = 0; m < M; ++m)
            total[m] = _mm256_fmadd_ps(_mm256_add_ps(even[m], odd[m]), scale, total[m]);
    }
    for (int m = 0; m < M; ++m)
        out[m * out_stride] = sum_of((vec)total[m]) - zero_part(w, s, sums, m);
}

#endif

template <bool WIDE>
void nibble_product(const Packed& w, int64_t expert, const float* x, const float* sums, float* y,
                    int64_t M, float* room) {
    const Levels table = levels_of(w);
    RowScales scales(w, expert, room);
    for (int64_t n = 0; n < w.rows; ++n) {
        scales.at(n);
        const uint8_t* codes = w.codes + (expert * w.rows + n) * w.columns / 2;
        for (int64_t m = 0, taken; m < M; m += taken) {
            taken = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
            const float *in = x + m * w.columns, *of = sums ? sums + m * w.across : nullptr;
            float* out = y + m * w.rows + n;
            if (taken == 4)
                dot_nibbles<WIDE, 4>(w, codes, scales, table, in, of, out, w.rows);
            else if (taken == 2)
                dot_nibbles<WIDE, 2>(w, codes, scales, table, in, of, out, w.rows);
            else
                dot_nibbles<WIDE, 1>(w, codes, scales, table, in, of, out, w.rows);
        }
    }
}

// x [M, K] with the even and the odd columns of each chunk apart.
inline void split_pairs(const float* x, int64_t stride, float* to, int64_t M, int64_t K) {
    for (int64_t m = 0; m < M; ++m)
        for (int64_t k = 0; k < K; k += CHUNK, to += CHUNK)
            for (int64_t i = 0; i < CHUNK / 2; ++i) {
                to[i] = x[m * stride + k + 2 * i];
                to[i + CHUNK / 2] = x[m * stride + k + 2 * i + 1];
            }
}

#endif
