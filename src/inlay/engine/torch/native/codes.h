// Codes of weights of four and eight bits, widened to numbers, exactly: their values are values of bfloat16.
//
// They lie in panels of 64 outputs: [O / 64][I / n][64] words of 32 bits, of n = 8 or 4 inputs each. The low half of a word has the
// even inputs, the first in the lowest bits, the high half the odd ones: shifting both gives a pair of inputs of 16 outputs.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// Integers of four bits, 8 below their code; of eight, in two's complement; float8 e4m3.
enum Kind : int32_t { INT4, INT8, FP8 };

// Vectors of outputs of a panel.
constexpr int WIDTH = 4;

constexpr int64_t per_word(int kind) { return kind == INT4 ? 8 : 4; }
constexpr int pairs(int kind) { return static_cast<int>(per_word(kind)) / 2; }

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
    // As many sums as registers hold: rows, and vectors of outputs of each.
#ifdef __AVX512F__
    static constexpr int ROWS = 6, VECTORS = WIDTH;
#else
    static constexpr int ROWS = 6, VECTORS = 1;
#endif
    // Whether codes are widened at no cost beside the products of a few rows.
    template <int KIND>
    static constexpr bool free_to_widen() { return false; }

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
    static constexpr int ROWS = 6, VECTORS = WIDTH;
    template <int KIND>
    static constexpr bool free_to_widen() { return KIND == INT4; }

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

}  // namespace
