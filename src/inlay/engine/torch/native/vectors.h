// Products of rows with a few vectors, and sums of rows: what attention and adapters are made of.

#pragma once

#include <cstdint>
#include <cstring>

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
    float* acc, int64_t acc_stride, const float* shrink, const float* weights, int64_t weight_stride, const T* rows, int64_t count,
    int64_t row_stride) {
    Lanes sums[GROUP][COLUMNS];
    for (int g = 0; g < GROUP; g++)
        for (int c = 0; c < COLUMNS; c++) sums[g][c] = load_lanes(acc + g * acc_stride + c * LANES) * shrink[g];
    for (int64_t j = 0; j < count; j++)
        for (int c = 0; c < COLUMNS; c++) {
            const Lanes v = load_lanes(rows + j * row_stride + c * LANES);
            for (int g = 0; g < GROUP; g++) sums[g][c] += weights[g * weight_stride + j] * v;
        }
    for (int g = 0; g < GROUP; g++) std::memcpy(acc + g * acc_stride, sums[g], sizeof(sums[g]));
}

// acc[g] = acc[g] * shrink[g] + sum of weights[g][j] * rows[j], for GROUP queries of one head; rows are row_stride apart.
template <int GROUP, typename T>
void accumulate(
    float* acc, int64_t acc_stride, const float* shrink, const float* weights, int64_t weight_stride, const T* rows, const T* next,
    int64_t count, int64_t size, int64_t row_stride) {
    if (next)
        for (int64_t j = 0; j < count; j++) fetch(next + j * row_stride, size);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        accumulate_columns<GROUP, 4>(acc + i, acc_stride, shrink, weights, weight_stride, rows + i, count, row_stride);
    for (; i + LANES <= size; i += LANES)
        accumulate_columns<GROUP, 1>(acc + i, acc_stride, shrink, weights, weight_stride, rows + i, count, row_stride);
    for (int g = 0; g < GROUP; g++)
        for (int64_t rest = i; rest < size; rest++) {
            float sum = acc[g * acc_stride + rest] * shrink[g];
            for (int64_t j = 0; j < count; j++) sum += weights[g * weight_stride + j] * load(rows[j * row_stride + rest]);
            acc[g * acc_stride + rest] = sum;
        }
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

// Sums of the lanes of each of four vectors, in every quarter a part of all four.
inline __m512 join(const __m512* x) {
    const __m512 one = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 two = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(one), _mm512_castps_pd(two));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(one), _mm512_castps_pd(two));
    return _mm512_castpd_ps(low) + _mm512_castpd_ps(high);
}

inline __m512 join_quarters(__m512 x, __m512 y) { return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xdd); }

// `dots` of a multiple of 16 rows; queries are `query_stride` apart and zero past `size`.
template <int GROUP>
void dots(
    float* scores, int64_t score_stride, const bf16* queries, int64_t query_stride, const bf16* rows, const bf16* next, int64_t count,
    int64_t size) {
    for (int64_t j = 0; j < count; j += LANES) {
        __m512 quarters[GROUP][4];
        for (int64_t quarter = 0; quarter < 4; quarter++) {
            const bf16* row = rows + (j + 4 * quarter) * size;
            if (next) fetch(next + (j + 4 * quarter) * size, 4 * size);
            __m512 sums[GROUP][4] = {};
            for (int64_t i = 0; i < size; i += PAIRED)
                for (int r = 0; r < 4; r++) {
                    const __m512bh k = reinterpret_cast<__m512bh>(load_pairs(row + r * size, i, size));
                    for (int g = 0; g < GROUP; g++) {
                        const __m512i q = _mm512_loadu_si512(queries + g * query_stride + i);
                        sums[g][r] = _mm512_dpbf16_ps(sums[g][r], reinterpret_cast<__m512bh>(q), k);
                    }
                }
            for (int g = 0; g < GROUP; g++) quarters[g][quarter] = join(sums[g]);
        }
        for (int g = 0; g < GROUP; g++) {
            const __m512* own = quarters[g];
            const __m512 found = join_quarters(join_quarters(own[0], own[1]), join_quarters(own[2], own[3]));
            _mm512_storeu_ps(scores + g * score_stride + j, found);
        }
    }
}

// COLUMNS * 32 columns from `i` on of `accumulate`.
template <int GROUP, int COLUMNS>
inline void accumulate_pairs(
    float* acc, int64_t acc_stride, const float* shrink, const bf16* weights, int64_t weight_stride, const bf16* rows, const bf16* next,
    int64_t count, int64_t i, int64_t size, int64_t row_stride) {
    __m512 sums[GROUP][COLUMNS][2] = {};
    for (int64_t j = 0; j < count; j += 2) {
        const bf16* row = rows + j * row_stride;
        if (next) {
            fetch(next + j * row_stride + i, COLUMNS * PAIRED);
            fetch(next + (j + 1) * row_stride + i, COLUMNS * PAIRED);
        }
        __m512bh own[GROUP];
        for (int g = 0; g < GROUP; g++) {
            int32_t pair;
            std::memcpy(&pair, weights + g * weight_stride + j, sizeof(pair));
            own[g] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        }
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
            const __m512 *own = sums[g][c], factor = _mm512_set1_ps(shrink[g]);
            _mm512_storeu_ps(to, _mm512_loadu_ps(to) * factor + _mm512_permutex2var_ps(own[0], first, own[1]));
            _mm512_storeu_ps(to + LANES, _mm512_loadu_ps(to + LANES) * factor + _mm512_permutex2var_ps(own[0], second, own[1]));
        }
}

// `accumulate` of an even number of rows; `acc` has room for whole 32 columns.
template <int GROUP>
void accumulate(
    float* acc, int64_t acc_stride, const float* shrink, const bf16* weights, int64_t weight_stride, const bf16* rows, const bf16* next,
    int64_t count, int64_t size, int64_t row_stride) {
    // As many sums as registers hold.
    constexpr int COLUMNS = GROUP > 2 ? 2 : 4;
    int64_t i = 0;
    for (; i + COLUMNS * PAIRED <= size; i += COLUMNS * PAIRED)
        accumulate_pairs<GROUP, COLUMNS>(acc, acc_stride, shrink, weights, weight_stride, rows, next, count, i, size, row_stride);
    for (; i < size; i += PAIRED)
        accumulate_pairs<GROUP, 1>(acc, acc_stride, shrink, weights, weight_stride, rows, next, count, i, size, row_stride);
}

#endif

}  // namespace
