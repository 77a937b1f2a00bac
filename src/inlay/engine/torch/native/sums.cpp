// Sums of records of pages, for their checksums. `sums.py` says what they are.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 4096, STRIPE = 64;

typedef uint64_t Words __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint32_t Halves __attribute__((vector_size(64), aligned(1), may_alias));

Words sum_block(const char* data, const char* key) {
    Words sum = {};
    for (int64_t at = 0; at < BLOCK; at += STRIPE) {
        const Words words = *reinterpret_cast<const Words*>(data + at);
        const Words mixed = (Words)((Halves)words + *reinterpret_cast<const Halves*>(key + at));
        sum += words + (mixed & 0xffffffff) * (mixed >> 32);
    }
    return sum;
}

}  // namespace

extern "C" void inlay_sums(
    char* out, const char* records, const char* key, int64_t count, int64_t stride, int64_t bytes) {
    for (int64_t r = 0; r < count; r++) {
        const char* record = records + r * stride;
        int64_t at = 0;
        for (; at + BLOCK <= bytes; at += BLOCK, out += STRIPE) {
            const Words sum = sum_block(record + at, key);
            std::memcpy(out, &sum, STRIPE);
        }
        if (at < bytes) {
            char last[BLOCK] = {};
            std::memcpy(last, record + at, bytes - at);
            const Words sum = sum_block(last, key);
            std::memcpy(out, &sum, STRIPE);
            out += STRIPE;
        }
    }
}
