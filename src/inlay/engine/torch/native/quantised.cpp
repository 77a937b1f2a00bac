// Products with weights of four or eight bits: y = x W^T + b, where W[o][i] = (code[o][i] - zero[o][g]) * scale[o][g] for the group
// g of input i.
//
// Codes are read as they are stored, once for all rows, and widened in registers, exactly: they are values of bfloat16. Scales are
// applied in float32, to sums over a group.
//
// Codes lie in panels of 16 outputs: [O / 16][I / n][16] words of 32 bits, of n = 8 or 4 inputs each. The low half of a word has the
// even inputs, the first in the lowest bits, the high half the odd ones: shifting both gives a pair of inputs of 16 outputs.
// Shapes: R rows, I inputs, O outputs, G groups.

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
    const uint32_t* codes;  // [panels, I / n, 16]
    const float* scales;    // [panels, G, 16]
    const float* shifts;    // [panels, G, 16], scale times zero; null for zeros of 0
    const void* bias;       // [O] or null
    void* out;              // [R, O]
    int64_t rows, inputs, outputs, group;
    int32_t kind, threads;
};

}  // extern "C"

namespace {

// Integers of four bits, 8 below their code; of eight, in two's complement; float8 e4m3.
enum Kind : int32_t { INT4, INT8, FP8 };

constexpr int64_t per_word(int kind) { return kind == INT4 ? 8 : 4; }
constexpr int pairs(int kind) { return static_cast<int>(per_word(kind)) / 2; }

// Bytes ahead of what is read; inputs whose sum is scaled at once, at most.
constexpr int64_t AHEAD = 2048, SEGMENT = 128;

// Rows that share widened codes in a cache at a time; up to four share codes in registers.
constexpr int MORE = 8;

float value_of_fp8(uint32_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10) : std::ldexp(static_cast<float>(fraction), -9);
    return code & 128 ? -size : size;
}

// Pairs of weights as two vectors of float32.
struct Floats {
    struct Pair {
        Lanes first, second;
    };
    using X = float;
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

// Pairs of weights as bfloat16, looked up. A byte of an integer is looked up by halves.
struct Halves {
    using Pair = __m512i;
    using X = bf16;
    __m512i int4, low, high, fp8[4];

    Halves() {
        bf16 table[7][32];
        for (int i = 0; i < 32; i++) {
            const int code = i % 16;
            store(table[0] + i, code - 8.0f);
            store(table[1] + i, code);
            store(table[2] + i, 16.0f * (code < 8 ? code : code - 16));
        }
        for (uint32_t i = 0; i < 128; i++) store(table[3] + i, value_of_fp8(i));
        std::memcpy(&int4, table[0], sizeof(int4));
        std::memcpy(&low, table[1], sizeof(low));
        std::memcpy(&high, table[2], sizeof(high));
        std::memcpy(fp8, table[3], sizeof(fp8));
    }

    template <int KIND>
    Pair decode(WideLanes words, int step) const {
        const __m512i codes = _mm512_srli_epi16(reinterpret_cast<__m512i>(words), step * (KIND == INT4 ? 4 : 8));
        if (KIND == INT4) return _mm512_permutexvar_epi16(codes, int4);
        if (KIND == INT8) {
            const __m512i small = _mm512_permutexvar_epi16(codes, low);
            const __m512i large = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), high);
            return joined(small, large);
        }
        const __m512i small = _mm512_permutex2var_epi16(fp8[0], codes, fp8[1]);
        const __m512i large = _mm512_permutex2var_epi16(fp8[2], codes, fp8[3]);
        const __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), small, large);
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-0x8000));
        return _mm512_or_si512(size, sign);
    }

    // Exact sums of pairs.
    static Pair joined(Pair a, Pair b) {
        const __m512i mask = _mm512_set1_epi32(-0x10000);
        const __m512 first = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
        const __m512 second =
            _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(a, mask)), _mm512_castsi512_ps(_mm512_and_si512(b, mask)));
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
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
inline WideLanes words_at(const QuantisedProduct& a, int64_t panel, int64_t word) {
    const char* from = reinterpret_cast<const char*>(a.codes + (panel * (a.inputs / per_word(KIND)) + word) * LANES);
    // Into the second level: the first is too small for what is asked for ahead.
    __builtin_prefetch(from + AHEAD, 0, 2);
    WideLanes words;
    std::memcpy(&words, from, sizeof(words));
    return words;
}

// Scaled sums of a segment, added to what the segments before gave.
inline void add_scaled(const QuantisedProduct& a, Lanes& total, Lanes sum, float sum_x, int64_t panel, int64_t group) {
    const int64_t at = (panel * ((a.inputs + a.group - 1) / a.group) + group) * LANES;
    total += sum * load_lanes(a.scales + at);
    if (a.shifts) total -= sum_x * load_lanes(a.shifts + at);
}

template <typename T>
void finish(const QuantisedProduct& a, Lanes total, int64_t row, int64_t panel) {
    for (int64_t i = 0, output = panel * LANES; i < std::min(LANES, a.outputs - panel * LANES); i++, output++)
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

// A few rows: codes stay in registers.
template <typename T, typename Math, int KIND, int ROWS, int PANELS>
void few_rows(const QuantisedProduct& a, const Math& math, const typename Math::X* x, const float* sums, int64_t segments, int64_t panel) {
    constexpr int64_t WORD = per_word(KIND);
    constexpr int STEPS = pairs(KIND);
    Lanes totals[ROWS][PANELS] = {};
    each_segment(a, [&](int64_t start, int64_t end, int64_t group, int64_t segment) {
        Lanes found[ROWS][PANELS] = {};
        for (int64_t i = start; i < end; i += WORD)
            for (int p = 0; p < PANELS; p++) {
                const WideLanes words = words_at<KIND>(a, panel + p, i / WORD);
                for (int step = 0; step < STEPS; step++) {
                    const auto weights = math.template decode<KIND>(words, step);
                    for (int r = 0; r < ROWS; r++) Math::add(found[r][p], weights, x + r * a.inputs + i + 2 * step);
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) add_scaled(a, totals[r][p], found[r][p], sums[r * segments + segment], panel + p, group);
    });
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) finish<T>(a, totals[r][p], r, panel + p);
}

// Rows [first, first + ROWS) with the widened codes of a segment.
template <typename Math, int KIND, int ROWS, int PANELS>
void some_rows(
    const QuantisedProduct& a, const typename Math::Pair* widened, const typename Math::X* x, const float* sums, int64_t segments,
    Lanes* totals, int64_t first, int64_t panel, int64_t start, int64_t end, int64_t group, int64_t segment) {
    Lanes found[ROWS][PANELS] = {};
    const typename Math::X* row = x + first * a.inputs;
#pragma GCC unroll 1
    for (int64_t i = start; i < end; i += 2, widened += PANELS)
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) Math::add(found[r][p], widened[p], row + r * a.inputs + i);
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++)
            add_scaled(a, totals[(first + r) * PANELS + p], found[r][p], sums[(first + r) * segments + segment], panel + p, group);
}

template <typename T, typename Math, int KIND, int PANELS>
void many_rows(const QuantisedProduct& a, const Math& math, const typename Math::X* x, const float* sums, int64_t segments, int64_t panel) {
    constexpr int64_t WORD = per_word(KIND);
    constexpr int STEPS = pairs(KIND);
    alignas(64) typename Math::Pair widened[SEGMENT / WORD * STEPS * PANELS];
    std::vector<Lanes> totals(a.rows * PANELS, Lanes{});
    each_segment(a, [&](int64_t start, int64_t end, int64_t group, int64_t segment) {
        auto* to = widened;
        for (int64_t i = start; i < end; i += WORD, to += STEPS * PANELS)
            for (int p = 0; p < PANELS; p++) {
                const WideLanes words = words_at<KIND>(a, panel + p, i / WORD);
                for (int step = 0; step < STEPS; step++) to[step * PANELS + p] = math.template decode<KIND>(words, step);
            }
        int64_t row = 0;
        for (; row + MORE <= a.rows; row += MORE)
            some_rows<Math, KIND, MORE, PANELS>(a, widened, x, sums, segments, totals.data(), row, panel, start, end, group, segment);
        for (; row < a.rows; row++)
            some_rows<Math, KIND, 1, PANELS>(a, widened, x, sums, segments, totals.data(), row, panel, start, end, group, segment);
    });
    for (int64_t row = 0; row < a.rows; row++)
        for (int p = 0; p < PANELS; p++) finish<T>(a, totals[row * PANELS + p], row, panel + p);
}

template <typename T, typename Math, int KIND, int PANELS>
void panels(const QuantisedProduct& a, const Math& math, const typename Math::X* x, const float* sums, int64_t segments, int64_t panel) {
    switch (a.rows) {
        case 1: return few_rows<T, Math, KIND, 1, PANELS>(a, math, x, sums, segments, panel);
        case 2: return few_rows<T, Math, KIND, 2, PANELS>(a, math, x, sums, segments, panel);
        case 3: return few_rows<T, Math, KIND, 3, PANELS>(a, math, x, sums, segments, panel);
        case 4: return few_rows<T, Math, KIND, 4, PANELS>(a, math, x, sums, segments, panel);
        default: return many_rows<T, Math, KIND, PANELS>(a, math, x, sums, segments, panel);
    }
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
    constexpr int64_t WIDE = 2;
    const int64_t count = (a.outputs + LANES - 1) / LANES, whole = count / WIDE, rest = count % WIDE;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t task = 0; task < whole + rest; task++) {
        if (task < whole)
            panels<T, Math, KIND, WIDE>(a, math, x, sums.data(), segments, task * WIDE);
        else
            panels<T, Math, KIND, 1>(a, math, x, sums.data(), segments, whole * WIDE);
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

}  // namespace

extern "C" {

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
