// Products with a weight that oneDNN has packed: y = x W^T + b, in bfloat16 or float32, accumulated in float32.
//
// With few rows a product is as fast as its weight is read, and oneDNN reads it at two thirds of what a core can: nothing asks for
// what comes next early enough. Here the weight is read once, from end to end, where oneDNN has put it, and asked for ahead.
//
// The weight lies in panels of `width` outputs, 32 or 64: [O / width][I / 2][width][2], pairs of inputs beside each other; in
// float32, which AVX512 with its pairs alone has, [O / width][I][width].
// Tiles, and pairs of AVX512-BF16, each add a row's products in the same order whatever the number of rows. With both, tiles are
// taken wherever the weight fits them: one row by tiles takes 0.82 of its time by pairs.
// Shapes: R rows, I inputs, O outputs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "tiles.h"

extern "C" {

struct PackedProduct {
    const void* x;       // [R, I]
    const void* weight;  // [O / width, I / 2, width, 2]; in float32 [O / width, I, width]
    const void* bias;    // [O] or null
    void* out;           // [R, O]
    int64_t rows, inputs, outputs, width;
    int32_t threads;
};

}  // extern "C"

namespace {

// Bytes ahead of what is read: the best of 0 to 16 KB, on an Intel machine.
constexpr int64_t AHEAD = 2048;

#ifdef __AVX512BF16__

constexpr bool PAIRS_COMPILED = true;

// Rows at once, as many as registers hold the sums of; and rows that go through all panels together, whose x stays in a cache.
constexpr int64_t AT_ONCE = 6, TOGETHER = 40 * AT_ONCE;

// A word is a pair of bfloat16 or one float32: sums += words * own, with one word of x in all lanes of `own`.
inline __m512 add_words(bf16, __m512 sums, __m512i own, __m512i words) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(own), reinterpret_cast<__m512bh>(words));
}
inline __m512 add_words(float, __m512 sums, __m512i own, __m512i words) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(own), _mm512_castsi512_ps(words), sums);
}

// ROWS rows, PANELS panels of VECTORS * 16 outputs from `output` on: one of `parts` passes over these panels. The first waits for
// memory; that none of the others lets it rest, each asks for its part of the panels that come next.
template <typename T, int ROWS, int VECTORS, int PANELS>
void panels(const PackedProduct& a, int64_t row, int64_t output, int64_t part, int64_t parts) {
    constexpr int64_t WIDTH = VECTORS * LANES, LINE = 64, WORD = sizeof(int32_t);
    const int64_t words = a.inputs * static_cast<int64_t>(sizeof(T)) / WORD, bytes = PANELS * WIDTH * words * WORD;
    const int64_t lines = parts == 1 ? PANELS * VECTORS : parts < 4 ? PANELS * VECTORS / 2 : 1;
    const int32_t* weight = static_cast<const int32_t*>(a.weight) + output * words;
    const int32_t* x = static_cast<const int32_t*>(a.x) + row * words;
    const char* ahead = reinterpret_cast<const char*>(weight) + (parts == 1 ? AHEAD : bytes + part * (bytes / parts / LINE * LINE));
    __m512 sums[ROWS][PANELS * VECTORS] = {};
    for (int64_t k = 0; k < words; k++) {
        // Into the second level: the first is too small for what is asked for ahead.
        for (int64_t line = 0; line < lines; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        __m512i read[PANELS * VECTORS];
        for (int p = 0; p < PANELS; p++)
            for (int v = 0; v < VECTORS; v++)
                read[p * VECTORS + v] = _mm512_loadu_si512(weight + (p * words + k) * WIDTH + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            int32_t word;
            std::memcpy(&word, x + r * words + k, WORD);
            const __m512i own = _mm512_set1_epi32(word);
            for (int v = 0; v < PANELS * VECTORS; v++) sums[r][v] = add_words(T{}, sums[r][v], own, read[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANELS * VECTORS; v++) {
            const int64_t at = output + v * LANES;
            Lanes total = reinterpret_cast<Lanes>(sums[r][v]);
            if (a.bias) total += load_lanes(static_cast<const T*>(a.bias) + at);
            store_lanes(static_cast<T*>(a.out) + (row + r) * a.outputs + at, total);
        }
}

// Rows [row, end), AT_ONCE at a time and about as many each time.
template <typename T, int VECTORS, int PANELS>
void rows_of(const PackedProduct& a, int64_t row, int64_t end, int64_t output) {
    const int64_t parts = (end - row + AT_ONCE - 1) / AT_ONCE;
    for (int64_t part = 0, count; part < parts; part++, row += count) {
        count = (end - row + parts - part - 1) / (parts - part);
        switch (count) {
            case 1: panels<T, 1, VECTORS, PANELS>(a, row, output, part, parts); break;
            case 2: panels<T, 2, VECTORS, PANELS>(a, row, output, part, parts); break;
            case 3: panels<T, 3, VECTORS, PANELS>(a, row, output, part, parts); break;
            case 4: panels<T, 4, VECTORS, PANELS>(a, row, output, part, parts); break;
            case 5: panels<T, 5, VECTORS, PANELS>(a, row, output, part, parts); break;
            case 6: panels<T, 6, VECTORS, PANELS>(a, row, output, part, parts); break;
        }
    }
}

template <typename T, int VECTORS>
void by_vectors(const PackedProduct& a) {
    // Two panels of 32 and not one: with more runs under way a core reads more.
    constexpr int PANELS = 4 / VECTORS;
    constexpr int64_t WIDTH = VECTORS * LANES, STEP = PANELS * WIDTH;
    const int64_t whole = a.outputs / STEP, tasks = whole + (a.outputs - whole * STEP) / WIDTH;
    const int64_t blocks = (a.rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for num_threads(a.threads) schedule(static) collapse(2)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t row = block * TOGETHER, end = std::min(a.rows, row + TOGETHER);
            if (task < whole)
                rows_of<T, VECTORS, PANELS>(a, row, end, task * STEP);
            else
                rows_of<T, VECTORS, 1>(a, row, end, whole * STEP + (task - whole) * WIDTH);
        }
}

template <typename T>
void by_vectors(const PackedProduct& a) {
    a.width == 32 ? by_vectors<T, 2>(a) : by_vectors<T, 4>(a);
}

#else

constexpr bool PAIRS_COMPILED = false;

inline float bias_of(const PackedProduct& a, int64_t output) {
    return a.bias ? load(static_cast<const bf16*>(a.bias)[output]) : 0.0f;
}

// Low and high halves: the first and second input of sixteen outputs. Little-endian; on another machine the result is refused.
inline Lanes first_of_pair(WideLanes pairs) { return reinterpret_cast<Lanes>(pairs << 16); }
inline Lanes second_of_pair(WideLanes pairs) { return reinterpret_cast<Lanes>(pairs & 0xffff0000u); }

// PANELS panels of VECTORS * 16 outputs from `output` on; `x` [ROWS, I] in float32.
template <int ROWS, int VECTORS, int PANELS>
void panels(const PackedProduct& a, const float* x, int64_t output) {
    constexpr int64_t WIDTH = VECTORS * LANES;
    const bf16* weight = static_cast<const bf16*>(a.weight) + output * a.inputs;
    Lanes sums[ROWS][PANELS * VECTORS] = {};
    for (int64_t k = 0; k < a.inputs; k += 2)
        for (int p = 0; p < PANELS; p++) {
            const char* from = reinterpret_cast<const char*>(weight + p * WIDTH * a.inputs + k * WIDTH);
            for (int v = 0; v < VECTORS; v++) {
                // Into the second level: the first is too small for what is asked for ahead.
                __builtin_prefetch(from + AHEAD + v * sizeof(Lanes), 0, 2);
                WideLanes pairs;
                std::memcpy(&pairs, from + v * sizeof(Lanes), sizeof(pairs));
                const Lanes first = first_of_pair(pairs), second = second_of_pair(pairs);
                for (int r = 0; r < ROWS; r++) {
                    sums[r][p * VECTORS + v] += first * x[r * a.inputs + k];
                    sums[r][p * VECTORS + v] += second * x[r * a.inputs + k + 1];
                }
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANELS * VECTORS; v++)
            for (int64_t i = 0; i < LANES; i++) {
                const int64_t at = output + v * LANES + i;
                store(static_cast<bf16*>(a.out) + r * a.outputs + at, sums[r][v][i] + bias_of(a, at));
            }
}

template <int ROWS, int VECTORS>
void few_rows(const PackedProduct& a, const float* x) {
    // Two panels of 32 and not one: with more runs under way a core reads more.
    constexpr int PANELS = 4 / VECTORS;
    constexpr int64_t WIDTH = VECTORS * LANES, STEP = PANELS * WIDTH;
    const int64_t whole = a.outputs / STEP, rest = (a.outputs - whole * STEP) / WIDTH;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t task = 0; task < whole + rest; task++) {
        if (task < whole)
            panels<ROWS, VECTORS, PANELS>(a, x, task * STEP);
        else
            panels<ROWS, VECTORS, 1>(a, x, whole * STEP + (task - whole) * WIDTH);
    }
}

template <int ROWS>
void few_rows(const PackedProduct& a, const float* x) {
    return a.width == 32 ? few_rows<ROWS, 2>(a, x) : few_rows<ROWS, 4>(a, x);
}

template <typename T>
void by_vectors(const PackedProduct& a) {
    std::vector<float> x(a.rows * a.inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = load(static_cast<const bf16*>(a.x)[i]);
    switch (a.rows) {
        case 1: return few_rows<1>(a, x.data());
        case 2: return few_rows<2>(a, x.data());
        case 3: return few_rows<3>(a, x.data());
        case 4: return few_rows<4>(a, x.data());
    }
}

#endif

#ifdef TILES

// A tile of x: 16 rows of 32 inputs. Of the weight: 16 pairs of inputs of 16 outputs; two of them side by side are 32 inputs of a panel.
constexpr int64_t ELEMENTS = TILE * BLOCK, LINE = 64;

// Bytes of x that go through all panels together: they and a few panels stay in the second level.
constexpr int64_t TOGETHER_BYTES = 1 << 20;

struct Freed {
    void operator()(bf16* memory) const { operator delete[](memory, std::align_val_t(64)); }
};

// Memory of this thread for `count` elements, kept: pages that are new in every call cost more than what is written to them.
bf16* scratch(int64_t count) {
    static thread_local std::unique_ptr<bf16[], Freed> memory;
    static thread_local int64_t held = 0;
    if (count > held) memory.reset(new (std::align_val_t(64)) bf16[held = count]);
    return memory.get();
}

// Block `b` of 16 rows as tiles, [I / 32, 16, 32], zero past its rows.
void lay_out_rows(const PackedProduct& a, int64_t b, bf16* to) {
    for (int64_t k = 0; k < a.inputs / BLOCK; k++)
        for (int64_t row = b * TILE; row < (b + 1) * TILE; row++, to += BLOCK) {
            if (row < a.rows)
                std::memcpy(to, static_cast<const bf16*>(a.x) + row * a.inputs + k * BLOCK, BLOCK * sizeof(bf16));
            else
                std::memset(static_cast<void*>(to), 0, BLOCK * sizeof(bf16));
        }
}

inline void fetch_ahead(const bf16* from) {
    const char* ahead = reinterpret_cast<const char*>(from) + AHEAD;
    for (int64_t i = 0; i < 2 * ELEMENTS * static_cast<int64_t>(sizeof(bf16)); i += LINE) _mm_prefetch(ahead + i, _MM_HINT_T1);
}

// Two sums [16, 16] side by side, of block `b` of rows and the outputs from `output` on: a line of memory is written at once.
void round_tiles(const PackedProduct& a, const float (*sums)[TILE * TILE], int64_t b, int64_t output) {
    Lanes bias[2] = {};
    if (a.bias)
        for (int64_t i = 0; i < 2; i++) bias[i] = load_lanes(static_cast<const bf16*>(a.bias) + output + i * LANES);
    bf16* to = static_cast<bf16*>(a.out) + b * TILE * a.outputs + output;
    for (int64_t row = 0, rows = std::min(TILE, a.rows - b * TILE); row < rows; row++, to += a.outputs) {
        store_lanes(to, load_lanes(sums[0] + row * TILE) + bias[0]);
        store_lanes(to + LANES, load_lanes(sums[1] + row * TILE) + bias[1]);
    }
}

// Two panels for at most 16 rows.
void two_panels(Tiles& tiles, const PackedProduct& a, const bf16* x, int64_t output) {
    const bf16 *left = static_cast<const bf16*>(a.weight) + output * a.inputs, *right = left + BLOCK * a.inputs;
    tiles.clear();
    for (int64_t k = 0; k < a.inputs / BLOCK; k++, x += ELEMENTS, left += 2 * ELEMENTS, right += 2 * ELEMENTS) {
        fetch_ahead(left), fetch_ahead(right);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, left, 128);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, left + BLOCK, 128);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, right, 128);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, right + BLOCK, 128);
        _tile_dpbf16ps(3, 4, 6);
    }
    alignas(64) float sums[4][TILE * TILE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    round_tiles(a, sums, 0, output);
    round_tiles(a, sums + 2, 0, output + BLOCK);
}

// One panel for blocks [first, end) of 16 rows, which begin at `x`; 32 rows at a time.
void one_panel(Tiles& tiles, const PackedProduct& a, const bf16* x, int64_t first, int64_t end, int64_t output) {
    const int64_t depth = a.inputs / BLOCK, passes = (end - first + 1) / 2;
    const bf16* panel = static_cast<const bf16*>(a.weight) + output * a.inputs;
    // The first pass waits for memory; that none of the others lets it rest, each asks for its part of the next panel.
    const int64_t lines = (2 * TILE_BYTES / LINE + passes - 1) / passes;
    const char* ahead = reinterpret_cast<const char*>(panel) + (passes == 1 ? AHEAD : depth * 2 * TILE_BYTES);
    alignas(64) float sums[4][TILE * TILE];
    for (int64_t b = first; b < end; b += 2) {
        const bf16* weight = panel;
        // Of an odd number the last is computed twice: a way around that costs every other one.
        const bf16 *upper = x + (b - first) * depth * ELEMENTS, *lower = b + 1 < end ? upper + depth * ELEMENTS : upper;
        tiles.clear();
        for (int64_t k = 0; k < depth; k++, upper += ELEMENTS, lower += ELEMENTS, weight += 2 * ELEMENTS) {
            for (int64_t line = 0; line < lines; line++, ahead += LINE) _mm_prefetch(ahead, _MM_HINT_T1);
            _tile_loadd(4, upper, 64);
            _tile_loadd(6, weight, 128);
            _tile_loadd(7, weight + BLOCK, 128);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int64_t j = 0; j < 2 && b + j < end; j++) round_tiles(a, sums + 2 * j, b + j, output);
    }
}

void by_tiles(const PackedProduct& a) {
    const int64_t blocks = (a.rows + TILE - 1) / TILE, size = a.inputs * TILE;
    const int64_t most = std::max<int64_t>(2, TOGETHER_BYTES / (size * static_cast<int64_t>(sizeof(bf16))) / 2 * 2);
    const int64_t parts = (blocks + most - 1) / most, together = ((blocks + parts - 1) / parts + 1) / 2 * 2;
    const int64_t pairs = blocks == 1 ? a.outputs / (2 * BLOCK) : 0, rest = a.outputs / BLOCK - 2 * pairs;
    bf16* x = scratch(std::min(blocks, together) * size);
#pragma omp parallel num_threads(a.threads)
    {
        Tiles tiles;
        for (int64_t first = 0; first < blocks; first += together) {
            const int64_t end = std::min(blocks, first + together);
#pragma omp for schedule(static)
            for (int64_t b = first; b < end; b++) lay_out_rows(a, b, x + (b - first) * size);
#pragma omp for schedule(static)
            for (int64_t task = 0; task < pairs + rest; task++) {
                if (task < pairs)
                    two_panels(tiles, a, x, task * 2 * BLOCK);
                else
                    one_panel(tiles, a, x, first, end, (2 * pairs + task - pairs) * BLOCK);
            }
        }
    }
}

#endif

}  // namespace

extern "C" {

// Whether there are tiles and the kernel lets this process use them.
int32_t inlay_have_tiles() { return TILES_COMPILED && tiles_granted(); }

// Whether there are products of pairs.
int32_t inlay_have_pairs() { return PAIRS_COMPILED; }

// With tiles, where `width` is 32 and `inputs` a multiple of 32, or with pairs, any number of rows; else at most four.
void inlay_packed_product_bfloat16(const PackedProduct* a) {
#ifdef TILES
    if (tiles_granted() && a->width == BLOCK && a->inputs % BLOCK == 0) return by_tiles(*a);
#endif
    by_vectors<bf16>(*a);
}

// Any number of rows, where there are pairs; else nothing is computed.
void inlay_packed_product_float32([[maybe_unused]] const PackedProduct* a) {
#ifdef __AVX512BF16__
    by_vectors<float>(*a);
#endif
}

}  // extern "C"
