// Vectors of bytes, of integers of 32 bits, and of float32, for products in integers: of AVX512, or of AVX2, with or without the
// instruction that adds products of bytes (VNNI). What each gives is the same to the bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "lanes.h"

namespace {

#if defined(__AVX512BW__) && defined(__AVX512VL__)

using Ints = __m512i;
using Floats = __m512;

// Outputs of a vector; rows of x that products take together: as many as registers hold the sums of.
constexpr int64_t OUTPUTS = 16, AT_ONCE = 8;

inline Ints load_ints(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Ints load_table(const uint8_t* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints look_up(Ints table, Ints places) { return _mm512_shuffle_epi8(table, places); }
inline Ints both(Ints x, char mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
// x, and the bits of y in a mask of bytes.
inline Ints with_bits(Ints x, Ints y, char mask) { return _mm512_ternarylogic_epi32(x, y, _mm512_set1_epi8(mask), 0xf8); }
// Of 16 bits: what crosses bytes is masked.
inline Ints left(Ints x, int bits) { return _mm512_slli_epi16(x, bits); }
inline Ints right(Ints x, int bits) { return _mm512_srli_epi16(x, bits); }
inline Ints times_power(Ints x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Ints add(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
inline Ints multiply(Ints x, Ints y) { return _mm512_mullo_epi32(x, y); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints bytes_at(const uint8_t* from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
inline Floats add_product(Floats x, Floats y, Floats to) { return _mm512_fmadd_ps(x, y, to); }
inline Floats subtract_product(Floats x, Floats y, Floats from) { return _mm512_fnmadd_ps(x, y, from); }
inline Floats halves_of(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Floats brains(const uint8_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }

inline uint32_t largest(WideLanes x) { return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(x)); }

// To the nearest byte, halves to even; returns their sum.
inline int32_t nearest(int8_t* to, Lanes x) {
    const __m512i found = _mm512_cvtps_epi32(reinterpret_cast<__m512>(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(found));
    return _mm512_reduce_add_epi32(found);
}

#ifdef __AVX512VNNI__
#define INLAY_ADD_BYTES(sums, unsigned_, signed_) _mm512_dpbusd_epi32(sums, unsigned_, signed_)
#else
inline Ints add_bytes(Ints sums, Ints x, Ints y) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(x, y), _mm512_set1_epi16(1)));
}
inline Ints magnitudes(Ints x) { return _mm512_abs_epi8(x); }
inline Ints signed_as(Ints x, Ints signs) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), x);
}
inline Ints less_128(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
#endif

#else

using Ints = __m256i;
using Floats = __m256;

constexpr int64_t OUTPUTS = 8, AT_ONCE = 4;

inline Ints load_ints(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Ints load_table(const uint8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints look_up(Ints table, Ints places) { return _mm256_shuffle_epi8(table, places); }
inline Ints both(Ints x, char mask) { return _mm256_and_si256(x, _mm256_set1_epi8(mask)); }
inline Ints with_bits(Ints x, Ints y, char mask) { return _mm256_or_si256(x, both(y, mask)); }
inline Ints left(Ints x, int bits) { return _mm256_slli_epi16(x, bits); }
inline Ints right(Ints x, int bits) { return _mm256_srli_epi16(x, bits); }
inline Ints times_power(Ints x, int bits) { return _mm256_slli_epi32(x, bits); }
inline Ints add(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
inline Ints multiply(Ints x, Ints y) { return _mm256_mullo_epi32(x, y); }
inline Ints all(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints bytes_at(const uint8_t* from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))); }
inline Floats floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
inline Floats add_product(Floats x, Floats y, Floats to) { return _mm256_fmadd_ps(x, y, to); }
inline Floats subtract_product(Floats x, Floats y, Floats from) { return _mm256_fnmadd_ps(x, y, from); }
inline Floats halves_of(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline Floats brains(const uint8_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline void store_floats(float* to, Floats x) { _mm256_storeu_ps(to, x); }

inline uint32_t largest(WideLanes x) {
    uint32_t found = 0;
    for (int64_t i = 0; i < LANES; i++) found = std::max(found, x[i]);
    return found;
}

inline int32_t nearest(int8_t* to, Lanes x) {
    __m256 parts[2];
    std::memcpy(static_cast<void*>(parts), &x, sizeof(x));
    int32_t found[16], sum = 0;
    for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(found + 8 * i), _mm256_cvtps_epi32(parts[i]));
    for (int i = 0; i < 16; i++) sum += found[i], to[i] = static_cast<int8_t>(found[i]);
    return sum;
}

#ifdef __AVXVNNI__
#define INLAY_ADD_BYTES(sums, unsigned_, signed_) _mm256_dpbusd_avx_epi32(sums, unsigned_, signed_)
#else
inline Ints add_bytes(Ints sums, Ints x, Ints y) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
inline Ints magnitudes(Ints x) { return _mm256_abs_epi8(x); }
inline Ints signed_as(Ints x, Ints signs) { return _mm256_sign_epi8(x, signs); }
inline Ints less_128(Ints x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
#endif

#endif

#ifdef INLAY_ADD_BYTES

// Whether sums begin with what codes above their values add; or codes are brought to their values.
template <int BITS, bool TABLE>
constexpr bool START_AT_OFFSET = true;

// Adds products of four codes each with the same four of x.
template <int BITS, bool TABLE>
inline Ints add_products(Ints sums, Ints codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return INLAY_ADD_BYTES(sums, codes, all(four));
}

#else

// Sums of two products have 16 bits: of codes of six bits they fit, of eight bits as signed numbers.
template <int BITS, bool TABLE>
constexpr bool START_AT_OFFSET = BITS < 8 && !TABLE;

template <int BITS, bool TABLE>
inline Ints add_products(Ints sums, Ints codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    if constexpr (START_AT_OFFSET<BITS, TABLE>) return add_bytes(sums, codes, all(four));
    const Ints values = less_128(codes);
    return add_bytes(sums, magnitudes(values), signed_as(all(four), values));
}

#endif

}  // namespace
