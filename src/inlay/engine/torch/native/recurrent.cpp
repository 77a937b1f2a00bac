// A few positions of the gated delta rule (Yang et al., "Gated Delta Networks", 2025) of each of B sequences, with its
// states in pages: each is read once and written once, or not at all.
//
// As operations of torch the state of a sequence, a megabyte a layer, is read and written a dozen times.
// Shapes: B sequences of L positions, H parts of a state, V value heads, G key heads, K and E elements of a key and of a value, D = 2 G
// K + V E channels of the convolution and W its width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

struct DeltaStep {
    float* first;           // [H, pages, ...], where the first elements of each part of a state are
    float* second;          // likewise, the others
    const int64_t* read;    // [B], pages of the states before
    const int64_t* write;   // [B], pages of the states after; null where these are not kept
    const float* inputs;    // [B, L, D], of the convolution
    const float* filter;    // [D, W]
    const float* decay;     // [B, L, V], logarithms
    const float* strength;  // [B, L, V], "beta"
    float* out;             // [B, L, V, E]
    int64_t first_head, first_page, first_size;     // strides, and elements that are used
    int64_t second_head, second_page, second_size;  // likewise
    int64_t batch, length, width, key_heads, value_heads, key_size, value_size;
    int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t LANES = 64;

// Call `each(at, from, count)` for the runs of memory where elements [at, at + count) of the state in `page` are.
template <typename Each>
void runs(const DeltaStep& a, int64_t page, int64_t at, int64_t count, const Each& each) {
    const int64_t part = a.first_size + a.second_size;
    for (int64_t done = 0; done < count;) {
        const int64_t head = (at + done) / part, inside = (at + done) % part;
        const bool in_first = inside < a.first_size;
        float* from = in_first ? a.first + head * a.first_head + page * a.first_page + inside
                               : a.second + head * a.second_head + page * a.second_page + inside - a.first_size;
        const int64_t size = std::min(count - done, (in_first ? a.first_size : part) - inside);
        each(done, from, size);
        done += size;
    }
}

void fetch(const DeltaStep& a, int64_t page, int64_t at, int64_t count, float* to) {
    runs(a, page, at, count, [&](int64_t done, const float* from, int64_t size) {
        std::memcpy(to + done, from, size * sizeof(float));
    });
}

void keep(const DeltaStep& a, int64_t page, int64_t at, int64_t count, const float* from) {
    runs(a, page, at, count, [&](int64_t done, float* to, int64_t size) {
        std::memcpy(to, from + done, size * sizeof(float));
    });
}

// The convolution of sequence `b`, and SiLU, into `out` [L, D].
void convolve(const DeltaStep& a, int64_t b, float* seen, float* out) {
    const int64_t channels = 2 * a.key_heads * a.key_size + a.value_heads * a.value_size, before = a.width - 1;
    const int64_t at = a.value_heads * a.key_size * a.value_size;
    fetch(a, a.read[b], at, channels * before, seen);
    const float* inputs = a.inputs + b * a.length * channels;
    for (int64_t l = 0; l < a.length; l++, inputs += channels, out += channels) {
        for (int64_t d = 0; d < channels; d++) {
            float *own = seen + d * before, input = inputs[d];
            const float* filter = a.filter + d * a.width;
            float sum = input * filter[before];
            for (int64_t w = 0; w < before; w++) sum += own[w] * filter[w];
            for (int64_t w = 0; w + 1 < before; w++) own[w] = own[w + 1];
            if (before) own[before - 1] = input;
            out[d] = sum / (1.0f + std::exp(-sum));
        }
    }
    if (a.write) keep(a, a.write[b], at, channels * before, seen);
}

void normalise(const float* from, float* to, int64_t size, float factor) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += from[i] * from[i];
    factor /= std::sqrt(squares + 1e-6f);
    for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor;
}

// Up to LANES columns of a state [K, E]: what it holds for a key and for a query, then what it becomes.
template <bool WHOLE>
void columns(float* state, const float* key, const float* query, const float* value, float* out, float decay,
             float strength, float match, int64_t keys, int64_t stride, int64_t count) {
    float held[LANES] = {}, asked[LANES] = {};
    const int64_t n = WHOLE ? LANES : count;
    for (int64_t k = 0; k < keys; k++) {
        const float* row = state + k * stride;
        for (int64_t e = 0; e < n; e++) {
            held[e] += row[e] * key[k];
            asked[e] += row[e] * query[k];
        }
    }
    for (int64_t e = 0; e < n; e++) {
        held[e] = (value[e] - decay * held[e]) * strength;
        out[e] = decay * asked[e] + match * held[e];
    }
    for (int64_t k = 0; k < keys; k++) {
        float* row = state + k * stride;
        for (int64_t e = 0; e < n; e++) row[e] = row[e] * decay + key[k] * held[e];
    }
}

// The rule of value head `v` at position `row` of all; `mixed` [D] is what the convolution gave.
void advance(const DeltaStep& a, int64_t row, int64_t v, const float* mixed, float* state) {
    const int64_t K = a.key_size, E = a.value_size, group = v / (a.value_heads / a.key_heads);
    float *query = state + K * E, *key = query + K;
    normalise(mixed + group * K, query, K, 1.0f / std::sqrt(static_cast<float>(K)));
    normalise(mixed + (a.key_heads + group) * K, key, K, 1.0f);
    const float* value = mixed + 2 * a.key_heads * K + v * E;
    float* out = a.out + (row * a.value_heads + v) * E;
    const float decay = std::exp(a.decay[row * a.value_heads + v]), strength = a.strength[row * a.value_heads + v];
    float match = 0;
    for (int64_t k = 0; k < K; k++) match += key[k] * query[k];
    for (int64_t e = 0; e < E; e += LANES) {
        const int64_t n = std::min(LANES, E - e);
        (n == LANES ? columns<true> : columns<false>)(
            state + e, key, query, value + e, out + e, decay, strength, match, K, E, n);
    }
}

// All positions of value head `v` of sequence `b`; `mixed` [L, D].
void step(const DeltaStep& a, int64_t b, int64_t v, const float* mixed, int64_t channels, float* state) {
    const int64_t size = a.key_size * a.value_size;
    fetch(a, a.read[b], v * size, size, state);
    for (int64_t l = 0; l < a.length; l++) advance(a, b * a.length + l, v, mixed + l * channels, state);
    if (a.write) keep(a, a.write[b], v * size, size, state);
}

}  // namespace

extern "C" {

void inlay_delta_step(const DeltaStep* call) {
    const DeltaStep& a = *call;
    const int64_t channels = 2 * a.key_heads * a.key_size + a.value_heads * a.value_size;
    const int64_t row = a.length * channels;
    std::vector<float> mixed(a.batch * row);
#pragma omp parallel num_threads(a.threads)
    {
        std::vector<float> scratch(
            std::max(channels * (a.width - 1), a.key_size * (a.value_size + 2)));
#pragma omp for schedule(static)
        for (int64_t b = 0; b < a.batch; b++) convolve(a, b, scratch.data(), mixed.data() + b * row);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.batch * a.value_heads; task++) {
            const int64_t b = task / a.value_heads;
            step(a, b, task % a.value_heads, mixed.data() + b * row, channels, scratch.data());
        }
    }
}

}  // extern "C"
