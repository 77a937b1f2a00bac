// What a step on a CPU does besides matrix products, one pass over its data each.
//
// Shapes: T positions, Q query heads, H key/value heads, G = Q / H, N pages of P positions, D head size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace {

// Rows from which several threads are worth their start.
constexpr int64_t WORTH_THREADS = 16;

// Greatest of the finite and infinite scores; a NaN among them shows in the sum of their exponentials.
inline float greatest(const float* scores, int64_t count, float start) {
    int64_t i = 0;
    if (count >= LANES) {
        Lanes top = load_lanes(scores);
        for (i = LANES; i + LANES <= count; i += LANES) {
            const Lanes own = load_lanes(scores + i);
            top = own > top ? own : top;
        }
        Half eight[2];
        std::memcpy(eight, &top, sizeof(top));
        eight[0] = eight[0] > eight[1] ? eight[0] : eight[1];
        for (int64_t lane = 0; lane < LANES / 2; lane++) start = eight[0][lane] > start ? eight[0][lane] : start;
    }
    for (; i < count; i++) start = scores[i] > start ? scores[i] : start;
    return start;
}

}  // namespace

extern "C" {

struct PagedDecode {
    const void* query;           // [T, Q, key_size], strided
    const void* keys;            // [H, N, P, key_size]
    const void* values;          // [H, N, P, value_size], value_stride from one to the next; may be the first part of the keys
    void* out;                   // [T, Q, value_size], contiguous
    const int32_t* block_table;  // [sequences of the batch, table_stride]
    const int32_t* spans;        // [S], each sequence's line of the table
    const int32_t* rows;         // [S], its position in the batch
    const int32_t* contexts;     // [S], its positions so far
    const float* sinks;          // [Q] or null
    float* workspace;            // [S, H, splits, G, value_size + 2]
    int64_t query_stride_t, query_stride_q, table_stride;
    int64_t sequences, heads, group, num_pages, page_size, key_size, value_size, value_stride, splits, window;
    float scaling, softcap;
    int32_t threads;
};

}  // extern "C"

namespace {

// GROUP of one head's queries over one run of positions within a page; `state` is top, sum and accumulated values of each.
template <int GROUP, typename T>
void attend_run(
    const PagedDecode& a, float* state, const float* queries, float* scores, const T* k, const T* next_k, const T* v, const T* next_v,
    int64_t count) {
    const int64_t stride = a.value_size + 2;
    float shrink[GROUP];
    dots<GROUP>(scores, a.page_size, queries, k, next_k, count, a.key_size);
    for (int g = 0; g < GROUP; g++) {
        float *own = scores + g * a.page_size, *past = state + g * stride;
        if (a.softcap > 0)
            for (int64_t j = 0; j < count; j++) own[j] = a.softcap * std::tanh(own[j] / a.softcap);
        const float top = greatest(own, count, past[0]);
        shrink[g] = exponential(past[0] - top);
        float sum = 0;
        for (int64_t j = 0; j < count; j++) sum += own[j] = exponential(own[j] - top);
        past[0] = top;
        past[1] = past[1] * shrink[g] + sum;
    }
    accumulate<GROUP>(state + 2, stride, shrink, scores, a.page_size, v, next_v, count, a.value_size, a.value_stride);
}

// One head's share of one sequence: online softmax over positions [low, high), as in FlashAttention (arXiv 2205.14135).
template <typename T>
void attend_part(const PagedDecode& a, int64_t s, int64_t h, int64_t low, int64_t high, float* part, float* scratch) {
    const int64_t stride = a.value_size + 2;
    float* queries = scratch;
    float* scores = queries + a.group * a.key_size;
    for (int64_t g = 0; g < a.group; g++) {
        const T* q = static_cast<const T*>(a.query) + a.rows[s] * a.query_stride_t + (h * a.group + g) * a.query_stride_q;
        for (int64_t i = 0; i < a.key_size; i++) queries[g * a.key_size + i] = load(q[i]) * a.scaling;
        float* state = part + g * stride;
        state[0] = -std::numeric_limits<float>::infinity();
        std::fill(state + 1, state + stride, 0.0f);
    }
    const int32_t* table = a.block_table + a.spans[s] * a.table_stride;
    const T* keys = static_cast<const T*>(a.keys) + h * a.num_pages * a.page_size * a.key_size;
    const T* values = static_cast<const T*>(a.values) + h * a.num_pages * a.page_size * a.value_stride;
    for (int64_t at = low; at < high;) {
        const int64_t offset = at % a.page_size;
        const int64_t count = std::min(high - at, a.page_size - offset);
        const int64_t slot = table[at / a.page_size] * a.page_size + offset;
        const bool more = at + count < high;
        const int64_t after = more ? table[(at + count) / a.page_size] * a.page_size : 0;
        const T *k = keys + slot * a.key_size, *next_k = more ? keys + after * a.key_size : nullptr;
        const T *v = values + slot * a.value_stride, *next_v = more ? values + after * a.value_stride : nullptr;
        for (int64_t g = 0; g < a.group;) {
            float* state = part + g * stride;
            const float* q = queries + g * a.key_size;
            if (a.group - g >= 4)
                attend_run<4>(a, state, q, scores, k, next_k, v, next_v, count), g += 4;
            else if (a.group - g >= 2)
                attend_run<2>(a, state, q, scores, k, next_k, v, next_v, count), g += 2;
            else
                attend_run<1>(a, state, q, scores, k, next_k, v, next_v, count), g += 1;
            next_k = next_v = nullptr;
        }
        at += count;
    }
}

template <typename T>
void merge_parts(const PagedDecode& a, int64_t s, int64_t h) {
    const int64_t stride = a.value_size + 2;
    float* parts = a.workspace + (s * a.heads + h) * a.splits * a.group * stride;
    for (int64_t g = 0; g < a.group; g++) {
        const int64_t head = h * a.group + g;
        float top = a.sinks ? a.sinks[head] : -std::numeric_limits<float>::infinity();
        for (int64_t c = 0; c < a.splits; c++) top = std::max(top, parts[(c * a.group + g) * stride]);
        float sum = a.sinks ? exponential(a.sinks[head] - top) : 0.0f;
        for (int64_t c = 0; c < a.splits; c++) {
            float* state = parts + (c * a.group + g) * stride;
            // From here on the factor of the part's values.
            state[0] = exponential(state[0] - top);
            sum += state[1] * state[0];
        }
        T* out = static_cast<T*>(a.out) + (a.rows[s] * a.heads * a.group + head) * a.value_size;
        for (int64_t i = 0; i < a.value_size; i++) {
            float found = 0;
            for (int64_t c = 0; c < a.splits; c++) {
                const float* state = parts + (c * a.group + g) * stride;
                found += state[2 + i] * state[0];
            }
            store(out + i, found / sum);
        }
    }
}

template <typename T>
void paged_decode(const PagedDecode& a) {
    const int64_t stride = a.value_size + 2;
    const int64_t tasks = a.sequences * a.heads * a.splits;
#pragma omp parallel num_threads(a.threads)
    {
        float* scratch = new float[a.group * a.key_size + 4 * a.page_size];
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t s = task / (a.heads * a.splits), h = task / a.splits % a.heads, c = task % a.splits;
            const int64_t context = a.contexts[s];
            const int64_t first = a.window > 0 ? std::max<int64_t>(0, context - a.window) : 0;
            const int64_t length = (context - first + a.splits - 1) / a.splits;
            const int64_t low = std::min(context, first + c * length);
            attend_part<T>(a, s, h, low, std::min(context, low + length), a.workspace + task * a.group * stride, scratch);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.sequences * a.heads; task++) merge_parts<T>(a, task / a.heads, task % a.heads);
        delete[] scratch;
    }
}

template <typename T>
void normalise(T* out, const T* x, const float* weight, float eps, int64_t size) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += load(x[i]) * load(x[i]);
    const float factor = 1.0f / std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; i++) store(out + i, load(x[i]) * factor * weight[i]);
}

}  // namespace

extern "C" {

void inlay_paged_decode_float32(const PagedDecode* a) { paged_decode<float>(*a); }
void inlay_paged_decode_bfloat16(const PagedDecode* a) { paged_decode<bf16>(*a); }

struct Prepare {
    const void* projected;  // [T, (Q + 2 H) * D], query, key and value heads of each position
    const void* cosine;     // [T, rotated]
    const void* sine;       // [T, rotated]
    const float* query_norm;  // [D] or null
    const float* key_norm;    // [D] or null
    const int64_t* slots;     // [stored]
    void* query;              // [T, Q, D]
    void* keys;               // [H, N, P, D]
    void* values;             // [H, N, P, D]
    int64_t positions, stored, query_heads, heads, size, rotated, slots_per_head;
    float eps;
    int32_t threads;
};

}  // extern "C"

namespace {

// Norm and rotation (halves, as in Llama's transformers port) of one head in place.
template <typename T>
void turn(float* head, const float* norm, float eps, const T* cosine, const T* sine, int64_t size, int64_t rotated) {
    if (norm) normalise<float>(head, head, norm, eps, size);
    const int64_t half = rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * load(cosine[i]) - b * load(sine[i]);
        head[i + half] = b * load(cosine[i + half]) + a * load(sine[i + half]);
    }
}

template <typename T>
void prepare_position(const Prepare& a, int64_t t, float* head) {
        const int64_t width = (a.query_heads + 2 * a.heads) * a.size;
        const T* from = static_cast<const T*>(a.projected) + t * width;
        const T* cosine = static_cast<const T*>(a.cosine) + t * a.rotated;
        const T* sine = static_cast<const T*>(a.sine) + t * a.rotated;
        for (int64_t q = 0; q < a.query_heads; q++, from += a.size) {
            for (int64_t i = 0; i < a.size; i++) head[i] = load(from[i]);
            turn(head, a.query_norm, a.eps, cosine, sine, a.size, a.rotated);
            T* to = static_cast<T*>(a.query) + (t * a.query_heads + q) * a.size;
            for (int64_t i = 0; i < a.size; i++) store(to + i, head[i]);
        }
        if (t >= a.stored) return;
        for (int64_t h = 0; h < a.heads; h++, from += a.size) {
            for (int64_t i = 0; i < a.size; i++) head[i] = load(from[i]);
            turn(head, a.key_norm, a.eps, cosine, sine, a.size, a.rotated);
            T* to = static_cast<T*>(a.keys) + (h * a.slots_per_head + a.slots[t]) * a.size;
            for (int64_t i = 0; i < a.size; i++) store(to + i, head[i]);
        }
        for (int64_t h = 0; h < a.heads; h++, from += a.size)
            std::memcpy(static_cast<T*>(a.values) + (h * a.slots_per_head + a.slots[t]) * a.size, from, a.size * sizeof(T));
}

template <typename T>
void prepare(const Prepare& a) {
#pragma omp parallel num_threads(a.threads) if (a.positions >= WORTH_THREADS)
    {
        float* head = new float[a.size];
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.positions; t++) prepare_position<T>(a, t, head);
        delete[] head;
    }
}

template <typename T>
void rms_norm(T* out, const T* x, const float* weight, float eps, int64_t rows, int64_t size, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= WORTH_THREADS)
    for (int64_t t = 0; t < rows; t++) normalise(out + t * size, x + t * size, weight, eps, size);
}

template <typename T>
void silu_and_multiply(T* out, const T* gate_up, int64_t rows, int64_t size, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= WORTH_THREADS)
    for (int64_t t = 0; t < rows; t++) {
        const T *gate = gate_up + t * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            const float x = load(gate[i]);
            store(out + t * size + i, x / (1.0f + exponential(x > -88.0f ? -x : 88.0f)) * load(up[i]));
        }
    }
}

// Floats by their bits: float32 as int32_t, bfloat16 as int16_t.
template <typename I>
constexpr I INFINITE = sizeof(I) == 4 ? 0x7f800000 : 0x7f80;
template <typename I>
constexpr I ALL_BUT_SIGN = std::numeric_limits<I>::max();

// Order of floats as of integers, NaN of either sign above all, as torch has it.
template <typename I>
inline I rank(I bits) {
    const I size = bits & ALL_BUT_SIGN<I>;
    const I ordered = bits < 0 ? static_cast<I>(~size) : size;
    return size > INFINITE<I> ? ALL_BUT_SIGN<I> : ordered;
}

template <typename I>
void argmax(int64_t* out, const I* x, int64_t rows, int64_t size, int32_t threads) {
    constexpr int64_t BLOCK = 1024;
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const I* values = x + row * size;
        int64_t best = 0;
        I top = std::numeric_limits<I>::min();
        for (int64_t start = 0; start < size; start += BLOCK) {
            const int64_t stop = std::min(size, start + BLOCK);
            I found = std::numeric_limits<I>::min();
#pragma omp simd reduction(max : found)
            for (int64_t i = start; i < stop; i++) found = std::max(found, rank(values[i]));
            if (found > top) top = found, best = start;
        }
        while (rank(values[best]) != top) best++;
        out[row] = best;
    }
}

template <typename I>
void finite(bool* out, const I* x, int64_t rows, int64_t size, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const I* values = x + row * size;
        I most = 0;
        for (int64_t i = 0; i < size; i++) {
            const I own = values[i] & ALL_BUT_SIGN<I>;
            most = own > most ? own : most;
        }
        out[row] = most < INFINITE<I>;
    }
}

}  // namespace

extern "C" {

void inlay_argmax_float32(int64_t* out, const int32_t* x, int64_t rows, int64_t size, int32_t threads) {
    argmax(out, x, rows, size, threads);
}
void inlay_argmax_bfloat16(int64_t* out, const int16_t* x, int64_t rows, int64_t size, int32_t threads) {
    argmax(out, x, rows, size, threads);
}

void inlay_finite_float32(bool* out, const int32_t* x, int64_t rows, int64_t size, int32_t threads) {
    finite(out, x, rows, size, threads);
}
void inlay_finite_bfloat16(bool* out, const int16_t* x, int64_t rows, int64_t size, int32_t threads) {
    finite(out, x, rows, size, threads);
}

void inlay_prepare_float32(const Prepare* a) { prepare<float>(*a); }
void inlay_prepare_bfloat16(const Prepare* a) { prepare<bf16>(*a); }

void inlay_rms_norm_float32(
    void* out, const void* x, const float* weight, float eps, int64_t rows, int64_t size, int32_t threads) {
    rms_norm(static_cast<float*>(out), static_cast<const float*>(x), weight, eps, rows, size, threads);
}
void inlay_rms_norm_bfloat16(
    void* out, const void* x, const float* weight, float eps, int64_t rows, int64_t size, int32_t threads) {
    rms_norm(static_cast<bf16*>(out), static_cast<const bf16*>(x), weight, eps, rows, size, threads);
}

void inlay_silu_and_multiply_float32(void* out, const void* gate_up, int64_t rows, int64_t size, int32_t threads) {
    silu_and_multiply(static_cast<float*>(out), static_cast<const float*>(gate_up), rows, size, threads);
}
void inlay_silu_and_multiply_bfloat16(void* out, const void* gate_up, int64_t rows, int64_t size, int32_t threads) {
    silu_and_multiply(static_cast<bf16*>(out), static_cast<const bf16*>(gate_up), rows, size, threads);
}

}  // extern "C"
