// Pages copied into records and out of them, with the sums of these, in one pass: each byte is read
// once. `pages.py` says what the sums are.

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 16384, STRIPE = 64;

typedef uint64_t Words __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint32_t Halves __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t Quarters __attribute__((vector_size(64), aligned(1), may_alias));

Words summed(const Words& words, const char* key) {
    const Words mixed = (Words)((Halves)words + *reinterpret_cast<const Halves*>(key));
    return words + (mixed & 0xffffffff) * (mixed >> 32);
}

// To memory that is not read here soon: not through the caches, which would read it first.
void stream(char* to, const Words& words) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)words);
#elif defined(__AVX__)
    __m256i halves[2];
    std::memcpy(halves, &words, STRIPE);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves[0]);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, halves[1]);
#else
    std::memcpy(to, &words, STRIPE);
#endif
}

// Streamed memory is seen by others from here on.
void streamed() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

struct Checked {
    Words sum;
    bool finite;
};

// Copies a part of a block, and sums it. `V` is a vector of its numbers as integers, of which some have
// all bits of `infinity` if they are not finite; 0 looks at none. `next` is what will be read then.
template <typename V, bool streams, typename I>
Checked copied(char* to, const char* from, const char* next, const char* key, int64_t bytes, I infinity) {
    Words sum = {};
    V found = {};
    for (int64_t at = 0; at < bytes; at += STRIPE) {
        const Words words = *reinterpret_cast<const Words*>(from + at);
        __builtin_prefetch(next + at);
        if (streams) {
            stream(to + at, words);
        } else {
            *reinterpret_cast<Words*>(to + at) = words;
        }
        sum += summed(words, key + at);
        if (infinity) found |= (V)(((V)words & infinity) == infinity);
    }
    const Words any = (Words)found;
    uint64_t seen = 0;
    for (int64_t i = 0; i < STRIPE / 8; i++) seen |= any[i];
    return {sum, !seen};
}

Checked part(char* to, const char* from, const char* next, const char* key, int64_t bytes, int64_t infinity) {
    const bool streams = reinterpret_cast<uintptr_t>(to) % STRIPE == 0;
    if (infinity > 0xffff) {
        const uint32_t wide = infinity;
        return streams ? copied<Halves, true>(to, from, next, key, bytes, wide)
                       : copied<Halves, false>(to, from, next, key, bytes, wide);
    }
    const uint16_t narrow = infinity;
    return streams ? copied<Quarters, true>(to, from, next, key, bytes, narrow)
                   : copied<Quarters, false>(to, from, next, key, bytes, narrow);
}

}  // namespace

extern "C" {

struct CopyPages {
    char* const* runs;          // [count], page 0 of each head of each tensor
    const int64_t* sizes;       // [count], bytes that are copied of a page, a multiple of STRIPE
    const int64_t* steps;       // [count], bytes from one page to the next
    const int64_t* infinities;  // [count], the bits of infinity
    const int64_t* pages;       // [records], page of each
    char* records;              // [records, stride]
    const char* key;            // [BLOCK]
    char* sums;                 // [records, blocks, STRIPE]
    int64_t count, num_records, stride;
    int32_t to_pages;
};

// A record has the runs of its page in order. Returns the number of leading records that are finite,
// where they go to pages; of the next one nothing is left there that is not.
int64_t inlay_copy_pages(const CopyPages* a) {
    char* sums = a->sums;
    for (int64_t r = 0; r < a->num_records; r++) {
        char* record = a->records + r * a->stride;
        Words sum = {};
        int64_t at = 0;  // in the block
        for (int64_t i = 0; i < a->count; i++) {
            char* page = a->runs[i] + a->pages[r] * a->steps[i];
            const int64_t after = i + 1 < a->count ? i + 1 : i;
            for (int64_t left = a->sizes[i]; left;) {
                const int64_t bytes = std::min(left, BLOCK - at);
                const bool ends = bytes == left;
                const char* next = a->to_pages ? record + bytes
                                   : ends      ? a->runs[after] + a->pages[r] * a->steps[after]
                                               : page + bytes;
                char* to = a->to_pages ? page : record;
                const Checked found = part(
                    to, a->to_pages ? record : page, next, a->key + at, bytes, a->to_pages ? a->infinities[i] : 0);
                if (!found.finite) {
                    std::memset(to, 0, bytes);
                    streamed();
                    return r;
                }
                sum += found.sum;
                at += bytes, left -= bytes, page += bytes, record += bytes;
                if (at == BLOCK) {
                    std::memcpy(sums, &sum, STRIPE);
                    sum = Words{};
                    sums += STRIPE, at = 0;
                }
            }
        }
        if (at) {
            for (; at < BLOCK; at += STRIPE) sum += summed(Words{}, a->key + at);
            std::memcpy(sums, &sum, STRIPE);
            sums += STRIPE;
        }
    }
    streamed();
    return a->num_records;
}

void inlay_sums(char* out, const char* records, const char* key, int64_t count, int64_t stride, int64_t bytes) {
    for (int64_t r = 0; r < count; r++) {
        for (int64_t at = 0; at < bytes; at += BLOCK, out += STRIPE) {
            const char* block = records + r * stride + at;
            char last[BLOCK] = {};
            if (bytes - at < BLOCK) block = static_cast<char*>(std::memcpy(last, block, bytes - at));
            Words sum = {};
            for (int64_t i = 0; i < BLOCK; i += STRIPE) {
                sum += summed(*reinterpret_cast<const Words*>(block + i), key + i);
            }
            std::memcpy(out, &sum, STRIPE);
        }
    }
}

}  // extern "C"
