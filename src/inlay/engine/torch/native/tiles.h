// Products of tiles: of bfloat16, blocks of 32 rows and 32 columns; of signed bytes, of 16 and 16. By AMX where the compiler
// knows it, else by loops that give the same.
//
// Intrinsics, against the rule of the other kernels: no compiler finds these instructions by itself, and they are ten times
// as fast as what it finds.
//
// The left operand is row-major. The right one is packed: columns in groups of 16, of each group blocks of 32 elements of every
// column, of each block 16 rows of [16 columns][2]: two elements that follow each other in a column. Bytes are packed in blocks of
// 64 and four at a time.

#pragma once

#include "lanes.h"

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// Both, which no CPU has apart.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t TILE = 16, BLOCK = 2 * TILE;
// Bytes of a tile and of one of its rows.
constexpr int64_t TILE_BYTES = 1024, ROW_BYTES = 64;

// Rounded to nearest, ties to even; NaN stays NaN.
inline void store_lanes(bf16* to, Lanes values) {
#ifdef __AVX512BF16__
    const __m256bh found = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
    std::memcpy(to, &found, sizeof(found));
#else
    for (int64_t i = 0; i < LANES; i++) store(to + i, values[i]);
#endif
}

inline void store_lanes(float* to, Lanes values) { std::memcpy(to, &values, sizeof(values)); }

// What is done beside products where nothing is.
struct Nothing {
    void operator()() const {}
};

#ifdef TILES

constexpr bool TILES_COMPILED = true;

// Whether the kernel lets this process use tiles: it is asked once, for their state is large.
inline bool tiles_granted() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

// The tile registers of this thread while it lives: 0 to 3 are sums, 4 and 5 the left operand, 6 and 7 the right one; of digits,
// 4 to 6 and 7.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t shape[64] = {1};
        for (int tile = 0; tile < 8; tile++) {
            const uint16_t bytes = ROW_BYTES;
            std::memcpy(shape + 16 + 2 * tile, &bytes, 2);
            shape[48 + tile] = TILE;
        }
        // The intrinsics do not tell the compiler that they read memory.
        __asm__ volatile("" ::"r"(shape) : "memory");
        _tile_loadconfig(shape);
    }
    ~Tiles() { _tile_release(); }

    void clear() {
        __asm__ volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    // Takes up sums that `save` wrote.
    void open(const float* from, int64_t columns, bool both) {
        const int64_t step = columns * 4;
        __asm__ volatile("" ::: "memory");
        _tile_loadd(0, from, step);
        _tile_loadd(1, from + TILE, step);
        if (both) {
            _tile_loadd(2, from + TILE * columns, step);
            _tile_loadd(3, from + TILE * columns + TILE, step);
        }
    }

    void left(const char* from, int64_t stride, bool both) {
        _tile_loadd(4, from, stride);
        if (both) _tile_loadd(5, from + TILE * stride, stride);
    }

    void right(const char* from, const char* from2) {
        _tile_loadd(6, from, ROW_BYTES);
        _tile_loadd(7, from2, ROW_BYTES);
    }

    void multiply(bool both) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    // Adds the product of `blocks` blocks of bfloat16; without `both`, of the first 16 rows only. Of operands in PARTS, which
    // lie `part` and `right_part` elements apart, those products are added that are not less than a float32's last bit. `beside` is
    // called once for every block: vectors are computed while tiles multiply.
    template <int PARTS = 1, typename Beside = Nothing>
    void add(
        const bf16* left_rows, int64_t stride, int64_t part, const bf16* b, const bf16* b2, int64_t right_part, int64_t blocks, bool both,
        Beside beside = {}) {
        const char* a = reinterpret_cast<const char*>(left_rows);
        const auto load_left = [&](int64_t k, int p) { left(a + k * ROW_BYTES + p * part * 2, stride * 2, both); };
        const auto load_right = [&](int64_t k, int p) {
            const int64_t at = k * (TILE_BYTES / 2) + p * right_part;
            right(reinterpret_cast<const char*>(b + at), reinterpret_cast<const char*>(b2 + at));
        };
        for (int64_t k = 0; k < blocks; k++) {
            // In an order that loads a tile again as seldom as may be.
            load_right(k, 0);
            load_left(k, 0);
            multiply(both);
            beside();
            if (PARTS > 2) {
                load_left(k, 2);
                multiply(both);
            }
            if (PARTS > 1) {
                load_left(k, 1);
                multiply(both);
                load_right(k, 1);
                if (PARTS > 2) multiply(both);
                load_left(k, 0);
                multiply(both);
            }
            if (PARTS > 2) {
                load_right(k, 2);
                multiply(both);
            }
        }
    }

    // Adds the products of 16 rows and 16 columns of numbers of three signed digits, the largest first: all but the product of the
    // two last. Of the left operand, a row's next digits lie `part` bytes apart; of the right one, tiles of a
    // block's digits follow each other. `beside` is called with every block's number.
    template <typename Beside>
    void add_digits(const int8_t* a, int64_t stride, int64_t part, const int8_t* b, int64_t blocks, Beside&& beside) {
        for (int64_t k = 0; k < blocks; k++, a += ROW_BYTES, b += 3 * TILE_BYTES) {
            _tile_loadd(7, b, ROW_BYTES);
            _tile_loadd(4, a, stride);
            _tile_loadd(5, a + part, stride);
            _tile_loadd(6, a + 2 * part, stride);
            // In an order in which few wait for the sum before.
            _tile_dpbssd(2, 6, 7);
            _tile_dpbssd(1, 5, 7);
            _tile_dpbssd(0, 4, 7);
            _tile_loadd(7, b + TILE_BYTES, ROW_BYTES);
            _tile_dpbssd(2, 5, 7);
            _tile_dpbssd(3, 6, 7);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(7, b + 2 * TILE_BYTES, ROW_BYTES);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
            beside(k);
        }
    }

    // Writes the sums of digits, [4][16][16]: each weighs 256 times the next.
    void save_digits(int32_t* to) const {
        _tile_stored(0, to, ROW_BYTES);
        _tile_stored(1, to + TILE * TILE, ROW_BYTES);
        _tile_stored(2, to + 2 * TILE * TILE, ROW_BYTES);
        _tile_stored(3, to + 3 * TILE * TILE, ROW_BYTES);
    }

    // Writes the sums, 32 or 16 rows of 32, to rows of `columns`.
    void save(float* to, int64_t columns, bool both) const {
        const int64_t step = columns * 4;
        _tile_stored(0, to, step);
        _tile_stored(1, to + TILE, step);
        if (both) {
            _tile_stored(2, to + TILE * columns, step);
            _tile_stored(3, to + TILE * columns + TILE, step);
        }
    }
};

#else

constexpr bool TILES_COMPILED = false;

inline bool tiles_granted() { return false; }

struct Tiles {
    union {
        alignas(64) float sums[BLOCK * BLOCK];
        alignas(64) int32_t digits[4][TILE][TILE];
    };

    void clear() { std::memset(sums, 0, sizeof(sums)); }

    void open(const float* from, int64_t columns, bool both) {
        for (int64_t row = 0; row < (both ? BLOCK : TILE); row++) std::memcpy(sums + row * BLOCK, from + row * columns, BLOCK * 4);
    }

    static void add_half(float* to, const bf16* left, int64_t stride, const bf16* right, int64_t blocks, int64_t rows) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < blocks * BLOCK; k++) {
                const float x = load(left[row * stride + k]);
                const bf16* pairs = right + k / 2 * BLOCK + k % 2;
                for (int64_t column = 0; column < TILE; column++) to[row * BLOCK + column] += x * load(pairs[2 * column]);
            }
    }

    template <int PARTS = 1, typename Beside = Nothing>
    void add(
        const bf16* left, int64_t stride, int64_t part, const bf16* b, const bf16* b2, int64_t right_part, int64_t blocks, bool both,
        Beside beside = {}) {
        for (int p = 0; p < PARTS; p++)
            for (int q = 0; p + q < PARTS; q++) {
                add_half(sums, left + p * part, stride, b + q * right_part, blocks, both ? BLOCK : TILE);
                add_half(sums + TILE, left + p * part, stride, b2 + q * right_part, blocks, both ? BLOCK : TILE);
            }
    }

    template <typename Beside>
    void add_digits(const int8_t* a, int64_t stride, int64_t part, const int8_t* b, int64_t blocks, Beside&& beside) {
        for (int64_t k = 0; k < blocks; k++) beside(k);
        for (int p = 0; p < 3; p++)
            for (int q = 0; q < 3 && p + q < 4; q++)
                for (int64_t row = 0; row < TILE; row++)
                    for (int64_t k = 0; k < blocks * ROW_BYTES; k++) {
                        const int8_t* fours = b + (3 * (k / ROW_BYTES) + q) * TILE_BYTES + k % ROW_BYTES / 4 * ROW_BYTES + k % 4;
                        for (int64_t column = 0; column < TILE; column++)
                            digits[p + q][row][column] += a[p * part + row * stride + k] * fours[4 * column];
                    }
    }

    void save_digits(int32_t* to) const { std::memcpy(to, digits, sizeof(digits)); }

    void save(float* to, int64_t columns, bool both) const {
        for (int64_t row = 0; row < (both ? BLOCK : TILE); row++) std::memcpy(to + row * columns, sums + row * BLOCK, BLOCK * 4);
    }
};

#endif

}  // namespace
