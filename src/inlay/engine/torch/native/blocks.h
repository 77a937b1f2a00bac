// Weights in the blocks of GGUF files: how they lie there, and how they are laid out for products in integers.
//
// Of input i: w = scale * (code - OFFSET) - min, where scale and min are shared by 32 inputs (in Q6_K the scale by 16) and exact in
// float32. Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and `tensors/blocks.py`.
//
// A panel is 16 outputs. First come the codes of all panels, then the scales of all: each is one run through memory, which a CPU
// that reads ahead by itself keeps up with. Codes of 32 inputs are lines of 64 bytes, in which byte 4 o + i is of output o and of
// input i of four: low nibbles of a line have four inputs, high ones the next four; before them a line with the fifth bits of all 32,
// or with the fifth and sixth of 16; codes of eight bits have a line for every four inputs. A unit of scales (32 inputs, or 256 in
// types with scales of scales): float16 [16] (MXFP4: bfloat16), the same of mins; then, of scales of scales, int8 [8 or 16][16], and
// those of mins [8][16].

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "tiles.h"

namespace {

// As numbered in files.
enum Type : int32_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };

// Outputs of a panel; bytes of one of its lines. BLOCK inputs share a scale of x.
constexpr int64_t PANEL = 16, LINE = 64;

// Values of codes of four bits, and 128.
constexpr uint8_t NON_LINEAR[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FLOATS_OF_4_BITS[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

// BITS of a code, bytes of a block of INPUTS in a file, inputs that share an integer of the scale (0: there is none).
template <int BITS_, int64_t FILE_, int64_t INPUTS_, int OFFSET_, bool MINS_, int64_t SHARED_ = 0>
struct Layout {
    static constexpr int BITS = BITS_, OFFSET = OFFSET_;
    static constexpr int64_t FILE = FILE_, INPUTS = INPUTS_, SHARED = SHARED_;
    static constexpr bool MINS = MINS_, BRAIN = false;
    static constexpr const uint8_t* TABLE = nullptr;
    static constexpr int64_t CODES = LINE * BITS_, BLOCKS = INPUTS_ / BLOCK;
    static constexpr int64_t SCALES = PANEL * (2 + 2 * MINS_ + (SHARED_ ? INPUTS_ / SHARED_ + MINS_ * BLOCKS : 0));
    // Where a unit has its mins, the scales of scales, and those of mins.
    static constexpr int64_t MIN = 2 * PANEL, FINE = MIN + 2 * MINS_ * PANEL, FINE_MIN = FINE + (SHARED_ ? PANEL * INPUTS_ / SHARED_ : 0);
};

template <int TYPE>
struct Format;
template <> struct Format<Q4_0> : Layout<4, 18, 32, 8, false> {};
template <> struct Format<Q4_1> : Layout<4, 20, 32, 0, true> {};
template <> struct Format<Q5_0> : Layout<5, 22, 32, 16, false> {};
template <> struct Format<Q5_1> : Layout<5, 24, 32, 0, true> {};
template <> struct Format<Q8_0> : Layout<8, 34, 32, 128, false> {};
template <> struct Format<Q4_K> : Layout<4, 144, 256, 0, true, 32> {};
template <> struct Format<Q5_K> : Layout<5, 176, 256, 0, true, 32> {};
template <> struct Format<Q6_K> : Layout<6, 210, 256, 32, false, 16> {};
template <> struct Format<IQ4_NL> : Layout<4, 18, 32, 128, false> { static constexpr const uint8_t* TABLE = NON_LINEAR; };
template <> struct Format<IQ4_XS> : Layout<4, 136, 256, 128, false, 32> { static constexpr const uint8_t* TABLE = NON_LINEAR; };
template <> struct Format<MXFP4> : Layout<4, 17, 32, 128, false> {
    static constexpr const uint8_t* TABLE = FLOATS_OF_4_BITS;
    static constexpr bool BRAIN = true;
};

// Calls `use` with the type as a constant; false if there is no such type.
template <typename Use>
bool with_type(int32_t type, Use&& use) {
    switch (type) {
#define INLAY_TYPE(name) case name: use(std::integral_constant<int, name>()); return true;
        INLAY_TYPE(Q4_0) INLAY_TYPE(Q4_1) INLAY_TYPE(Q5_0) INLAY_TYPE(Q5_1) INLAY_TYPE(Q8_0) INLAY_TYPE(Q4_K)
        INLAY_TYPE(Q5_K) INLAY_TYPE(Q6_K) INLAY_TYPE(IQ4_NL) INLAY_TYPE(IQ4_XS) INLAY_TYPE(MXFP4)
#undef INLAY_TYPE
    }
    return false;
}

// What a line of 32 inputs has: `count` bits, from bit `first` on, of the codes of `steps` steps of four inputs.
struct Line {
    int step, steps, first, count;
};

// Lines lie in the order in which products read them.
template <int BITS>
constexpr Line line_at(int at) {
    if (BITS == 8) return {at, 1, 0, 8};
    if (BITS == 5) return at ? Line{2 * at - 2, 2, 0, 4} : Line{0, 8, 4, 1};
    if (BITS == 6) return at % 3 ? Line{at / 3 * 4 + at % 3 * 2 - 2, 2, 0, 4} : Line{at / 3 * 4, 4, 4, 2};
    return {2 * at, 2, 0, 4};
}

// The lines that have the low bits of a step, and the high ones.
template <int BITS>
constexpr int low_line(int step) {
    return BITS == 8 ? step : BITS == 6 ? step / 4 * 3 + 1 + step / 2 % 2 : step / 2 + (BITS == 5);
}
template <int BITS>
constexpr int high_line(int step) {
    return BITS == 6 ? step / 4 * 3 : 0;
}

// Bytes of a matrix.
template <int TYPE>
constexpr int64_t panels_bytes(int64_t outputs, int64_t inputs) {
    using F = Format<TYPE>;
    return (outputs + PANEL - 1) / PANEL * (inputs / BLOCK * F::CODES + inputs / F::INPUTS * F::SCALES);
}

// Where a matrix has its scales.
template <typename F, typename Byte>
constexpr Byte* scales_of(Byte* panels, int64_t outputs, int64_t inputs) {
    return panels + (outputs + PANEL - 1) / PANEL * (inputs / BLOCK * F::CODES);
}

// As vectors: compilers make none of loops over bytes that are so short.
typedef uint8_t Sixteen __attribute__((vector_size(16)));

// A block of a file: codes by input, and what its scales are made of.
struct Unpacked {
    Sixteen codes[16];
    int8_t fine[16];
    uint8_t fine_mins[8];
    uint16_t scale, min;
};

inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return bits;
}

inline Sixteen sixteen_at(const uint8_t* from) {
    Sixteen found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

// Bytes have the first `count` times sixteen inputs in low nibbles, and as many more in high ones.
inline void nibbles(Sixteen* to, const uint8_t* from, int count) {
    for (int i = 0; i < count; i++) {
        const Sixteen own = sixteen_at(from + 16 * i);
        to[i] = own & 15, to[count + i] = own >> 4;
    }
}

template <int TYPE>
void unpack(const uint8_t* from, Unpacked& to) {
    using F = Format<TYPE>;
    constexpr bool OF_SCALES = TYPE == Q4_K || TYPE == Q5_K;
    if constexpr (OF_SCALES) {
        to.scale = half_at(from), to.min = half_at(from + 2);
        // Four at a time: six bits of four scales, and of four mins; four bits of four more of each, whose other two follow those six.
        uint32_t own[3];
        std::memcpy(own, from + 4, sizeof(own));
        const uint32_t fine[2] = {own[0] & 0x3f3f3f3f, (own[2] & 0x0f0f0f0f) | (own[0] >> 2 & 0x30303030)};
        const uint32_t mins[2] = {own[1] & 0x3f3f3f3f, (own[2] >> 4 & 0x0f0f0f0f) | (own[1] >> 2 & 0x30303030)};
        std::memcpy(to.fine, fine, sizeof(fine)), std::memcpy(to.fine_mins, mins, sizeof(mins));
        for (int c = 0; c < 4; c++) nibbles(to.codes + 4 * c, from + F::FILE - 128 + 32 * c, 2);
        if constexpr (TYPE == Q5_K)
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) to.codes[i] |= (sixteen_at(from + 16 + i % 2 * 16) >> (i / 2) & 1) << 4;
    } else if constexpr (TYPE == Q6_K) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const int half = i / 8, quarter = i % 8 / 2, place = i % 2 * 16;
            const Sixteen low = sixteen_at(from + half * 64 + quarter % 2 * 32 + place), high = sixteen_at(from + 128 + half * 32 + place);
            to.codes[i] = (low >> (quarter / 2 * 4) & 15) | (high >> (2 * quarter) & 3) << 4;
        }
        std::memcpy(to.fine, from + 192, 16);
        to.scale = half_at(from + 208);
    } else if constexpr (TYPE == IQ4_XS) {
        to.scale = half_at(from);
        const int high = half_at(from + 2);
        for (int j = 0; j < 8; j++) {
            to.fine[j] = static_cast<int8_t>(((from[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4) - 32);
            nibbles(to.codes + 2 * j, from + 8 + 16 * j, 1);
        }
    } else if constexpr (TYPE == MXFP4) {
        // The higher half of 2 ** (exponent - 128) in float32.
        to.scale = from[0] < 2 ? 0x20 << from[0] : (from[0] - 1) << 7;
        nibbles(to.codes, from + 1, 1);
    } else {
        to.scale = half_at(from);
        // The sum, not the difference.
        if (F::MINS) to.min = half_at(from + 2) ^ 0x8000;
        if constexpr (TYPE == Q8_0) {
            for (int i = 0; i < 2; i++) to.codes[i] = sixteen_at(from + 2 + 16 * i) ^ 0x80;
        } else {
            nibbles(to.codes, from + F::FILE - 16, 1);
            if constexpr (F::BITS == 5) {
                // A byte of them beside each of its bits.
                const __m128i places = _mm_set_epi64x(0x0101010101010101, 0);
                constexpr Sixteen BITS = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
                uint32_t high;
                std::memcpy(&high, from + F::FILE - 20, sizeof(high));
                for (int i = 0; i < 2; i++) {
                    const auto own = reinterpret_cast<Sixteen>(_mm_shuffle_epi8(_mm_set1_epi32(high >> (16 * i)), places));
                    to.codes[i] |= reinterpret_cast<Sixteen>((own & BITS) != 0) & 16;
                }
            }
        }
    }
}

// Where a panel has the codes, and the scales, of a block of each of its outputs.
template <typename Byte>
struct Place {
    Byte *lines, *scales;

    // `unit`: which block of the outputs it is.
    template <typename F>
    static Place of(Byte* panels, int64_t outputs, int64_t inputs, int64_t panel, int64_t unit) {
        const int64_t at = panel * (inputs / F::INPUTS) + unit;
        return {panels + at * F::BLOCKS * F::CODES, scales_of<F>(panels, outputs, inputs) + at * F::SCALES};
    }

    // Calls with what is there of the scales of an output, and what it is of the block.
    template <typename F, typename Block, typename Use>
    void each_scale(int64_t output, Block& block, Use&& use) const {
        use(scales + output * 2, block.scale);
        if constexpr (F::MINS) use(scales + F::MIN + output * 2, block.min);
        if constexpr (F::SHARED != 0) {
            for (int64_t j = 0; j < F::INPUTS / F::SHARED; j++) use(scales + F::FINE + j * PANEL + output, block.fine[j]);
            if constexpr (F::MINS)
                for (int64_t j = 0; j < F::BLOCKS; j++) use(scales + F::FINE_MIN + j * PANEL + output, block.fine_mins[j]);
        }
    }
};

// Codes of four outputs, and of four more.
typedef uint32_t Eight __attribute__((vector_size(32)));

// Of eight blocks, sixteen codes: four inputs after four.
inline void turn(const Unpacked* blocks, int64_t sixteen, Eight* to) {
    __m256i x[4];
    for (int i = 0; i < 4; i++) {
        const Sixteen* own[2] = {blocks[i].codes + sixteen, blocks[4 + i].codes + sixteen};
        x[i] = _mm256_set_m128i(reinterpret_cast<__m128i>(*own[1]), reinterpret_cast<__m128i>(*own[0]));
    }
    for (int i = 0; i < 2; i++) {
        const __m256i one = i ? _mm256_unpackhi_epi32(x[0], x[1]) : _mm256_unpacklo_epi32(x[0], x[1]);
        const __m256i two = i ? _mm256_unpackhi_epi32(x[2], x[3]) : _mm256_unpacklo_epi32(x[2], x[3]);
        to[2 * i] = reinterpret_cast<Eight>(_mm256_unpacklo_epi64(one, two));
        to[2 * i + 1] = reinterpret_cast<Eight>(_mm256_unpackhi_epi64(one, two));
    }
}

// Puts a block of each output of a panel there.
template <int TYPE>
void put(Place<uint8_t> place, const Unpacked* blocks) {
    using F = Format<TYPE>;
#pragma GCC unroll 1
    for (int64_t b = 0; b < F::BLOCKS; b++) {
        for (int64_t o = 0; o < PANEL; o += 8) {
            Eight fours[8];
            for (int half = 0; half < 2; half++) turn(blocks + o, 2 * b + half, fours + 4 * half);
#pragma GCC unroll 8
            for (int at = 0; at < F::BITS; at++) {
                const Line line = line_at<F::BITS>(at);
                const uint32_t mask = ((1u << line.count) - 1) * 0x01010101u;
                Eight found{};
#pragma GCC unroll 8
                for (int i = 0; i < line.steps; i++) found |= (fours[line.step + i] >> line.first & mask) << (i * line.count);
                std::memcpy(place.lines + b * F::CODES + at * LINE + o * 4, &found, sizeof(found));
            }
        }
    }
    for (int64_t o = 0; o < PANEL; o++)
        place.each_scale<F>(o, blocks[o], [](uint8_t* there, const auto& own) { std::memcpy(there, &own, sizeof(own)); });
}

// Takes the block of an output from there.
template <int TYPE>
void take(const Place<const uint8_t>& place, int64_t output, Unpacked& block) {
    using F = Format<TYPE>;
    for (int64_t b = 0; b < F::BLOCKS; b++) {
        uint32_t fours[8] = {};
        for (int at = 0; at < F::BITS; at++) {
            const Line line = line_at<F::BITS>(at);
            const uint32_t mask = ((1u << line.count) - 1) * 0x01010101u;
            uint32_t found;
            std::memcpy(&found, place.lines + b * F::CODES + at * LINE + output * 4, sizeof(found));
            for (int i = 0; i < line.steps; i++) fours[line.step + i] |= (found >> (i * line.count) & mask) << line.first;
        }
        std::memcpy(block.codes + 2 * b, fours, sizeof(fours));
    }
    place.each_scale<F>(output, block, [](const uint8_t* there, auto& own) { std::memcpy(&own, there, sizeof(own)); });
}

template <int TYPE>
inline float wide(uint16_t bits) {
    return Format<TYPE>::BRAIN ? load(bf16{bits}) : _cvtsh_ss(bits);
}

// Whether a block gives numbers.
template <int TYPE>
bool is_finite(const Unpacked& block) {
    constexpr uint16_t ALL = Format<TYPE>::BRAIN ? 0x7f80 : 0x7c00;
    return (block.scale & ALL) != ALL && (!Format<TYPE>::MINS || (block.min & ALL) != ALL);
}

// The numbers that a block stands for, each rounded once.
template <int TYPE>
void dequantise(const Unpacked& block, float* to) {
    using F = Format<TYPE>;
    constexpr int64_t SHARED = F::SHARED ? F::SHARED : BLOCK;
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes);
    for (int64_t first = 0; first < F::INPUTS; first += SHARED) {
        float scale = wide<TYPE>(block.scale), min = F::MINS ? wide<TYPE>(block.min) : 0.0f;
        if constexpr (F::SHARED != 0) {
            scale *= block.fine[first / SHARED];
            if (F::MINS) min *= block.fine_mins[first / BLOCK];
        }
        for (int64_t i = first; i < first + SHARED; i++) {
            int code = codes[i];
            if constexpr (F::TABLE != nullptr) code = F::TABLE[code];
            const float product = scale * static_cast<float>(code - F::OFFSET);
            to[i] = F::MINS ? product - min : product;
        }
    }
}

}  // namespace
