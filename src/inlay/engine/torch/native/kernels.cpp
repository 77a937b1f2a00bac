// What a step on a CPU does besides matrix products, one pass over its data each.
//
// Shapes: T positions, Q query heads, H key/value heads, G = Q / H, N pages of P positions, D head size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace {

// Rows from which several threads are worth their start.
constexpr int64_t WORTH_THREADS = 16;

// Not inlined: compilers may order sums otherwise in each place.
template <typename T>
__attribute__((noinline)) void normalise(T* out, const T* x, const float* weight, float eps, int64_t size) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += load(x[i]) * load(x[i]);
    const float factor = 1.0f / std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; i++) store(out + i, load(x[i]) * factor * weight[i]);
}

}  // namespace

extern "C" {

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

struct AddAndNorm {
    void* x;            // [T, C], to which `addend` is added
    const void* addend;  // [T, C] or null
    const float* weight;  // [C]
    void* out;           // [T, C], the norm of the sum
    int64_t rows, size;
    float eps;
};

struct Gate {
    const void* gate_up;  // [T, 2 I]
    void* out;            // [T, I]
    int64_t rows, size;
    int32_t threads, gelu;  // 1: the gate is GELU in its approximation by tanh; 0: SiLU
};

// A kernel that takes a pointer, and what it is to be given.
struct Call {
    void (*kernel)(const void*);
    const void* argument;
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

// (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)); with GELU, y is sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T, bool GELU>
void gate(const Gate& a) {
#pragma omp parallel for num_threads(a.threads) if (a.rows >= WORTH_THREADS)
    for (int64_t t = 0; t < a.rows; t++) {
        const T *gate = static_cast<const T*>(a.gate_up) + t * 2 * a.size, *up = gate + a.size;
        T* out = static_cast<T*>(a.out) + t * a.size;
        for (int64_t i = 0; i < a.size; i++) {
            const float x = load(gate[i]), y = GELU ? x * (1.5957691216f + 0.0713548162f * x * x) : x;
            store(out + i, x / (1.0f + exponential(y > -88.0f ? -y : 88.0f)) * load(up[i]));
        }
    }
}

// Gates and ups by turns, as GPT-OSS has them. Comparisons let NaN through.
template <typename T>
void clamped_gate(T* out, const T* gate_up, int64_t rows, int64_t size, float alpha, float limit, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= WORTH_THREADS)
    for (int64_t t = 0; t < rows; t++) {
        const T* from = gate_up + t * 2 * size;
        for (int64_t i = 0; i < size; i++) {
            const float given = load(from[2 * i]), other = load(from[2 * i + 1]);
            const float gate = given > limit ? limit : given;
            const float up = other > limit ? limit : other < -limit ? -limit : other;
            const float x = alpha * gate;
            store(out + t * size + i, (up + 1.0f) * (gate / (1.0f + exponential(x > -88.0f ? -x : 88.0f))));
        }
    }
}

template <typename T>
void add_and_norm(const AddAndNorm& a) {
    for (int64_t t = 0; t < a.rows; t++) {
        T* x = static_cast<T*>(a.x) + t * a.size;
        const T* addend = static_cast<const T*>(a.addend) + t * a.size;
        if (a.addend)
            for (int64_t i = 0; i < a.size; i++) store(x + i, load(x[i]) + load(addend[i]));
        normalise(static_cast<T*>(a.out) + t * a.size, x, a.weight, a.eps, a.size);
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

void inlay_add_and_norm_float32(const AddAndNorm* a) { add_and_norm<float>(*a); }
void inlay_add_and_norm_bfloat16(const AddAndNorm* a) { add_and_norm<bf16>(*a); }
void inlay_gate_float32(const Gate* a) { a->gelu ? gate<float, true>(*a) : gate<float, false>(*a); }
void inlay_gate_bfloat16(const Gate* a) { a->gelu ? gate<bf16, true>(*a) : gate<bf16, false>(*a); }

void inlay_run(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].argument);
}

void inlay_rms_norm_float32(
    void* out, const void* x, const float* weight, float eps, int64_t rows, int64_t size, int32_t threads) {
    rms_norm(static_cast<float*>(out), static_cast<const float*>(x), weight, eps, rows, size, threads);
}
void inlay_rms_norm_bfloat16(
    void* out, const void* x, const float* weight, float eps, int64_t rows, int64_t size, int32_t threads) {
    rms_norm(static_cast<bf16*>(out), static_cast<const bf16*>(x), weight, eps, rows, size, threads);
}

void inlay_clamped_gate_float32(
    void* out, const void* gate_up, int64_t rows, int64_t size, float alpha, float limit, int32_t threads) {
    clamped_gate(static_cast<float*>(out), static_cast<const float*>(gate_up), rows, size, alpha, limit, threads);
}
void inlay_clamped_gate_bfloat16(
    void* out, const void* gate_up, int64_t rows, int64_t size, float alpha, float limit, int32_t threads) {
    clamped_gate(static_cast<bf16*>(out), static_cast<const bf16*>(gate_up), rows, size, alpha, limit, threads);
}

}  // extern "C"
