// Products of rows with a few vectors, and sums of rows: what attention and adapters are made of.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// A CPU does not look ahead from one page to another, and pages lie anywhere. Into the second level: the first is too small for a
// page ahead.
template <typename T>
inline void fetch(const T* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
}

// scores[g][j] = queries[g] . rows[j] for GROUP queries of one head; a row is widened once for all of them.
template <int GROUP, typename T>
void dots(
    float* scores, int64_t score_stride, const float* queries, int64_t query_stride, const T* rows, const T* next, int64_t count,
    int64_t size) {
    for (int64_t j = 0; j < count; j++) {
        const T* row = rows + j * size;
        if (next) fetch(next + j * size, size);
        Lanes sums[GROUP] = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            const Lanes k = load_lanes(row + i);
            for (int g = 0; g < GROUP; g++) sums[g] += load_lanes(queries + g * query_stride + i) * k;
        }
        for (int g = 0; g < GROUP; g++) {
            float sum = sum_lanes(sums[g]);
            for (int64_t rest = i; rest < size; rest++) sum += queries[g * query_stride + rest] * load(row[rest]);
            scores[g * score_stride + j] = sum;
        }
    }
}

// COLUMNS * 16 columns of `accumulate`, all at once: each sum waits for its last addition.
template <int GROUP, int COLUMNS, typename T>
inline void accumulate_columns(
    float* acc, int64_t acc_stride, const float* weights, int64_t weight_stride, const T* rows, int64_t count, int64_t row_stride) {
    Lanes sums[GROUP][COLUMNS];
    for (int g = 0; g < GROUP; g++)
        for (int c = 0; c < COLUMNS; c++) sums[g][c] = load_lanes(acc + g * acc_stride + c * LANES);
    for (int64_t j = 0; j < count; j++)
        for (int c = 0; c < COLUMNS; c++) {
            const Lanes v = load_lanes(rows + j * row_stride + c * LANES);
            for (int g = 0; g < GROUP; g++) sums[g][c] += weights[g * weight_stride + j] * v;
        }
    for (int g = 0; g < GROUP; g++) std::memcpy(acc + g * acc_stride, sums[g], sizeof(sums[g]));
}

// acc[g] += sum of weights[g][j] * rows[j], for GROUP queries of one head; rows are row_stride apart.
template <int GROUP, typename T>
void accumulate(
    float* acc, int64_t acc_stride, const float* weights, int64_t weight_stride, const T* rows, const T* next, int64_t count, int64_t size,
    int64_t row_stride) {
    if (next)
        for (int64_t j = 0; j < count; j++) fetch(next + j * row_stride, size);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        accumulate_columns<GROUP, 4>(acc + i, acc_stride, weights, weight_stride, rows + i, count, row_stride);
    for (; i + LANES <= size; i += LANES)
        accumulate_columns<GROUP, 1>(acc + i, acc_stride, weights, weight_stride, rows + i, count, row_stride);
    for (int g = 0; g < GROUP; g++)
        for (int64_t rest = i; rest < size; rest++) {
            float sum = acc[g * acc_stride + rest];
            for (int64_t j = 0; j < count; j++) sum += weights[g * weight_stride + j] * load(rows[j * row_stride + rest]);
            acc[g * acc_stride + rest] = sum;
        }
}

// The same of `count` times 16 rows, each sixteen where its pointer says; `ahead` if two more pointers may be fetched from.
template <int GROUP, typename T>
void dots(
    float* scores, int64_t score_stride, const float* queries, int64_t query_stride, const T* const* rows, bool ahead, int64_t count,
    int64_t size) {
    for (int64_t j = 0; j < count; j++)
        dots<GROUP>(scores + j * LANES, score_stride, queries, query_stride, rows[j], ahead ? rows[j + 2] : nullptr, LANES, size);
}

template <int GROUP, typename T>
void accumulate(
    float* acc, int64_t acc_stride, const float* weights, int64_t weight_stride, const T* const* rows, bool ahead, int64_t count,
    int64_t size, int64_t row_stride) {
    for (int64_t j = 0; j < count; j++)
        accumulate<GROUP>(
            acc, acc_stride, weights + j * LANES, weight_stride, rows[j], ahead ? rows[j + 2] : nullptr, LANES, size, row_stride);
}

#ifdef __AVX512BF16__

// Intrinsics: no compiler finds these instructions by itself, and keys and values that are widened one by one take three times
// as long.
constexpr int64_t PAIRED = 32;

// Up to PAIRED elements from `i` on, zero past `size`: what lies there may be anything.
inline __m512i load_pairs(const bf16* from, int64_t i, int64_t size) {
    const int64_t left = size - i;
    return left >= PAIRED ? _mm512_loadu_si512(from + i) : _mm512_maskz_loadu_epi16((1u << left) - 1, from + i);
}

// Of sixteen vectors of pairs, the first pairs, the second ones, and so on.
inline void transpose(__m512i* x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    // x[4 i + c]: in quarter q, pair 4 q + c of vectors 4 i to 4 i + 3.
    for (int i = 0; i < 16; i += 4)
        for (int c = 0; c < 2; c++) {
            x[i + 2 * c] = _mm512_unpacklo_epi64(y[i + c], y[i + 2 + c]);
            x[i + 2 * c + 1] = _mm512_unpackhi_epi64(y[i + c], y[i + 2 + c]);
        }
    for (int c = 0; c < 4; c++) {
        const __m512i even = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), odd = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88), odd2 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
        y[4 + c] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        y[8 + c] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        y[12 + c] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    std::memcpy(static_cast<void*>(x), y, sizeof(y));
}

inline __m512bh pair_at(const bf16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// Scores of PARTS * 16 rows of keys: in the order of sums of products of tiles (`Pairs`).
template <int GROUP, int PARTS>
void dots_of(
    float* scores, int64_t score_stride, const bf16* queries, int64_t query_stride, const bf16* const* rows, const bf16* const* next,
    int64_t size) {
    __m512 sums[PARTS][GROUP] = {};
    for (int64_t i = 0; i < size; i += PAIRED)
        for (int part = 0; part < PARTS; part++) {
            __m512i x[LANES];
            for (int64_t r = 0; r < LANES; r++) {
                // From end to end: a CPU asks for more by itself then.
                if (next) __builtin_prefetch(next[part] + i * LANES + r * PAIRED, 0, 2);
                x[r] = load_pairs(rows[part] + r * size, i, size);
            }
            transpose(x);
            for (int64_t pair = 0; pair < LANES; pair++)
                for (int g = 0; g < GROUP; g++)
                    sums[part][g] =
                        _mm512_dpbf16_ps(sums[part][g], pair_at(queries + g * query_stride + i + 2 * pair), reinterpret_cast<__m512bh>(x[pair]));
        }
    for (int part = 0; part < PARTS; part++)
        for (int g = 0; g < GROUP; g++) _mm512_storeu_ps(scores + g * score_stride + part * LANES, sums[part][g]);
}

// `dots` of `count` times 16 rows; queries are `query_stride` apart and zero past `size`.
template <int GROUP>
void dots(
    float* scores, int64_t score_stride, const bf16* queries, int64_t query_stride, const bf16* const* rows, bool ahead, int64_t count,
    int64_t size) {
    int64_t j = 0;
    for (; j + 2 <= count; j += 2)
        dots_of<GROUP, 2>(scores + j * LANES, score_stride, queries, query_stride, rows + j, ahead ? rows + j + 2 : nullptr, size);
    if (j < count) dots_of<GROUP, 1>(scores + j * LANES, score_stride, queries, query_stride, rows + j, ahead ? rows + j + 2 : nullptr, size);
}

// COLUMNS * 32 columns from `i` on of `accumulate`.
template <int GROUP, int COLUMNS>
inline void accumulate_pairs(
    float* acc, int64_t acc_stride, const bf16* weights, int64_t weight_stride, const bf16* const* rows, bool ahead, int64_t count, int64_t i,
    int64_t size, int64_t row_stride) {
    __m512 sums[GROUP][COLUMNS][2] = {};
    for (int64_t j = 0; j < count * LANES; j += 2) {
        const bf16* row = rows[j / LANES] + j % LANES * row_stride;
        if (ahead) {
            const bf16* next = rows[j / LANES + 2] + j % LANES * row_stride;
            fetch(next + i, COLUMNS * PAIRED);
            fetch(next + row_stride + i, COLUMNS * PAIRED);
        }
        __m512bh own[GROUP];
        for (int g = 0; g < GROUP; g++) own[g] = pair_at(weights + g * weight_stride + j);
        for (int c = 0; c < COLUMNS; c++) {
            const __m512i one = load_pairs(row, i + c * PAIRED, size), two = load_pairs(row + row_stride, i + c * PAIRED, size);
            const __m512bh low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(one, two));
            const __m512bh high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(one, two));
            for (int g = 0; g < GROUP; g++) {
                sums[g][c][0] = _mm512_dpbf16_ps(sums[g][c][0], own[g], low);
                sums[g][c][1] = _mm512_dpbf16_ps(sums[g][c][1], own[g], high);
            }
        }
    }
    // Four columns of the one and four of the other by turns.
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int g = 0; g < GROUP; g++)
        for (int c = 0; c < COLUMNS; c++) {
            float* to = acc + g * acc_stride + i + c * PAIRED;
            const __m512* own = sums[g][c];
            _mm512_storeu_ps(to, _mm512_loadu_ps(to) + _mm512_permutex2var_ps(own[0], first, own[1]));
            _mm512_storeu_ps(to + LANES, _mm512_loadu_ps(to + LANES) + _mm512_permutex2var_ps(own[0], second, own[1]));
        }
}

// `accumulate` of `count` times 16 rows; `acc` has room for whole 32 columns.
template <int GROUP>
void accumulate(
    float* acc, int64_t acc_stride, const bf16* weights, int64_t weight_stride, const bf16* const* rows, bool ahead, int64_t count,
    int64_t size, int64_t row_stride) {
    // As many sums as registers hold.
    constexpr int COLUMNS = GROUP > 2 ? 2 : 4;
    int64_t i = 0;
    for (; i + COLUMNS * PAIRED <= size; i += COLUMNS * PAIRED)
        accumulate_pairs<GROUP, COLUMNS>(acc, acc_stride, weights, weight_stride, rows, ahead, count, i, size, row_stride);
    for (; i < size; i += PAIRED)
        accumulate_pairs<GROUP, 1>(acc, acc_stride, weights, weight_stride, rows, ahead, count, i, size, row_stride);
}

#endif

// Calls `run` with four rows at a time, then two, then one: how many, as a constant, and the first.
template <typename Do>
void by_rows(int64_t rows, Do&& run) {
    int64_t r = 0;
    for (; rows - r >= 4; r += 4) run(std::integral_constant<int, 4>(), r);
    for (; rows - r >= 2; r += 2) run(std::integral_constant<int, 2>(), r);
    if (r < rows) run(std::integral_constant<int, 1>(), r);
}

}  // namespace
