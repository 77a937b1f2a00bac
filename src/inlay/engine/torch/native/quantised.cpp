// Products with weights of four or eight bits: y = x W^T + b, where W[o][i] = (code[o][i] - zero[o][g]) * scale[o][g] for the group
// g of input i.
//
// Codes are read as they are stored, once for all rows, and widened in registers, exactly: they are values of bfloat16. Scales are
// applied in float32, to sums over a group.
//
// Codes lie in panels of 64 outputs: [O / 64][I / n][64] words of 32 bits, of n = 8 or 4 inputs each. The low half of a word has the
// even inputs, the first in the lowest bits, the high half the odd ones: shifting both gives a pair of inputs of 16 outputs.
// Shapes: R rows, I inputs, O outputs, G groups, P panels.

// Sums in the order that is written: what a row gives must not depend on how many rows there are.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

extern "C" {

struct QuantisedProduct {
    const void* x;          // [R, I]
    const uint32_t* codes;  // [P, I / n, 64]
    const float* scales;    // [P, G, 64]
    const float* shifts;    // [P, G, 64], scale times zero; null for zeros of 0
    const void* bias;       // [O] or null
    void* out;              // [R, O]
    int64_t rows, inputs, outputs, group;
    int32_t kind, threads;
};

}  // extern "C"

namespace {

// Integers of four bits, 8 below their code; of eight, in two's complement; float8 e4m3.
enum Kind : int32_t { INT4, INT8, FP8 };

// Vectors of outputs of a panel.
constexpr int WIDTH = 4;

constexpr int64_t per_word(int kind) { return kind == INT4 ? 8 : 4; }
constexpr int pairs(int kind) { return static_cast<int>(per_word(kind)) / 2; }

// Bytes ahead of what is read; inputs whose sum is scaled at once, at most.
constexpr int64_t AHEAD = 2048, SEGMENT = 128;

// Rows that share widened codes in a cache at a time; up to Math::FEW share codes in registers.
constexpr int MORE = 8;

float value_of_fp8(uint32_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(1.0f * fraction, -9);
    return code & 128 ? -size : size;
}

// Pairs of weights as two vectors of float32.
struct Floats {
    struct Pair {
        Lanes first, second;
    };
    using X = float;
    // Of four rows the compiler would round some sums once more.
    static constexpr int FEW = 3;
    float fp8[256];

    Floats() {
        for (uint32_t code = 0; code < 256; code++) fp8[code] = value_of_fp8(code);
    }

    template <int KIND>
    Lanes widen(WideLanes codes) const {
        typedef int32_t Signed __attribute__((vector_size(LANES * sizeof(int32_t))));
        if (KIND == INT4) return __builtin_convertvector(reinterpret_cast<Signed>(codes & 15u) - 8, Lanes);
        if (KIND == INT8) return __builtin_convertvector(reinterpret_cast<Signed>(codes << 24) >> 24, Lanes);
        Lanes found;
        for (int64_t i = 0; i < LANES; i++) found[i] = fp8[codes[i] & 255u];
        return found;
    }

    template <int KIND>
    Pair decode(WideLanes words, int step) const {
        const int bits = KIND == INT4 ? 4 : 8;
        return {widen<KIND>(words >> (step * bits)), widen<KIND>(words >> (16 + step * bits))};
    }

    static void add(Lanes& sum, const Pair& weights, const float* x) {
        sum += weights.first * x[0];
        sum += weights.second * x[1];
    }
};

#ifdef __AVX512BF16__

// Pairs of weights as bfloat16.
struct Halves {
    using Pair = __m512i;
    using X = bf16;
    static constexpr int FEW = 4;
    __m512i int4, fp8[4];

    Halves() {
        bf16 table[5][32];
        for (int i = 0; i < 32; i++) store(table[0] + i, i % 16 - 8.0f);
        for (uint32_t i = 0; i < 128; i++) store(table[1] + i, value_of_fp8(i));
        std::memcpy(&int4, table[0], sizeof(int4));
        std::memcpy(fp8, table[1], sizeof(fp8));
    }

    template <int KIND>
    Pair decode(WideLanes words, int step) const {
        if (KIND == INT8) {
            // An integer of eight bits as float32 is its bfloat16 and zeros.
            const __m512i bytes = _mm512_slli_epi32(reinterpret_cast<__m512i>(words), 8 - 8 * step);
            const __m512 first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 16), 24));
            const __m512 second = _mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 24));
            return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
        }
        const __m512i codes = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), step * (KIND == INT4 ? 4 : 8));
        if (KIND == INT4) return _mm512_permutexvar_epi16(codes, int4);
        const __m512i small = _mm512_permutex2var_epi16(fp8[0], codes, fp8[1]);
        const __m512i large = _mm512_permutex2var_epi16(fp8[2], codes, fp8[3]);
        const __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), small, large);
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-0x8000));
        return _mm512_or_si512(size, sign);
    }

    static void add(Lanes& sum, Pair weights, const bf16* x) {
        int32_t both;
        std::memcpy(&both, x, sizeof(both));
        const __m512 found = _mm512_dpbf16_ps(
            reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)));
        sum = reinterpret_cast<Lanes>(found);
    }
};

#endif

template <int KIND>
inline WideLanes words_at(const QuantisedProduct& a, int64_t panel, int64_t word, int64_t vector) {
    const int64_t at = (panel * (a.inputs / per_word(KIND)) + word) * WIDTH + vector;
    const char* from = reinterpret_cast<const char*>(a.codes + at * LANES);
    // Into the second level: the first is too small for what is asked for ahead.
    __builtin_prefetch(from + AHEAD, 0, 2);
    WideLanes words;
    std::memcpy(&words, from, sizeof(words));
    return words;
}

// Scaled sums of a segment, added to what the segments before gave.
inline void add_scaled(const QuantisedProduct& a, Lanes& total, Lanes sum, float sum_x, int64_t panel, int64_t group, int64_t vector) {
    const int64_t at = ((panel * ((a.inputs + a.group - 1) / a.group) + group) * WIDTH + vector) * LANES;
    total += sum * load_lanes(a.scales + at);
    if (a.shifts) total -= sum_x * load_lanes(a.shifts + at);
}

template <typename T>
void finish(const QuantisedProduct& a, Lanes total, int64_t row, int64_t first) {
    for (int64_t i = 0, output = first; i < std::min(LANES, a.outputs - first); i++, output++)
        store(static_cast<T*>(a.out) + row * a.outputs + output, total[i] + (a.bias ? load(static_cast<const T*>(a.bias)[output]) : 0.0f));
}

// Calls with the start, the end and the group of every segment.
template <typename F>
inline void each_segment(const QuantisedProduct& a, F&& use) {
    for (int64_t start = 0, segment = 0, group = 0; start < a.inputs; group++)
        for (const int64_t stop = std::min(a.inputs, start + a.group); start < stop; segment++) {
            const int64_t end = std::min(stop, start + SEGMENT);
            use(start, end, group, segment);
            start = end;
        }
}

// A panel for a few rows: codes stay in registers.
template <typename T, typename Math, int KIND, int ROWS>
void few_rows(const QuantisedProduct& a, const Math& math, const typename Math::X* x, const float* sums, int64_t segments, int64_t panel) {
    constexpr int64_t WORD = per_word(KIND);
    Lanes totals[ROWS][WIDTH] = {};
    each_segment(a, [&](int64_t start, int64_t end, int64_t group, int64_t segment) {
        Lanes found[ROWS][WIDTH] = {};
        for (int64_t i = start; i < end; i += WORD)
            for (int v = 0; v < WIDTH; v++) {
                const WideLanes words = words_at<KIND>(a, panel, i / WORD, v);
                for (int step = 0; step < pairs(KIND); step++) {
                    const auto weights = math.template decode<KIND>(words, step);
                    for (int r = 0; r < ROWS; r++) Math::add(found[r][v], weights, x + r * a.inputs + i + 2 * step);
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < WIDTH; v++) add_scaled(a, totals[r][v], found[r][v], sums[r * segments + segment], panel, group, v);
    });
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) finish<T>(a, totals[r][v], r, (panel * WIDTH + v) * LANES);
}

// Vectors of a panel that many rows share at once.
constexpr int HALF = WIDTH / 2;

// ROWS rows with the widened codes of a segment.
template <typename Math, int ROWS>
__attribute__((noinline))
void some_rows(Lanes (*found)[HALF], const typename Math::Pair* widened, const typename Math::X* x, int64_t inputs, int64_t count) {
    Lanes own[ROWS][HALF] = {};
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; i += 2, widened += HALF)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < HALF; v++) Math::add(own[r][v], widened[v], x + r * inputs + i);
    std::memcpy(found, own, sizeof(own));
}

// Half a panel for many rows: codes are widened into a cache, a segment at a time.
template <typename T, typename Math, int KIND>
void many_rows(
    const QuantisedProduct& a, const Math& math, const typename Math::X* x, const float* sums, int64_t segments, int64_t panel, int first) {
    constexpr int64_t WORD = per_word(KIND);
    alignas(64) typename Math::Pair widened[SEGMENT / 2 * HALF];
    std::vector<Lanes> totals(a.rows * HALF, Lanes{});
    each_segment(a, [&](int64_t start, int64_t end, int64_t group, int64_t segment) {
        auto* to = widened;
        for (int64_t i = start; i < end; i += WORD, to += pairs(KIND) * HALF)
            for (int v = 0; v < HALF; v++) {
                const WideLanes words = words_at<KIND>(a, panel, i / WORD, first + v);
                for (int step = 0; step < pairs(KIND); step++) to[step * HALF + v] = math.template decode<KIND>(words, step);
            }
        for (int64_t row = 0; row < a.rows;) {
            Lanes found[MORE][HALF];
            const int64_t left = a.rows - row, count = left >= MORE ? MORE : left >= 4 ? 4 : 1;
            const auto* from = x + row * a.inputs + start;
            switch (count) {
                case 1: some_rows<Math, 1>(found, widened, from, a.inputs, end - start); break;
                case 4: some_rows<Math, 4>(found, widened, from, a.inputs, end - start); break;
                default: some_rows<Math, MORE>(found, widened, from, a.inputs, end - start);
            }
            for (int64_t r = 0; r < count; r++, row++)
                for (int v = 0; v < HALF; v++)
                    add_scaled(a, totals[row * HALF + v], found[r][v], sums[row * segments + segment], panel, group, first + v);
        }
    });
    for (int64_t row = 0; row < a.rows; row++)
        for (int v = 0; v < HALF; v++) finish<T>(a, totals[row * HALF + v], row, (panel * WIDTH + first + v) * LANES);
}

template <typename T, typename Math, int KIND>
void product(const QuantisedProduct& a, const typename Math::X* x) {
    static const Math math;
    int64_t segments = 0;
    each_segment(a, [&](int64_t, int64_t, int64_t, int64_t) { segments++; });
    std::vector<float> sums(a.rows * segments);
    if (a.shifts)
        for (int64_t row = 0; row < a.rows; row++)
            each_segment(a, [&](int64_t start, int64_t end, int64_t, int64_t segment) {
                Lanes sum = {};
                int64_t i = row * a.inputs + start;
                const int64_t stop = row * a.inputs + end;
                for (; i + LANES <= stop; i += LANES) sum += load_lanes(x + i);
                float rest = 0;
                for (; i < stop; i++) rest += load(x[i]);
                sums[row * segments + segment] = sum_lanes(sum) + rest;
            });
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t panel = 0; panel < (a.outputs + WIDTH * LANES - 1) / (WIDTH * LANES); panel++) {
        if (a.rows == 1)
            few_rows<T, Math, KIND, 1>(a, math, x, sums.data(), segments, panel);
        else if (a.rows == 2)
            few_rows<T, Math, KIND, 2>(a, math, x, sums.data(), segments, panel);
        else if (a.rows == 3)
            few_rows<T, Math, KIND, 3>(a, math, x, sums.data(), segments, panel);
        else if (a.rows == Math::FEW)
            few_rows<T, Math, KIND, Math::FEW>(a, math, x, sums.data(), segments, panel);
        else
            for (int first = 0; first < WIDTH; first += HALF) many_rows<T, Math, KIND>(a, math, x, sums.data(), segments, panel, first);
    }
}

template <typename T, typename Math>
void product(const QuantisedProduct& a, const typename Math::X* x) {
    switch (a.kind) {
        case INT4: return product<T, Math, INT4>(a, x);
        case INT8: return product<T, Math, INT8>(a, x);
        case FP8: return product<T, Math, FP8>(a, x);
    }
}

// W itself, to `out` [O, I].
template <typename T, int KIND>
void dequantise(const QuantisedProduct& a) {
    constexpr int64_t count = per_word(KIND), bits = 32 / count, mask = (1 << bits) - 1;
    const int64_t groups = (a.inputs + a.group - 1) / a.group, panel_size = WIDTH * LANES;
    float values[256];
    for (int code = 0; code < 1 << bits; code++)
        values[code] = KIND == INT4 ? code - 8.0f : KIND == INT8 ? static_cast<int8_t>(code) : value_of_fp8(code);
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t output = 0; output < a.outputs; output++) {
        const int64_t panel = output / panel_size, lane = output % panel_size;
        T* to = static_cast<T*>(a.out) + output * a.inputs;
        each_segment(a, [&](int64_t start, int64_t end, int64_t group, int64_t) {
            const int64_t at = (panel * groups + group) * panel_size + lane;
            const float scale = a.scales[at], shift = a.shifts ? a.shifts[at] : 0.0f;
            for (int64_t i = start; i < end; i += count) {
                const uint32_t word = a.codes[(panel * (a.inputs / count) + i / count) * panel_size + lane];
                for (int64_t place = 0; place < count; place++)
                    store(to + i + place, values[word >> (bits * (place / 2) + 16 * (place % 2)) & mask] * scale - shift);
            }
        });
    }
}

template <typename T>
void dequantise(const QuantisedProduct& a) {
    switch (a.kind) {
        case INT4: return dequantise<T, INT4>(a);
        case INT8: return dequantise<T, INT8>(a);
        case FP8: return dequantise<T, FP8>(a);
    }
}

}  // namespace

extern "C" {

void inlay_dequantise_float32(const QuantisedProduct* a) { dequantise<float>(*a); }
void inlay_dequantise_bfloat16(const QuantisedProduct* a) { dequantise<bf16>(*a); }

void inlay_quantised_product_float32(const QuantisedProduct* a) { product<float, Floats>(*a, static_cast<const float*>(a->x)); }

void inlay_quantised_product_bfloat16(const QuantisedProduct* a) {
#ifdef __AVX512BF16__
    product<bf16, Halves>(*a, static_cast<const bf16*>(a->x));
#else
    std::vector<float> x(a->rows * a->inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = load(static_cast<const bf16*>(a->x)[i]);
    product<bf16, Floats>(*a, x.data());
#endif
}

}  // extern "C"
