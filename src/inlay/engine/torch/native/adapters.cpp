// What low-rank adapters add to a linear's outputs for a few rows: out += (x down^T) up, each row with its own adapter.
//
// As products of torch these are two to four small ones a linear, each of which costs more to start than to compute.
// Shapes: R rows, P parts of a fused linear, K the largest rank, I inputs, O outputs of all parts.

// Sums in the order that is written: what a row gives must not depend on how many rows there are.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math")
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

extern "C" {

struct Adapt {
    const void* x;           // [rows of the step, I]
    void* out;               // [rows of the step, O]
    const void* down;        // [slots, P, K, I]
    const void* const* ups;  // of each part, [slots, K, its outputs]
    const int64_t* sizes;    // [P], outputs of each part
    const int32_t* rows;     // [R], ordered by slot
    const int32_t* slots;    // [R], of each of these rows
    int64_t count, parts, rank, inputs, outputs;
    int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t MOST = 4;

// ROWS rows of one slot, from entry `first` on.
template <int ROWS, typename T>
void adapt_rows(const Adapt& a, int64_t first, float* scratch) {
    const int64_t slot = a.slots[first], lows = a.parts * a.rank;
    float *x = scratch, *low = x + ROWS * a.inputs, *sums = low + ROWS * lows;
    for (int g = 0; g < ROWS; g++) {
        const T* from = static_cast<const T*>(a.x) + a.rows[first + g] * a.inputs;
        for (int64_t i = 0; i < a.inputs; i++) x[g * a.inputs + i] = load(from[i]);
    }
    const T* none = nullptr;
    dots<ROWS>(low, lows, x, a.inputs, static_cast<const T*>(a.down) + slot * lows * a.inputs, none, lows, a.inputs);
    int64_t before = 0;
    for (int64_t part = 0; part < a.parts; before += a.sizes[part++]) {
        const int64_t size = a.sizes[part];
        const T* up = static_cast<const T*>(a.ups[part]) + slot * a.rank * size;
        for (int g = 0; g < ROWS; g++) {
            const T* from = static_cast<const T*>(a.out) + a.rows[first + g] * a.outputs + before;
            for (int64_t i = 0; i < size; i++) sums[g * size + i] = load(from[i]);
        }
        accumulate<ROWS>(sums, size, low + part * a.rank, lows, up, none, a.rank, size, size);
        for (int g = 0; g < ROWS; g++) {
            T* to = static_cast<T*>(a.out) + a.rows[first + g] * a.outputs + before;
            for (int64_t i = 0; i < size; i++) store(to + i, sums[g * size + i]);
        }
    }
}

template <typename T>
void adapt(const Adapt& a) {
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < a.count; i++)
        if (!i || a.slots[i] != a.slots[i - 1] || i - starts.back() == MOST) starts.push_back(i);
    const int64_t tasks = static_cast<int64_t>(starts.size());
    starts.push_back(a.count);
#pragma omp parallel num_threads(a.threads) if (tasks > 1)
    {
        std::vector<float> scratch(MOST * (a.inputs + a.parts * a.rank + a.outputs));
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t first = starts[task];
            switch (starts[task + 1] - first) {
                case 1: adapt_rows<1, T>(a, first, scratch.data()); break;
                case 2: adapt_rows<2, T>(a, first, scratch.data()); break;
                case 3: adapt_rows<3, T>(a, first, scratch.data()); break;
                case 4: adapt_rows<4, T>(a, first, scratch.data()); break;
            }
        }
    }
}

}  // namespace

extern "C" {

void inlay_adapt_float32(const Adapt* a) { adapt<float>(*a); }
void inlay_adapt_bfloat16(const Adapt* a) { adapt<bf16>(*a); }

}  // extern "C"
