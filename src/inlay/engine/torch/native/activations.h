// What goes through the layers of an encoder, as products of 32 columns want it: one bfloat16, two to a float32, or three digits, for
// tiles; or float32 as it is, for vectors.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "tiles.h"

namespace {

inline int64_t whole(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Hands out parts of one stretch of memory; from null on, it counts what they take.
struct Arena {
    char* at;
    template <typename T>
    T* take(int64_t count) {
        T* found = reinterpret_cast<T*>(at);
        at += whole(count * sizeof(T), 64);
        return found;
    }
};

// The exact GELU, with erfc by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
inline float gelu(float x) {
    const float z = std::fabs(x) * 0.70710678118654752f;
    const float t = 1.0f / (1.0f + 0.3275911f * z);
    float y = 1.061405429f;
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const float half = 0.5f * y * t * exponential(-z * z);
    return x >= 0.0f ? x - x * half : x * half;
}

// The same to an absolute error of 1e-4, which bfloat16 does not show: the normal distribution by a polynomial of degree 8 in
// the square, least squares weighted until its errors on [-4, 4] were even, and scaled to end at 0 and 1.
inline Lanes short_gelu(Lanes x) {
    constexpr float factors[] = {-1.87998247f, 4.55696058f, -6.60079193f, 6.48204327f, -4.64454603f, 2.52863431f, -1.06256950f, 0.39892271f};
    constexpr float END = 4.0f, SCALE = 1.0000560f;
    const Lanes end = Lanes{} + END;
    Lanes y = x < -end ? -end : x;
    y = y > end ? end : y;
    const Lanes square = y * y * (1.0f / (END * END));
    Lanes found = Lanes{} + 0.346322f;
    for (const float factor : factors) found = found * square + factor;
    return x * (found * y * SCALE + 0.5f);
}

inline Lanes exact_gelu(Lanes x) {
    float values[LANES];
    std::memcpy(values, &x, sizeof(x));
    for (int64_t i = 0; i < LANES; i++) values[i] = gelu(values[i]);
    return load_lanes(values);
}

// Activations in float32, for products by fused multiply-adds. The products of an element are added one after another, whatever the
// number of rows.
//
// A weight is in panels of 32 columns, [columns / 32][rows][32].
struct Plain {
    using State = float;
    float* data;
    int64_t size, stride;

    static Plain of(Arena& arena, int64_t rows, int64_t size) {
        // Rows that are read together must not lie a power of two apart: they would share a place in the first cache.
        const int64_t stride = size + LANES;
        return {arena.take<float>(rows * stride), size, stride};
    }

    Plain beside(Arena&) const { return *this; }

    void put(int64_t row, int64_t column, Lanes found) { store_lanes(data + row * stride + column, found); }

    void settle(int64_t) {}

    static Lanes activate(Lanes x) { return exact_gelu(x); }

    // As `Split`.
    template <typename End>
    void product(Tiles&, int64_t low, int64_t high, const void* weight, int64_t first, int64_t last, End&& end) const {
        const int64_t groups = (high - low + AT_ONCE - 1) / AT_ONCE;
        float found[AT_ONCE * BLOCK];
        for (int64_t column = first; column < last; column += BLOCK) {
            const float* panel = static_cast<const float*>(weight) + column * size;
            // About as many rows in each group.
            for (int64_t row = low, group = 0, count; group < groups; group++, row += count) {
                count = (high - row + groups - group - 1) / (groups - group);
                for (int64_t i = 0; i < BLOCK; i += WIDTH) sums<AT_ONCE>(found + i, row, count, panel + i, group, groups);
                for (int64_t r = 0; r < count; r++)
                    for (int64_t i = 0; i < BLOCK; i += LANES) end(row + r, column + i, load_lanes(found + r * BLOCK + i));
            }
        }
    }

private:
    // Rows, and vectors of columns, whose sums registers hold.
#ifdef __AVX512F__
    static constexpr int AT_ONCE = 8, VECTORS = 2;
#else
    static constexpr int AT_ONCE = 6, VECTORS = 1;
#endif
    static constexpr int64_t WIDTH = VECTORS * LANES, LINE = 64 / sizeof(float);

    // Of `count` rows from `row` on, at most ROWS: [count][32], of WIDTH columns of a panel.
    template <int ROWS>
    void sums(float* to, int64_t row, int64_t count, const float* panel, int64_t group, int64_t groups) const {
        if constexpr (ROWS > 1)
            if (count < ROWS) return sums<ROWS - 1>(to, row, count, panel, group, groups);
        // The first group waits for memory; that none of the others lets it rest, each asks for its part of the next panel.
        const int64_t share = whole((size * BLOCK + groups - 1) / groups, LINE), lines = (share / LINE + size - 1) / size;
        const float *x = data + row * stride, *ahead = panel + size * BLOCK + group * share;
        Lanes found[ROWS][VECTORS] = {};
        for (int64_t k = 0; k < size; k++) {
            for (int64_t line = 0; line < lines; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
            Lanes own[VECTORS];
            for (int v = 0; v < VECTORS; v++) own[v] = load_lanes(panel + k * BLOCK + v * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) found[r][v] += x[r * stride + k] * own[v];
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store_lanes(to + r * BLOCK + v * LANES, found[r][v]);
    }
};

// Activations as PARTS bfloat16 each, for products by tiles.
template <int PARTS>
struct Split {
    using State = std::conditional_t<PARTS == 1, bf16, float>;
    bf16* data;
    int64_t size, stride;

    static Split of(Arena& arena, int64_t rows, int64_t size) {
        return {arena.take<bf16>(PARTS * rows * size), size, rows * size};
    }

    // For a thread that puts a part of every row beside others, and then multiplies all of them.
    Split beside(Arena&) const { return *this; }

    void put(int64_t row, int64_t column, Lanes rest) {
        bf16* to = data + row * size + column;
        for (int part = 0; part < PARTS - 1; part++) {
            // Cut off, not rounded: the parts add up exactly.
            const WideLanes bits = reinterpret_cast<WideLanes>(rest);
            const HalfLanes first = __builtin_convertvector(bits >> 16, HalfLanes);
            std::memcpy(to + part * stride, &first, sizeof(first));
            rest -= reinterpret_cast<Lanes>(bits & 0xffff0000u);
        }
        store_lanes(to + (PARTS - 1) * stride, rest);
    }

    // Must be called for a row between its last `put` and its products.
    void settle(int64_t) {}

    static Lanes activate(Lanes x) { return PARTS == 1 ? short_gelu(x) : exact_gelu(x); }

    // `end(row, column, found)` with 16 columns at a time of the product of rows and of columns of a weight, from `first` up to
    // `last`, all multiples of 32 but `high`.
    template <typename End>
    void product(Tiles& tiles, int64_t low, int64_t high, const void* weight, int64_t first, int64_t last, End&& end) const {
        alignas(64) float found[BLOCK * BLOCK];
        const int64_t bytes = PARTS * BLOCK * size * 2, share = whole(bytes / std::max<int64_t>(1, (high - low + BLOCK - 1) / BLOCK), 64);
        for (int64_t column = first; column < last; column += BLOCK) {
            const char* own = static_cast<const char*>(weight) + column / BLOCK * bytes;
            const bf16* right = reinterpret_cast<const bf16*>(own);
            for (int64_t row = low; row < high; row += BLOCK) {
                const int64_t count = std::min(BLOCK, high - row);
                // The weights of all layers are too many for the second cache: what the next columns need is on its way in time.
                if (column + BLOCK < last) fetch_bytes(own + bytes, bytes, (row - low) / BLOCK * share, share);
                tiles.clear();
                tiles.add<PARTS>(data + row * size, size, stride, right, right + TILE * size, BLOCK * size, size / BLOCK, count > TILE);
                tiles.save(found, BLOCK, count > TILE);
                for (int64_t r = 0; r < count; r++)
                    for (int64_t i = 0; i < BLOCK; i += LANES) end(row + r, column + i, load_lanes(found + r * BLOCK + i));
            }
        }
    }

private:
    static void fetch_bytes(const char* from, int64_t bytes, int64_t first, int64_t count) {
        for (int64_t at = first; at < std::min(bytes, first + count); at += 64) __builtin_prefetch(from + at, 0, 2);
    }
};

// Activations of float32 as three signed bytes each, digits of a number of 24 bits, and a scale to each row. Sums of products of
// digits are exact, and eight of them give one of float32 to its last bits, relative to the row's largest (Ootomo, Ozaki and
// Yokota, arXiv 2306.11975); with six, errors were three times as large. Tiles multiply bytes twice as fast as bfloat16, and a
// weight, with a scale to each column, takes three bytes.
//
// A product of I inputs differs from one in float64 by at most I * X * W / 2^20, X and W being the largest of the row and of the
// column: x is rounded by up to X / 2^22 and w by W / 2^23, and what is left are three additions in float32. The largest of a row
// are as exact as in float32; small ones beside them are not. A row or column below 1e-30 counts as zeros, and X * W is meant to be
// 1e-28 at least. A row that is not finite gives NaN in all columns, where float32 may give infinity: the norm that follows makes
// NaN of it.
//
// A weight is in groups of 16 columns: of each group, the digits of 64 rows at a time, and [16] float32 scales.
struct Digits {
    using State = float;
    // The largest number; 8,355,711 would be the largest of three digits, which rounding must not exceed.
    static constexpr float MOST = 8355000.0f;
    // The largest element of a row whose elements all count as zero.
    static constexpr float LEAST = 1e-30f;
    float *values, *scales;
    int8_t* data;
    int64_t size, stride, part;

    static Digits of(Arena& arena, int64_t rows, int64_t size) {
        const int64_t stride = whole(size, ROW_BYTES);
        float *values = arena.take<float>(rows * size), *scales = arena.take<float>(rows);
        return {values, scales, arena.take<int8_t>(3 * rows * stride), size, stride, rows * stride};
    }

    // Each settles all rows: digits that another thread made come slower from its cache than they are made.
    Digits beside(Arena& arena) const {
        float* own = arena.take<float>(part / stride);
        return {values, own, arena.take<int8_t>(3 * part), size, stride, part};
    }

    void put(int64_t row, int64_t column, Lanes found) { store_lanes(values + row * size + column, found); }

    void settle(int64_t row) {
        const float* from = values + row * size;
        // Of magnitudes, as integers: what is not finite is the largest. Compilers take `x * 0.0f` for zero, and comparisons lose NaN.
        WideLanes tops = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const WideLanes bits = reinterpret_cast<WideLanes>(load_lanes(from + i)) & 0x7fffffffu;
            tops = bits > tops ? bits : tops;
        }
        uint32_t most = 0;
        for (int64_t i = 0; i < LANES; i++) most = std::max(most, tops[i]);
        float top;
        std::memcpy(&top, &most, sizeof(top));
        const bool finite = most < 0x7f800000u;
        const float factor = finite && top > LEAST ? MOST / top : 0.0f;
        scales[row] = finite ? top / MOST : std::numeric_limits<float>::quiet_NaN();
        int8_t* to = data + row * stride;
        for (int64_t i = 0; i < size; i += LANES) {
            const Lanes x = load_lanes(from + i) * factor;
            // Rounded to nearest. Digits of -128 to 127 are those of 0 to 255 of a number that is larger by 128 in each.
            const WideLanes half = (reinterpret_cast<WideLanes>(x) & 0x80000000u) | 0x3f000000u;
            const Integers number = __builtin_convertvector(x + reinterpret_cast<Lanes>(half), Integers) + 0x808080;
            for (int digit = 0; digit < 3; digit++) {
                const Bytes found = __builtin_convertvector((number >> (16 - 8 * digit)) ^ 0x80, Bytes);
                std::memcpy(to + digit * part + i, &found, sizeof(found));
            }
        }
        for (int digit = 0; digit < 3; digit++) std::memset(to + digit * part + size, 0, stride - size);
    }

    static Lanes activate(Lanes x) { return exact_gelu(x); }

    // As `Split`; what tiles have summed up is made float32 while they sum up the next.
    template <typename End>
    void product(Tiles& tiles, int64_t low, int64_t high, const void* weight, int64_t first, int64_t last, End&& end) const {
        const int64_t blocks = stride / ROW_BYTES, bytes = 3 * TILE * stride + TILE * 4;
        alignas(64) int32_t sums[4 * TILE * TILE];
        int64_t row = low, column = first, done = 0, count = 0;
        const float* scale = nullptr;
        const auto finish = [&](int64_t upto) {
            for (; done < std::min(upto, count); done++) {
                const int32_t* own = sums + done * TILE;
                const Lanes small = floats(own + 2 * TILE * TILE) + floats(own + 3 * TILE * TILE) * (1.0f / 256);
                const Lanes found = floats(own) * 65536.0f + (floats(own + TILE * TILE) * 256.0f + small);
                end(row + done, column, found * load_lanes(scale) * scales[row + done]);
            }
        };
        for (int64_t next = first; next < last; next += TILE) {
            const int8_t* right = static_cast<const int8_t*>(weight) + next / TILE * bytes;
            for (int64_t from = low; from < high; from += TILE) {
                tiles.clear();
                tiles.add_digits(data + from * stride, stride, part, right, blocks, [&](int64_t k) {
                    finish((k + 1) * TILE / blocks);
                });
                tiles.save_digits(sums);
                row = from, column = next, done = 0, count = std::min(TILE, high - from);
                scale = reinterpret_cast<const float*>(right + 3 * TILE * stride);
            }
        }
        finish(count);
    }

private:
    typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
    typedef int8_t Bytes __attribute__((vector_size(LANES)));

    static Lanes floats(const int32_t* from) {
        Integers found;
        std::memcpy(&found, from, sizeof(found));
        return __builtin_convertvector(found, Lanes);
    }
};

}  // namespace
