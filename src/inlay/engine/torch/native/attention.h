// What attention over blocks of positions is made of: weights of scores, products of tiles, and how keys and values are laid out for
// them.

#pragma once

#include <limits>
#include <type_traits>

#include "activations.h"
#include "vectors.h"

#ifdef __AVX512DQ__
#include <immintrin.h>
#endif

namespace {

// Positions of a block.
constexpr int64_t KEYS = 128;

constexpr float LOG2_E = 1.44269504088896341f, NOTHING = -std::numeric_limits<float>::infinity();

// How much a score may be above the greatest one before the sums are scaled anew, in powers of two.
constexpr float HEADROOM = 8;

// 2^x for x <= HEADROOM: exactly 1 for 0, exactly 0 below -127; NaN stays NaN. Polynomials for 2^f - 1 with f in [0, 1), minimax in
// relative error: of degree 5 to 1e-7, and of degree 3 to 1e-4 for weights in bfloat16, which are rounded by 4e-3.
template <typename To = float>
inline Lanes power_of_two(Lanes x) {
#ifdef __AVX512DQ__
    // Intrinsics: two instructions for seven.
    const Lanes f = reinterpret_cast<Lanes>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEG_INF));
#else
    typedef int32_t Whole __attribute__((vector_size(LANES * sizeof(int32_t))));
    // A conversion rounds down what is positive.
    const Whole n = __builtin_convertvector(x + 128.0f, Whole) - 128;
    const Lanes f = x - __builtin_convertvector(n, Lanes);
#endif
    Lanes y;
    if (std::is_same_v<To, bf16>) {
        y = f * 7.826791786e-2f + 2.263077405e-1f;
        y = y * f + 6.954243349e-1f;
    } else {
        y = f * 1.879318411e-3f + 8.990995562e-3f;
        y = y * f + 5.581867568e-2f;
        y = y * f + 2.401592715e-1f;
        y = y * f + 6.931517388e-1f;
    }
    y = y * f + 1.0f;
#ifdef __AVX512DQ__
    return reinterpret_cast<Lanes>(_mm512_scalef_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
#else
    const Lanes power = reinterpret_cast<Lanes>((n + 127) << 23);
    return x < Lanes{} - 126.0f ? Lanes{} : y * power;
#endif
}

inline float power_of_two(float x) { return power_of_two(Lanes{} + x)[0]; }

inline float greatest_lane(Lanes x) {
    float top = x[0];
    for (int64_t i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

inline Lanes greater(Lanes x, Lanes y) { return x > y ? x : y; }

inline bool any_above(Lanes x, float bound) {
#ifdef __AVX512DQ__
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(bound), _CMP_GT_OQ);
#else
    bool found = false;
    for (int64_t i = 0; i < LANES; i++) found |= x[i] > bound;
    return found;
#endif
}

// Of a row of queries: a score that no other is much above, the sum of its weights, and which positions it sees.
struct Row {
    float top, sum;
    int64_t low, end;
    Lanes total{};

    void begin() {
        top = NOTHING;
        total = Lanes{};
    }
    void close() { sum = sum_lanes(total); }
};

// Turns a row's scores against the block at `start` into weights: zero for what it does not see. Gives the factor of what came
// before: 1 unless a score is far above those. One function, that the compiler may round in one way only.
template <typename To>
__attribute__((noinline)) float soften(To* to, const float* scores, int64_t start, Row& row, float scaling, float softcap) {
    constexpr int64_t VECTORS = KEYS / LANES;
    float seen[KEYS];
    const bool capped = softcap > 0;
    if (capped || row.low > start || row.end < start + KEYS) {
        const float bend = scaling / softcap;
        for (int64_t j = 0; j < KEYS; j++) seen[j] = capped ? softcap * std::tanh(scores[j] * bend) : scores[j];
        const int32_t low = std::max<int64_t>(row.low - start, 0), end = std::min(row.end - start, KEYS);
        for (int32_t j = 0; j < KEYS; j++) seen[j] = j < low || j >= end ? NOTHING : seen[j];
        scores = seen;
    }
    const float factor = (capped ? 1.0f : scaling) * LOG2_E;
    Lanes most = load_lanes(scores), other = load_lanes(scores + LANES);
    for (int64_t v = 2; v < VECTORS; v += 2) {
        most = greater(load_lanes(scores + v * LANES), most);
        other = greater(load_lanes(scores + (v + 1) * LANES), other);
    }
    most = greater(other, most) * factor;
    float shrink = 1;
    if (any_above(most, row.top + HEADROOM)) {
        const float top = std::max(row.top, greatest_lane(most));
        shrink = power_of_two(row.top - top);
        row.top = top;
        row.total *= shrink;
    }
    // Nothing seen yet: not a number less itself would be.
    const float base = row.top == NOTHING ? 0.0f : row.top;
    Lanes total = row.total;
    for (int64_t v = 0; v < VECTORS; v++) {
        store_lanes(to + v * LANES, power_of_two<To>(load_lanes(scores + v * LANES) * factor - base));
        // As they are rounded: where one weight is all, the result is its value.
        total += load_lanes(to + v * LANES);
    }
    row.total = total;
    return shrink;
}

// Products of up to 32 rows with 32 columns, added to what is there if MORE. `beside` is what may be done meanwhile, once or not at
// all for every 32 of the depth.
// The right operand is in groups of 16 columns, `right` and `right2`.

#if defined(TILES) || defined(EMULATED_TILES)

// Pairs of bfloat16 that follow each other in a column lie side by side: [depth / 2][16][2].
struct Pairs {
    using Element = bf16;
    Tiles tiles;

    template <bool MORE, typename Beside>
    void multiply(
        const bf16* left, int64_t stride, const bf16* right, const bf16* right2, int64_t depth, int64_t rows, float* to, int64_t to_stride,
        Beside&& beside) {
        const bool both = rows > TILE;
        MORE ? tiles.open(to, to_stride, both) : tiles.clear();
        tiles.add(left, stride, 0, right, right2, 0, depth / BLOCK, both, beside);
        tiles.save(to, to_stride, both);
    }
};

constexpr bool PAIRS_COMPILED = true, PAIRS_BY_VECTORS = false;

#elif defined(__AVX512BF16__)

struct Pairs {
    using Element = bf16;

    template <bool MORE, typename Beside>
    void multiply(
        const bf16* left, int64_t stride, const bf16* right, const bf16* right2, int64_t depth, int64_t rows, float* to, int64_t to_stride,
        Beside&&) {
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
                float* own = to + r * to_stride;
                _mm512_storeu_ps(own, MORE ? _mm512_loadu_ps(own) + sums[r][0] : sums[r][0]);
                _mm512_storeu_ps(own + TILE, MORE ? _mm512_loadu_ps(own + TILE) + sums[r][1] : sums[r][1]);
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

    template <bool MORE, typename Beside>
    void multiply(
        const float* left, int64_t stride, const float* right, const float* right2, int64_t depth, int64_t rows, float* to,
        int64_t to_stride, Beside&&) {
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
                float* own = to + r * to_stride;
                store_lanes(own, MORE ? load_lanes(own) + sums[r][0] : sums[r][0]);
                store_lanes(own + TILE, MORE ? load_lanes(own + TILE) + sums[r][1] : sums[r][1]);
            }
        }
    }
};

// Sixteen rows from position `at` on, with zeros for those outside: what is no row of this sequence may be anything, and zero times
// that is not zero.
template <typename T>
const T* whole_of(T* edge, const T* rows, int64_t size, int64_t stride, int64_t at, int64_t low, int64_t high) {
    std::memset(static_cast<void*>(edge), 0, LANES * stride * sizeof(T));
    for (int64_t k = std::max<int64_t>(low - at, 0); k < std::min(high - at, LANES); k++)
        std::memcpy(edge + k * stride, rows + k * stride, size * sizeof(T));
    return edge;
}

// What a few rows are multiplied in.
#ifdef __AVX512BF16__
template <typename T>
using FewElement = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <typename T>
using FewElement = float;
#endif

// Lays sixteen of KEYS positions from `j` on out for the products of one head: keys as columns of the first, values as rows of the
// second.
template <typename T>
void lay_out_keys(bf16* to, int64_t j, const T* from, int64_t size, int64_t padded) {
    static_assert(std::is_same_v<T, bf16>);
    to += j * padded;
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < size; i += PAIRED) {
        __m512i x[LANES];
        for (int64_t k = 0; k < LANES; k++) x[k] = load_pairs(from + k * size, i, size);
        transpose(x);
        std::memcpy(static_cast<void*>(to + i * TILE), x, sizeof(x));
    }
#else
    for (int64_t i = 0; i < size; i++)
        for (int64_t k = 0; k < TILE; k++) to[i / 2 * BLOCK + 2 * k + i % 2] = from[k * size + i];
#endif
}

template <typename T>
void lay_out_keys(float* to, int64_t j, const T* from, int64_t size, int64_t padded) {
    to += j * padded;
    for (int64_t i = 0; i < size; i++)
        for (int64_t k = 0; k < TILE; k++) to[i * TILE + k] = load(from[k * size + i]);
}

template <typename T>
void lay_out_values(bf16* to, int64_t j, const T* from, int64_t size, int64_t stride) {
    to += j * TILE;
    int64_t i = 0;
#ifdef __AVX512BF16__
    // Two rows, column by column.
    alignas(64) uint16_t turns[2 * PAIRED];
    for (int64_t c = 0; c < 2 * PAIRED; c++) turns[c] = c / 2 + c % 2 * PAIRED;
    const __m512i first = _mm512_load_si512(turns), second = _mm512_load_si512(turns + PAIRED);
    for (; i + PAIRED <= size; i += PAIRED, to += PAIRED * KEYS)
        for (int64_t k = 0; k < TILE; k += 2) {
            const __m512i one = load_pairs(from + k * stride, i, size), two = load_pairs(from + (k + 1) * stride, i, size);
            _mm512_storeu_si512(to + k * TILE, _mm512_permutex2var_epi16(one, first, two));
            _mm512_storeu_si512(to + k * TILE + TILE * KEYS, _mm512_permutex2var_epi16(one, second, two));
        }
#endif
    for (; i < size; i += TILE, to += TILE * KEYS)
        for (int64_t k = 0; k < TILE; k++)
            for (int64_t c = 0; c < std::min(TILE, size - i); c++) to[k / 2 * BLOCK + 2 * c + k % 2] = from[k * stride + i + c];
}

template <typename T>
void lay_out_values(float* to, int64_t j, const T* from, int64_t size, int64_t stride) {
    to += j * TILE;
    for (int64_t i = 0; i < size; i += TILE, to += TILE * KEYS)
        for (int64_t k = 0; k < TILE; k++)
            for (int64_t c = 0; c < std::min(TILE, size - i); c++) to[k * TILE + c] = load(from[k * stride + i + c]);
}

// `dots` of vectors.h by tiles, for up to 16 rows of queries that are laid out as keys are. Keys are the left operand where they lie:
// the sums are those of `Pipeline`. Two more pointers than `count` are fetched from.
template <typename Product>
void dots_by_tiles(
    Product& product, float* to, int64_t rows, const bf16* queries, const bf16* const* keys, int64_t count, int64_t size) {
    alignas(64) float found[TILE * BLOCK];
    for (int64_t j = 0; j < count; j++, to += TILE) {
        fetch(keys[j + 2], TILE * size);
        product.template multiply<false>(keys[j], size, queries, queries, size, TILE, found, BLOCK, Nothing());
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < TILE; k++) to[r * KEYS + k] = found[k * BLOCK + r];
    }
}

// `accumulate` likewise; `room` for KEYS values.
template <typename Product>
void accumulate_by_tiles(
    Product& product, float* acc, const bf16* weights, const bf16* const* values, int64_t count, int64_t size, int64_t stride, bf16* room) {
    for (int64_t j = 0; j < count; j++) {
        fetch(values[j + 2], TILE * stride);
        lay_out_values(room, j * TILE, values[j], size, stride);
    }
    for (int64_t i = 0; i < size; i += BLOCK, room += BLOCK * KEYS)
        product.template multiply<true>(weights, KEYS, room, room + TILE * KEYS, count * TILE, TILE, acc + i, size, Nothing());
}

}  // namespace
