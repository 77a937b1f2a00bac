// What a step on a CPU does besides matrix products, one pass over its data each.
//
// Written so that a compiler vectorises it for whatever CPU it is compiled on: no intrinsics. Accumulation is in float32.
// NaN and infinity must come out where they go in, for the engine drops what a non-finite result touched: hence no
// -ffinite-math-only, and comparisons below that let NaN through.
//
// Shapes: T positions, Q query heads, H key/value heads, G = Q / H, N pages of P positions, D head size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

// Rows from which several threads are worth their start.
constexpr int64_t WORTH_THREADS = 16;

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float* to, float value) { *to = value; }

// Round to nearest, ties to even; NaN stays NaN.
inline void store(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to->bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// exp for x <= 88, from Cephes' expf: range reduction by ln 2 and a polynomial of degree 5.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    // fma: a compiler that may reorder sums would fold the two steps into one.
    float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

// scores[j] = query . rows[j], four rows a pass so that their sums are under way together.
void dots(float* scores, const float* query, const float* rows, int64_t count, int64_t size) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        const float *a = rows + j * size, *b = a + size, *c = b + size, *d = c + size;
        float sa = 0, sb = 0, sc = 0, sd = 0;
        for (int64_t i = 0; i < size; i++) {
            sa += query[i] * a[i];
            sb += query[i] * b[i];
            sc += query[i] * c[i];
            sd += query[i] * d[i];
        }
        scores[j] = sa, scores[j + 1] = sb, scores[j + 2] = sc, scores[j + 3] = sd;
    }
    for (; j < count; j++) {
        float sum = 0;
        for (int64_t i = 0; i < size; i++) sum += query[i] * rows[j * size + i];
        scores[j] = sum;
    }
}

// acc = acc * shrink + sum of weights[j] * rows[j], four rows a pass.
void accumulate(float* acc, float shrink, const float* weights, const float* rows, int64_t count, int64_t size) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        const float *a = rows + j * size, *b = a + size, *c = b + size, *d = c + size;
        const float wa = weights[j], wb = weights[j + 1], wc = weights[j + 2], wd = weights[j + 3];
        for (int64_t i = 0; i < size; i++) acc[i] = acc[i] * shrink + wa * a[i] + wb * b[i] + wc * c[i] + wd * d[i];
        shrink = 1.0f;
    }
    for (; j < count; j++) {
        const float* a = rows + j * size;
        for (int64_t i = 0; i < size; i++) acc[i] = acc[i] * shrink + weights[j] * a[i];
        shrink = 1.0f;
    }
}

// Rows as float32, widened once for all queries of a group. Pages lie anywhere and a CPU does not look ahead from one to
// another: row by row, the next page is asked for while this one is widened.
template <typename T>
const float* widen(float* scratch, const T* rows, const T* next, int64_t count, int64_t size) {
    for (int64_t j = 0; j < count; j++) {
        if (next)
            for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(next + j * size + i);
        if constexpr (sizeof(T) < sizeof(float))
            for (int64_t i = 0; i < size; i++) scratch[j * size + i] = load(rows[j * size + i]);
    }
    if constexpr (sizeof(T) < sizeof(float))
        return scratch;
    else
        return rows;
}

// Greatest of the finite and infinite scores; a NaN among them shows in the sum of their exponentials.
inline float greatest(const float* scores, int64_t count, float start) {
    for (int64_t i = 0; i < count; i++) start = scores[i] > start ? scores[i] : start;
    return start;
}

}  // namespace

extern "C" {

struct PagedDecode {
    const void* query;           // [T, Q, key_size], strided
    const void* keys;            // [H, N, P, key_size]
    const void* values;          // [H, N, P, value_size]
    void* out;                   // [T, Q, value_size], contiguous
    const int32_t* block_table;  // [sequences of the batch, table_stride]
    const int32_t* spans;        // [S], each sequence's line of the table
    const int32_t* rows;         // [S], its position in the batch
    const int32_t* contexts;     // [S], its positions so far
    const float* sinks;          // [Q] or null
    float* workspace;            // [S, H, splits, G, value_size + 2]
    int64_t query_stride_t, query_stride_q, table_stride;
    int64_t sequences, heads, group, num_pages, page_size, key_size, value_size, splits, window;
    float scaling, softcap;
    int32_t threads;
};

}  // extern "C"

namespace {

// One head's share of one sequence: online softmax over positions [low, high), as in FlashAttention (arXiv 2205.14135).
template <typename T>
void attend_part(const PagedDecode& a, int64_t s, int64_t h, int64_t low, int64_t high, float* part, float* scratch) {
    const int64_t stride = a.value_size + 2;
    float* queries = scratch;
    float* scores = queries + a.group * a.key_size;
    float* wide = scores + a.group * a.page_size;
    for (int64_t g = 0; g < a.group; g++) {
        const T* q = static_cast<const T*>(a.query) + a.rows[s] * a.query_stride_t + (h * a.group + g) * a.query_stride_q;
        for (int64_t i = 0; i < a.key_size; i++) queries[g * a.key_size + i] = load(q[i]) * a.scaling;
        float* state = part + g * stride;
        state[0] = -std::numeric_limits<float>::infinity();
        std::fill(state + 1, state + stride, 0.0f);
    }
    const int32_t* table = a.block_table + a.spans[s] * a.table_stride;
    const T* keys = static_cast<const T*>(a.keys) + h * a.num_pages * a.page_size * a.key_size;
    const T* values = static_cast<const T*>(a.values) + h * a.num_pages * a.page_size * a.value_size;
    for (int64_t at = low; at < high;) {
        const int64_t offset = at % a.page_size;
        const int64_t count = std::min(high - at, a.page_size - offset);
        const int64_t slot = table[at / a.page_size] * a.page_size + offset;
        const bool more = at + count < high;
        const int64_t after = more ? table[(at + count) / a.page_size] * a.page_size : 0;
        const float* k = widen<T>(wide, keys + slot * a.key_size, more ? keys + after * a.key_size : nullptr, count, a.key_size);
        for (int64_t g = 0; g < a.group; g++) dots(scores + g * a.page_size, queries + g * a.key_size, k, count, a.key_size);
        const float* v =
            widen<T>(wide, values + slot * a.value_size, more ? values + after * a.value_size : nullptr, count, a.value_size);
        for (int64_t g = 0; g < a.group; g++) {
            float *state = part + g * stride, *own = scores + g * a.page_size;
            if (a.softcap > 0)
                for (int64_t j = 0; j < count; j++) own[j] = a.softcap * std::tanh(own[j] / a.softcap);
            const float top = greatest(own, count, state[0]);
            const float shrink = exponential(state[0] - top);
            float sum = 0;
            for (int64_t j = 0; j < count; j++) sum += own[j] = exponential(own[j] - top);
            state[0] = top;
            state[1] = state[1] * shrink + sum;
            accumulate(state + 2, shrink, own, v, count, a.value_size);
        }
        at += count;
    }
}

template <typename T>
void merge_parts(const PagedDecode& a, int64_t s, int64_t h) {
    const int64_t stride = a.value_size + 2;
    const float* parts = a.workspace + (s * a.heads + h) * a.splits * a.group * stride;
    for (int64_t g = 0; g < a.group; g++) {
        const int64_t head = h * a.group + g;
        float top = a.sinks ? a.sinks[head] : -std::numeric_limits<float>::infinity();
        for (int64_t c = 0; c < a.splits; c++) top = std::max(top, parts[(c * a.group + g) * stride]);
        float sum = a.sinks ? exponential(a.sinks[head] - top) : 0.0f;
        for (int64_t c = 0; c < a.splits; c++) {
            const float* state = parts + (c * a.group + g) * stride;
            sum += state[1] * exponential(state[0] - top);
        }
        T* out = static_cast<T*>(a.out) + (a.rows[s] * a.heads * a.group + head) * a.value_size;
        for (int64_t i = 0; i < a.value_size; i++) {
            float found = 0;
            for (int64_t c = 0; c < a.splits; c++) {
                const float* state = parts + (c * a.group + g) * stride;
                found += state[2 + i] * exponential(state[0] - top);
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
        float* scratch = new float[a.group * (a.key_size + a.page_size) + a.page_size * std::max(a.key_size, a.value_size)];
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

// Order of floats as of integers, NaN of either sign above all, as torch has it.
inline int32_t rank(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    const int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    return (bits & 0x7fffffff) > 0x7f800000 ? std::numeric_limits<int32_t>::max() : ordered;
}

int64_t argmax(const float* x, int64_t size) {
    constexpr int64_t BLOCK = 1024;
    int64_t best = 0;
    int32_t top = std::numeric_limits<int32_t>::min();
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t stop = std::min(size, start + BLOCK);
        int32_t found = std::numeric_limits<int32_t>::min();
        for (int64_t i = start; i < stop; i++) found = std::max(found, rank(x[i]));
        if (found > top) top = found, best = start;
    }
    while (rank(x[best]) != top) best++;
    return best;
}

}  // namespace

extern "C" {

void inlay_argmax_float32(int64_t* out, const float* x, int64_t rows, int64_t size, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) out[row] = argmax(x + row * size, size);
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
