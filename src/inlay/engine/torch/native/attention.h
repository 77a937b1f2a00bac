// What attention over blocks of positions is made of: exponentials, products of tiles, and how keys and values are laid out for them.

#pragma once

#include <limits>
#include <type_traits>

#include "activations.h"

namespace {

// Positions of a block.
constexpr int64_t KEYS = 128;

constexpr float LOG2_E = 1.44269504088896341f, NOTHING = -std::numeric_limits<float>::infinity();

// 2^x for x <= 0: exactly 1 for 0, exactly 0 below -126; NaN stays NaN. Chebyshev interpolation of degree 5, relative error 2e-7.
inline Lanes power_of_two(Lanes x) {
    typedef int32_t Whole __attribute__((vector_size(LANES * sizeof(int32_t))));
    const Whole n = __builtin_convertvector(x - 0.5f, Whole);
    const Lanes f = x - __builtin_convertvector(n, Lanes);
    Lanes y = f * 1.339086336e-3f + 9.676031918e-3f;
    y = y * f + 5.550357114e-2f;
    y = y * f + 2.402210749e-1f;
    y = y * f + 6.931471880e-1f;
    y = y * f + 1.0f;
    const Lanes power = reinterpret_cast<Lanes>((n + 127) << 23);
    return x < Lanes{} - 126.0f ? Lanes{} : y * power;
}

inline float power_of_two(float x) { return power_of_two(Lanes{} + x)[0]; }

inline float greatest_lane(Lanes x) {
    float top = x[0];
    for (int64_t i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// Products of up to 32 rows with 32 columns. The right operand is in groups of 16 columns, `right` and `right2`.

#if defined(__AMX_BF16__) || defined(EMULATED_TILES)

// Pairs of bfloat16 that follow each other in a column lie side by side: [depth / 2][16][2].
struct Pairs {
    using Element = bf16;
    Tiles tiles;

    void operator()(
        const bf16* left, int64_t stride, const bf16* right, const bf16* right2, int64_t depth, int64_t rows, float* to, int64_t to_stride) {
        const bool both = rows > TILE;
        tiles.clear();
        tiles.add(left, stride, 0, right, right2, 0, depth / BLOCK, both);
        tiles.save(to, to_stride, both);
    }
};

constexpr bool PAIRS_COMPILED = true, PAIRS_BY_VECTORS = false;

#elif defined(__AVX512BF16__)

struct Pairs {
    using Element = bf16;

    void operator()(
        const bf16* left, int64_t stride, const bf16* right, const bf16* right2, int64_t depth, int64_t rows, float* to, int64_t to_stride) {
        // As many sums as hide how long one takes, and as registers hold.
        constexpr int AT_ONCE = 8;
        for (int64_t row = 0; row < rows; row += AT_ONCE, left += AT_ONCE * stride, to += AT_ONCE * to_stride) {
            __m512 sums[AT_ONCE][2] = {};
            for (int64_t k = 0; k < depth; k += 2) {
                __m512bh one, two;
                std::memcpy(&one, right + k * TILE, sizeof(one));
                std::memcpy(&two, right2 + k * TILE, sizeof(two));
                for (int r = 0; r < AT_ONCE; r++) {
                    int32_t pair;
                    std::memcpy(&pair, left + r * stride + k, sizeof(pair));
                    const __m512bh own = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], own, one);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], own, two);
                }
            }
            for (int r = 0; r < AT_ONCE; r++) {
                _mm512_storeu_ps(to + r * to_stride, sums[r][0]);
                _mm512_storeu_ps(to + r * to_stride + TILE, sums[r][1]);
            }
        }
    }
};

constexpr bool PAIRS_COMPILED = true, PAIRS_BY_VECTORS = true;

#else

constexpr bool PAIRS_COMPILED = false, PAIRS_BY_VECTORS = false;

#endif

// Float32, of a column one element after another: [depth][16].
struct Singles {
    using Element = float;

    void operator()(
        const float* left, int64_t stride, const float* right, const float* right2, int64_t depth, int64_t rows, float* to,
        int64_t to_stride) {
#ifdef __AVX512F__
        constexpr int AT_ONCE = 8;
#else
        constexpr int AT_ONCE = 2;
#endif
        for (int64_t row = 0; row < rows; row += AT_ONCE, left += AT_ONCE * stride, to += AT_ONCE * to_stride) {
            Lanes sums[AT_ONCE][2] = {};
            for (int64_t k = 0; k < depth; k++) {
                const Lanes one = load_lanes(right + k * TILE), two = load_lanes(right2 + k * TILE);
                for (int r = 0; r < AT_ONCE; r++) {
                    sums[r][0] += left[r * stride + k] * one;
                    sums[r][1] += left[r * stride + k] * two;
                }
            }
            for (int r = 0; r < AT_ONCE; r++) {
                store_lanes(to + r * to_stride, sums[r][0]);
                store_lanes(to + r * to_stride + TILE, sums[r][1]);
            }
        }
    }
};

// What a few rows are multiplied in.
#ifdef __AVX512BF16__
template <typename T>
using FewElement = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using FewElement = float;
#endif

// Lays `count` of KEYS positions out for the products of one head, the rest as zeros: keys as columns of the first, values as rows
// of the second.
template <typename T>
void lay_out_key(bf16* to, int64_t j, const T* from, int64_t size, int64_t padded) {
    static_assert(std::is_same_v<T, bf16>);
    to += j / TILE * TILE * padded + j % TILE * 2;
    for (int64_t i = 0; i + 1 < size; i += 2) std::memcpy(to + i * TILE, from + i, 2 * sizeof(bf16));
    if (size % 2) to[(size - 1) * TILE] = from[size - 1];
}

template <typename T>
void lay_out_key(float* to, int64_t j, const T* from, int64_t size, int64_t padded) {
    to += j / TILE * TILE * padded + j % TILE;
    for (int64_t i = 0; i < size; i++) to[i * TILE] = load(from[i]);
}

template <typename T>
void lay_out_value(bf16* to, int64_t j, const T* from, int64_t size) {
    to += j / 2 * BLOCK + j % 2;
    for (int64_t i = 0; i < size; i++) to[i / TILE * TILE * KEYS + i % TILE * 2] = from[i];
}

template <typename T>
void lay_out_value(float* to, int64_t j, const T* from, int64_t size) {
    to += j * TILE;
    for (int64_t i = 0; i < size; i++) to[i / TILE * TILE * KEYS + i % TILE] = load(from[i]);
}

}  // namespace
