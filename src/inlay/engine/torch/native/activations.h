// What goes through the layers of an encoder, as products of 32 columns want it: bfloat16 by tiles, one or several to a float32,
// or float32 as it is.

#pragma once

#include <algorithm>
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

// Two groups of 16 columns of a weight.
template <typename T>
struct Columns {
    const T *first, *second;
    // Elements from one part to the next.
    int64_t part = 0;
};

// 16 columns of float32 as PARTS bfloat16 each, packed for tiles; parts are `stride` elements apart.
template <int PARTS>
void split(bf16* to, int64_t stride, const float* from, int64_t size) {
    constexpr uint32_t UPPER = 0xffff0000u;
    for (int64_t k = 0; k < size; k += 2) {
        Lanes one = load_lanes(from + k * TILE), two = load_lanes(from + (k + 1) * TILE);
        for (int part = 0; part < PARTS; part++) {
            WideLanes bits = reinterpret_cast<WideLanes>(one), bits2 = reinterpret_cast<WideLanes>(two);
            if (part == PARTS - 1) {
                bits += 0x7fffu + ((bits >> 16) & 1u);
                bits2 += 0x7fffu + ((bits2 >> 16) & 1u);
            }
            const WideLanes pairs = (bits >> 16) | (bits2 & UPPER);
            std::memcpy(to + part * stride + k * TILE, &pairs, sizeof(pairs));
            // Cut off, not rounded: the parts add up exactly.
            one -= reinterpret_cast<Lanes>(bits & UPPER);
            two -= reinterpret_cast<Lanes>(bits2 & UPPER);
        }
    }
}

// Activations as PARTS bfloat16 each, for products by tiles.
template <int PARTS>
struct Split {
    using State = std::conditional_t<PARTS == 1, bf16, float>;
    using Weight = State;
    bf16* data;
    int64_t size, stride;

    static Split of(Arena& arena, int64_t rows, int64_t size) {
        return {arena.take<bf16>(PARTS * rows * size), size, rows * size};
    }

    // Whether products bring what follows their columns nearer.
    static constexpr bool FETCHES = false;

    // Bytes that `ready` needs for a weight of `size` rows.
    static int64_t ready_bytes(int64_t size) { return PARTS == 1 ? 0 : PARTS * BLOCK * size * 2; }

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

    static Lanes activate(Lanes x) { return PARTS == 1 ? short_gelu(x) : exact_gelu(x); }

    // 32 columns of a weight, as products want them.
    Columns<bf16> ready(const Weight* weight, char* scratch) const {
        if constexpr (PARTS == 1) {
            return {weight, weight + TILE * size};
        } else {
            bf16* to = reinterpret_cast<bf16*>(scratch);
            split<PARTS>(to, BLOCK * size, weight, size);
            split<PARTS>(to + TILE * size, BLOCK * size, weight + TILE * size, size);
            return {to, to + TILE * size, BLOCK * size};
        }
    }

    // [count][32] of the product, from a row on.
    void product(Tiles& tiles, int64_t row, int64_t count, const Columns<bf16>& right, float* out) const {
        const bool both = count > TILE;
        tiles.clear();
        tiles.add<PARTS>(data + row * size, size, stride, right.first, right.second, right.part, size / BLOCK, both);
        tiles.save(out, BLOCK, both);
    }
};

// Activations as they are, in float32.
struct Plain {
    using State = float;
    using Weight = float;
    float* data;
    int64_t size;

    static Plain of(Arena& arena, int64_t rows, int64_t size) { return {arena.take<float>(rows * size), size}; }

    static constexpr bool FETCHES = true;

    static int64_t ready_bytes(int64_t) { return 0; }

    void put(int64_t row, int64_t column, Lanes values) { store_lanes(data + row * size + column, values); }

    static Lanes activate(Lanes x) { return exact_gelu(x); }

    Columns<float> ready(const Weight* weight, char*) const { return {weight, weight + TILE * size}; }

    void product(Tiles&, int64_t row, int64_t count, const Columns<float>& right, float* out) const {
        // So many sums stay in registers.
        constexpr int64_t MOST = 12;
        const int64_t blocks = (count + MOST - 1) / MOST, each = (count + blocks - 1) / blocks;
        // The next columns come in a little at a step: all at once, they would hold up what is read meanwhile.
        const int64_t bytes = 2 * TILE * sizeof(float), step = bytes / blocks;
        const char* next = reinterpret_cast<const char*>(right.first) + bytes * size;
        for (int64_t first = 0; first < count; first += each, next += step * size)
            some<MOST>(std::min(each, count - first), data + (row + first) * size, right, next, step, out + first * BLOCK);
    }

private:
    template <int ROWS>
    void some(int64_t rows, const float* left, const Columns<float>& right, const char* next, int64_t step, float* out) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return some<ROWS - 1>(rows, left, right, next, step, out);
        Lanes found[ROWS][2] = {};
        for (int64_t k = 0; k < size; k++) {
            __builtin_prefetch(next + k * step, 0, 2);
            const Lanes one = load_lanes(right.first + k * TILE), two = load_lanes(right.second + k * TILE);
            for (int row = 0; row < ROWS; row++) {
                found[row][0] += left[row * size + k] * one;
                found[row][1] += left[row * size + k] * two;
            }
        }
        for (int row = 0; row < ROWS; row++) std::memcpy(out + row * BLOCK, found[row], sizeof(found[row]));
    }
};

}  // namespace
