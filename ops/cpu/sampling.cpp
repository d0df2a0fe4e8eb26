// Part of kernels.cpp: the next token of a row of logits, greedy or by Gumbel-max.

namespace {

// Natural logarithm of a positive normal number, at most 2 ulp off; branch-free (Cephes logf).
inline float fast_log(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    int32_t exponent = ((bits >> 23) & 0xFF) - 126;
    bits = (bits & 0x007FFFFF) | 0x3F000000;  // mantissa in [0.5, 1)
    float m;
    std::memcpy(&m, &bits, 4);
    const bool low = m < 0.707106781186547524f;
    const float e = static_cast<float>(low ? exponent - 1 : exponent);
    const float f = (low ? m + m : m) - 1.0f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const float y = p * f * z - 2.12194440e-4f * e - 0.5f * z;
    return f + y + 0.693359375f * e;
}

struct Stream {
    uint32_t key0, key1, position, choice;
};

// First word of Philox 4x32-10 for the counter (token, position, choice, 0).
inline uint32_t philox(uint32_t token, Stream s) {
    uint32_t c0 = token, c1 = s.position, c2 = s.choice, c3 = 0, k0 = s.key0, k1 = s.key1;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u;
        const uint64_t b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        const uint32_t high_a = a >> 32, high_b = b >> 32;
        c0 = high_b ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
        c2 = high_a ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

// -log(-log1p(-v)) with v = (word + 1/2) / 2^32, below 1.
inline float gumbel(uint32_t word) {
    float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
    v = v < 1.0f - 0x1p-24f ? v : 1.0f - 0x1p-24f;
    const float rest = 1.0f - v, lost = rest - 1.0f;  // -v as it was rounded: log1p by its ratio
    const float exponential = lost == 0.0f ? v : fast_log(rest) * v / lost;
    return -fast_log(exponential);
}

// Lowest index of the largest of x [n]; of the first NaN where there is one.
inline int64_t largest(const float* x, int64_t n) {
    float top = -INFINITY, spoilt = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : spoilt)
    for (int64_t i = 0; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
        spoilt += x[i] * 0.0f;
    }
    if (spoilt != spoilt)
        for (int64_t i = 0; i < n; ++i)
            if (x[i] != x[i]) return i;
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == top) return i;
    return 0;
}

// Sorts `keys` [n] from `begin` on so far that the largest are in order up to `end`.
inline void sort_to(uint64_t* keys, int64_t begin, int64_t end, int64_t n) {
    const auto larger = std::greater<uint64_t>();
    if (8 * (end - begin) < n - begin) {  // few of many: hardly any comes into their heap
        std::partial_sort(keys + begin, keys + end, keys + n, larger);
        return;
    }
    if (end < n) std::nth_element(keys + begin, keys + end, keys + n, larger);
    std::sort(keys + begin, keys + end, larger);
}

// Orders `keys` of x [n] and returns how many of the first ones top-k, min-p and top-p keep.
int64_t keep(const float* x, uint64_t* keys, int64_t n, int64_t top_k, float top_p, float min_p) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
    const float least = top + std::log(min_p);  // -inf where it is off
    int64_t count = 0;
    if (min_p > 0.0f) {
        for (int64_t i = 0; i < n; ++i)
            if (x[i] >= least) keys[count++] = ordered(x[i], i);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) keys[i] = ordered(x[i], i);
        count = n;
    }
    if (count == 0) return 0;  // NaN: the row is caught by its logits
    int64_t limit = top_k > 0 && top_k < count ? top_k : count;
    if (top_p >= 1.0f) {
        if (limit < count) sort_to(keys, 0, limit, count);
        return limit;
    }
    int64_t sorted = limit < count ? limit : 0;
    if (sorted) sort_to(keys, 0, sorted, count);
    float total = 0.0f;
    double sum = 0.0;
    if (sorted) {
        for (int64_t i = 0; i < limit; ++i) total += fast_exp(x[index_of(keys[i])] - top);
    } else {
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; ++i) total += x[i] >= least ? fast_exp(x[i] - top) : 0.0f;
    }
    for (int64_t i = 0; i < limit; ++i) {
        if (i >= sorted) {  // in growing parts: the prefix is short as a rule
            const int64_t next = sorted ? 4 * sorted : 64;
            sort_to(keys, sorted, next < limit ? next : limit, limit);
            sorted = next < limit ? next : limit;
        }
        const float mass = fast_exp(x[index_of(keys[i])] - top) / total;
        sum += mass;
        if (i > 0 && static_cast<float>(sum) - mass >= top_p) return i;
    }
    return limit;
}

}  // namespace

extern "C" {

// bad [B]: rows of logits [B,V] (row stride) with a NaN or an infinity.
void nrank_nonfinite_rows(const float* logits, int64_t stride, bool* bad, int64_t B, int64_t V) {
    for (int64_t b = 0; b < B; ++b) {
        const float* x = logits + b * stride;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < V; ++i) sum += x[i] * 0.0f;
        bad[b] = sum != 0.0f;
    }
}

// ids [B]: lowest index of the largest of logits [B,V] (row stride).
void nrank_greedy(const float* logits, int64_t stride, int64_t* ids, int64_t B, int64_t V) {
    for (int64_t b = 0; b < B; ++b) ids[b] = largest(logits + b * stride, V);
}

// logits [B,V] with row stride; the parameters [B], top_k, top_p and min_p null for no filters;
// scores [B] may be null.
void nrank_sample(const float* logits, int64_t stride, const float* temperature,
                  const int64_t* top_k, const float* top_p, const float* min_p,
                  const int64_t* seed, const int64_t* choice, const int64_t* position,
                  float* scores, int64_t* ids, int64_t B, int64_t V, int64_t vocab_start) {
    float* scaled = scratch<float>(V);
    uint64_t* keys = scratch<uint64_t>(top_k ? V : 0);
    for (int64_t b = 0; b < B; ++b) {
        const float *x = logits + b * stride, T = temperature[b];
        const Stream s = {static_cast<uint32_t>(seed[b]), static_cast<uint32_t>(seed[b] >> 32),
                          static_cast<uint32_t>(position[b]), static_cast<uint32_t>(choice[b])};
        int64_t best = 0;
        float score = 0.0f;
        if (T > 0.0f) {
#pragma omp simd
            for (int64_t i = 0; i < V; ++i) scaled[i] = x[i] / T;
        }
        if (T > 0.0f && top_k && (top_k[b] > 0 || top_p[b] < 1.0f || min_p[b] > 0.0f)) {
            const int64_t kept = keep(scaled, keys, V, top_k[b], top_p[b], min_p[b]);
            score = -INFINITY;
            for (int64_t i = 0; i < kept; ++i) {
                const int64_t id = index_of(keys[i]);
                const float noisy = scaled[id] + gumbel(philox(id + vocab_start, s));
                if (noisy > score || (noisy == score && id < best)) best = id, score = noisy;
            }
        } else {
            if (T > 0.0f) {
#pragma omp simd
                for (int64_t i = 0; i < V; ++i)
                    scaled[i] += gumbel(philox(static_cast<uint32_t>(i + vocab_start), s));
            }
            const float* final = T > 0.0f ? scaled : x;
            best = largest(final, V);
            score = final[best];
        }
        ids[b] = best + vocab_start;
        if (scores) scores[b] = score;
    }
}

}  // extern "C"
