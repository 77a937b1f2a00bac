// Numbers and vectors of them, for all kernels.
//
// Written so that a compiler vectorises it for whatever CPU it is compiled on: no intrinsics. Accumulation is in float32.
// NaN and infinity must come out where they go in, for the engines drop what a non-finite result touched: hence no
// -ffinite-math-only, and comparisons that let NaN through.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float* to, float value) { *to = value; }

// Round to nearest, ties to even; NaN stays NaN.
inline void store(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to->bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// Sixteen at a time, by the compilers' own vector types: any CPU they know, no intrinsics.
constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t WideLanes __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t HalfLanes __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Lanes load_lanes(const float* from) {
    Lanes found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

inline Lanes load_lanes(const bf16* from) {
    HalfLanes bits;
    std::memcpy(&bits, from, sizeof(bits));
    return reinterpret_cast<Lanes>(__builtin_convertvector(bits, WideLanes) << 16);
}

// Compilers of before 2022 do not have it in C++.
#ifdef __FLT16_MAX__
typedef _Float16 fp16;
typedef fp16 Fp16Lanes __attribute__((vector_size(LANES * sizeof(fp16))));

inline float load(fp16 x) { return static_cast<float>(x); }

inline void store(fp16* to, float value) { *to = static_cast<fp16>(value); }

inline Lanes load_lanes(const fp16* from) {
    Fp16Lanes found;
    std::memcpy(&found, from, sizeof(found));
    return __builtin_convertvector(found, Lanes);
}
#endif

typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));
typedef float Quarter __attribute__((vector_size(LANES / 4 * sizeof(float))));

// By halves: compilers add lanes one after another where they are told to.
inline float sum_lanes(Lanes x) {
    Half eight[2];
    std::memcpy(eight, &x, sizeof(x));
    eight[0] += eight[1];
    Quarter four[2];
    std::memcpy(four, eight, sizeof(four));
    four[0] += four[1];
    return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

// exp for x <= 88, from Cephes' expf: range reduction by ln 2 and a polynomial of degree 5.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    // fma: a compiler that may reorder sums would fold the two steps into one.
    float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

}  // namespace
