// Products of rows with a few vectors, and sums of rows: what attention and adapters are made of.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

// A CPU does not look ahead from one page to another, and pages lie anywhere.
template <typename T>
inline void fetch(const T* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i);
}

// scores[g][j] = queries[g] . rows[j] for GROUP queries of one head; a row is widened once for all of them.
template <int GROUP, typename T>
void dots(float* scores, int64_t score_stride, const float* queries, const T* rows, const T* next, int64_t count, int64_t size) {
    for (int64_t j = 0; j < count; j++) {
        const T* row = rows + j * size;
        if (next) fetch(next + j * size, size);
        Lanes sums[GROUP] = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            const Lanes k = load_lanes(row + i);
            for (int g = 0; g < GROUP; g++) sums[g] += load_lanes(queries + g * size + i) * k;
        }
        for (int g = 0; g < GROUP; g++) {
            float sum = sum_lanes(sums[g]);
            for (int64_t rest = i; rest < size; rest++) sum += queries[g * size + rest] * load(row[rest]);
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

}  // namespace
