// Part of kernels.cpp: routing and the routed experts of this rank.

extern "C" {

// logits [T,E] with row stride; weights [T,k]; ids [T,k]. Ties go to the lowest id.
void nrank_route(const float* logits, int64_t stride, float* weights, int64_t* ids, int64_t T,
                 int64_t E, int64_t k, int normalise) {
    float* left = scratch<float>(E);
    for (int64_t t = 0; t < T; ++t) {
        const float* row = logits + t * stride;
        float top = row[0], sum = 0.0f, chosen = 0.0f;
        for (int64_t e = 1; e < E; ++e) top = row[e] > top ? row[e] : top;
        for (int64_t e = 0; e < E; ++e) sum += left[e] = fast_exp(row[e] - top);
        for (int64_t e = 0; e < E; ++e) left[e] /= sum;
        for (int64_t i = 0; i < k; ++i) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; ++e)
                if (left[e] >= 0.0f && (best < 0 || left[e] > left[best])) best = e;
            if (best < 0) best = i;  // all NaN: any ids in range, the row is caught by its logits
            ids[t * k + i] = best;
            weights[t * k + i] = left[best];
            chosen += left[best];
            left[best] = -1.0f;
        }
        if (normalise)
            for (int64_t i = 0; i < k; ++i) weights[t * k + i] /= chosen;
    }
}

// x [T,H]; weights, local [T,k] (local < 0: a peer's expert); gate_up [El,2I,H] and down [El,H,I],
// each expert column-major; out [T,H]. Experts go in the order of their index, each read once for
// all tokens that chose it: a token's sum has one order, whoever its neighbours are.
void nrank_moe(const float* x, const float* weights, const int64_t* local, const float* gate_up,
               const float* down, float* out, int64_t T, int64_t k, int64_t H, int64_t I) {
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
        linear(in, H, gate_up + expert * 2 * I * H, hidden, M, H, 2 * I);
        for (int64_t m = 0; m < M; ++m) {
            float *gate = hidden + m * 2 * I, *up = gate + I, weight = weights[order[first + m]];
#pragma omp simd
            for (int64_t i = 0; i < I; ++i) gate[i] = weight * silu(gate[i]) * up[i];
        }
        linear(hidden, 2 * I, down + expert * H * I, routed, M, I, H);
        for (int64_t m = 0; m < M; ++m)
            axpy(out + order[first + m] / k * H, 1.0f, routed + m * H, H);
    }
}

}  // extern "C"
