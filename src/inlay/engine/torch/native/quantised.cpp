// Products with weights of four or eight bits: y = x W^T + b, where W[o][i] = (code[o][i] - zero[o][g]) * scale[o][g] for the group
// g of input i.
//
// Codes are read as they are stored, once for many rows, and widened in registers: those of four bits for every few rows, which costs
// nothing beside their products, others once, and kept in a cache. With tiles all are kept. Scales are applied in float32, to sums
// over a group.
// Shapes: R rows, I inputs, O outputs, G groups, P panels; the layout is that of `codes.h`.

// Sums in the order that is written: what a row gives must not depend on how many rows there are.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math")
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "codes.h"
#include "tiles.h"

extern "C" {

struct QuantisedProduct {
    const void* x;          // [R, I]
    const uint32_t* codes;  // [P, I / n, 64]
    const float* scales;    // [P, G, 64]
    const float* shifts;    // [P, G, 64], scale times zero; null for zeros of 0
    const void* bias;       // [O] or null
    void* out;              // [R, O]
    int64_t rows, inputs, outputs, group;
    int32_t kind, threads;
    int32_t tiles;  // 1: with more than a few rows, products of tiles
};

}  // extern "C"

namespace {

// Bytes ahead of what is read.
constexpr int64_t AHEAD = 4096;

// Inputs whose widened codes are kept, in the second level of caches; rows that share them.
constexpr int64_t KEPT = 1024, TOGETHER = 240;

// Inputs [start, end), of one group.
struct Segment {
    int64_t start, end, group;
};

std::vector<Segment> segments_of(const QuantisedProduct& a) {
    std::vector<Segment> found;
    for (int64_t start = 0, group = 0; start < a.inputs; group++)
        for (const int64_t stop = std::min(a.inputs, start + a.group); start < stop; start = found.back().end)
            found.push_back({start, std::min(stop, start + KEPT), group});
    return found;
}

// The end of those segments from `s` on whose codes are kept together.
int64_t kept_from(const std::vector<Segment>& segments, int64_t s) {
    int64_t stop = s + 1;
    while (stop < static_cast<int64_t>(segments.size()) && segments[stop].end - segments[s].start <= KEPT) stop++;
    return stop;
}

// Some of the outputs of a panel, some of the inputs, and what is known of them.
template <typename Math>
struct Part {
    const QuantisedProduct& a;
    const Math& math;
    const Segment *begin, *end;
    int64_t segments, panel, first;
    typename Math::Pair* widened;
};

// Codes are widened in registers; are widened and kept; are read as they were kept.
enum Use { ONCE, FIRST, AGAIN };

// Adds products of ROWS rows to `totals`.
template <typename Math, int KIND, int ROWS, Use USE>
__attribute__((noinline)) void rows_of(const Part<Math>& part, Lanes* totals, const typename Math::X* x, const float* sums_x) {
    constexpr int VECTORS = Math::VECTORS;
    const QuantisedProduct& a = part.a;
    const int64_t groups = (a.inputs + a.group - 1) / a.group, inputs = a.inputs;
    const uint32_t* codes = a.codes + (part.panel * inputs + part.begin->start) / per_word(KIND) * WIDTH * LANES + part.first * LANES;
    auto* widened = part.widened;
    // Of a few rows, registers hold the totals too, and x beside all steps of a word.
    constexpr bool FEW = ROWS <= 3;
    Lanes own[ROWS * VECTORS];
    Lanes* found = FEW ? own : totals;
    if (FEW) std::memcpy(own, totals, sizeof(own));
    for (const Segment* segment = part.begin; segment < part.end; segment++) {
        Lanes sums[ROWS][VECTORS] = {};
        if constexpr (USE == AGAIN) {
#pragma GCC unroll 1
            for (int64_t i = segment->start; i < segment->end; i += 2, widened += VECTORS)
                for (int v = 0; v < VECTORS; v++)
                    for (int r = 0; r < ROWS; r++) Math::add(sums[r][v], widened[v], x + r * inputs + i);
        } else {
#pragma GCC unroll 1
            for (int64_t i = segment->start; i < segment->end; i += per_word(KIND), codes += WIDTH * LANES) {
                const auto use = [&](int step, int v) {
                    // Into the second level: the first is too small for what is asked for ahead.
                    if (step == 0) __builtin_prefetch(reinterpret_cast<const char*>(codes + v * LANES) + AHEAD, 0, 2);
                    WideLanes words;
                    std::memcpy(&words, codes + v * LANES, sizeof(words));
                    const auto pair = part.math.template decode<KIND>(words, step);
                    if (USE == FIRST) *widened++ = pair;
                    for (int r = 0; r < ROWS; r++) Math::add(sums[r][v], pair, x + r * inputs + i + 2 * step);
                };
                if constexpr (FEW && USE == ONCE) {
                    for (int v = 0; v < VECTORS; v++)
                        for (int step = 0; step < pairs(KIND); step++) use(step, v);
                } else {
                    for (int step = 0; step < pairs(KIND); step++)
                        for (int v = 0; v < VECTORS; v++) use(step, v);
                }
            }
        }
        const int64_t at = ((part.panel * groups + segment->group) * WIDTH + part.first) * LANES;
        for (int v = 0; v < VECTORS; v++) {
            // Of the next panel.
            if (USE != AGAIN) __builtin_prefetch(a.scales + at + (groups * WIDTH + v) * LANES, 0, 2);
            const Lanes scales = load_lanes(a.scales + at + v * LANES);
            for (int r = 0; r < ROWS; r++) found[r * VECTORS + v] += sums[r][v] * scales;
        }
        if (!a.shifts) continue;
        for (int v = 0; v < VECTORS; v++) {
            if (USE != AGAIN) __builtin_prefetch(a.shifts + at + (groups * WIDTH + v) * LANES, 0, 2);
            const Lanes shifts = load_lanes(a.shifts + at + v * LANES);
            for (int r = 0; r < ROWS; r++) found[r * VECTORS + v] -= sums_x[r * part.segments + (segment - part.begin)] * shifts;
        }
    }
    if (FEW) std::memcpy(totals, own, sizeof(own));
}

template <typename T>
inline void finish(const QuantisedProduct& a, Lanes total, int64_t row, int64_t output) {
    T* to = static_cast<T*>(a.out) + row * a.outputs + output;
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + output : nullptr;
    if (output + LANES <= a.outputs) return store_lanes(to, bias ? total + load_lanes(bias) : total);
    for (int64_t i = 0; i < a.outputs - output; i++) store(to + i, bias ? total[i] + load(bias[i]) : total[i]);
}

// Calls with `count` as a constant, of 1 to MOST.
template <int MOST, typename F>
inline void with_count(int64_t count, F&& use) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, use);
    use(std::integral_constant<int, MOST>());
}

// Rows [row, end) and some vectors of outputs of a panel.
template <typename T, typename Math, int KIND>
void outputs_of(
    const QuantisedProduct& a, const Math& math, const std::vector<Segment>& segments, const typename Math::X* x, const float* sums_x,
    typename Math::Pair* widened, int64_t row, int64_t end, int64_t panel, int64_t first) {
    constexpr int VECTORS = Math::VECTORS;
    constexpr bool KEEPS = !Math::template free_to_widen<KIND>();
    const int64_t parts = (end - row + Math::ROWS - 1) / Math::ROWS, count = segments.size();
    std::vector<Lanes> totals((end - row) * VECTORS, Lanes{});
    for (int64_t s = 0, stop; s < count; s = stop) {
        stop = kept_from(segments, s);
        const Part<Math> part{a, math, &segments[s], &segments[s] + (stop - s), count, panel, first, widened};
        for (int64_t done = 0, r = row, rows; done < parts; done++, r += rows) {
            // Those that keep codes are as many as may be, for their products hide what that costs; others are about as many each time.
            rows = done || !KEEPS ? (end - r + parts - done - 1) / (parts - done) : std::min<int64_t>(end - r, Math::ROWS);
            with_count<Math::ROWS>(rows, [&](auto ROWS) {
                const auto use = parts == 1 || !KEEPS ? rows_of<Math, KIND, ROWS(), ONCE>
                                 : done               ? rows_of<Math, KIND, ROWS(), AGAIN>
                                                      : rows_of<Math, KIND, ROWS(), FIRST>;
                use(part, &totals[(r - row) * VECTORS], x + r * a.inputs, sums_x + r * count + s);
            });
        }
    }
    for (int64_t r = row; r < end; r++)
        for (int64_t v = 0; v < VECTORS; v++) finish<T>(a, totals[(r - row) * VECTORS + v], r, (panel * WIDTH + first + v) * LANES);
}

// Sums of x over every segment, [R, segments], that zeros are taken from.
template <typename X>
std::vector<float> sums_of(const QuantisedProduct& a, const std::vector<Segment>& segments, const X* x) {
    std::vector<float> sums(a.rows * segments.size());
    if (!a.shifts) return sums;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t row = 0; row < a.rows; row++)
        for (size_t s = 0; s < segments.size(); s++) {
            Lanes sum = {};
            int64_t i = row * a.inputs + segments[s].start;
            const int64_t stop = row * a.inputs + segments[s].end;
            for (; i + LANES <= stop; i += LANES) sum += load_lanes(x + i);
            float rest = 0;
            for (; i < stop; i++) rest += load(x[i]);
            sums[row * segments.size() + s] = sum_lanes(sum) + rest;
        }
    return sums;
}

#ifdef __AVX512BF16__

// Rows of x for tiles, as many as whole tiles have, zero past its own.
std::vector<bf16> padded(const QuantisedProduct& a) {
    std::vector<bf16> x((a.rows + TILE - 1) / TILE * TILE * a.inputs);
    std::memcpy(static_cast<void*>(x.data()), a.x, a.rows * a.inputs * sizeof(bf16));
    return x;
}

// Rows [row, end) of a panel by tiles: its codes are widened as tiles want them, the pairs of 16 outputs together.
template <int KIND>
void tiles_of(
    Tiles& tiles, const QuantisedProduct& a, const Halves& math, const std::vector<Segment>& segments, const bf16* x, const float* sums_x,
    __m512i* widened, int64_t row, int64_t end, int64_t panel) {
    constexpr int64_t COLUMN = KEPT / 2;
    const int64_t count = segments.size(), groups = (a.inputs + a.group - 1) / a.group;
    std::vector<Lanes> totals((end - row) * WIDTH, Lanes{});
    for (int64_t s = 0, stop; s < count; s = stop) {
        stop = kept_from(segments, s);
        const int64_t first = segments[s].start;
        const uint32_t* codes = a.codes + (panel * a.inputs + first) / per_word(KIND) * WIDTH * LANES;
        for (int64_t pair = 0; pair < (segments[stop - 1].end - first) / 2; pair += pairs(KIND))
            for (int v = 0; v < WIDTH; v++, codes += LANES) {
                __builtin_prefetch(reinterpret_cast<const char*>(codes) + AHEAD, 0, 2);
                WideLanes words;
                std::memcpy(&words, codes, sizeof(words));
                for (int step = 0; step < pairs(KIND); step++) widened[v * COLUMN + pair + step] = math.decode<KIND>(words, step);
            }
        for (; s < stop; s++) {
            const Segment& segment = segments[s];
            const int64_t at = (panel * groups + segment.group) * WIDTH * LANES;
            for (int64_t r = row; r < end; r += BLOCK)
                for (int v = 0; v < WIDTH; v += 2) {
                    const bf16* weights = reinterpret_cast<const bf16*>(widened + v * COLUMN + (segment.start - first) / 2);
                    alignas(64) Lanes sums[BLOCK][2];
                    const bool both = end - r > TILE;
                    tiles.clear();
                    tiles.add(
                        x + r * a.inputs + segment.start, a.inputs, 0, weights, weights + COLUMN * 2 * LANES, 0,
                        (segment.end - segment.start) / BLOCK, both);
                    tiles.save(reinterpret_cast<float*>(sums), BLOCK, both);
                    for (int64_t i = 0; i < std::min(BLOCK, end - r); i++)
                        for (int half = 0; half < 2; half++) {
                            Lanes& total = totals[(r - row + i) * WIDTH + v + half];
                            total += sums[i][half] * load_lanes(a.scales + at + (v + half) * LANES);
                            if (a.shifts) total -= sums_x[(r + i) * count + s] * load_lanes(a.shifts + at + (v + half) * LANES);
                        }
                }
        }
    }
    for (int64_t r = row; r < end; r++)
        for (int64_t v = 0; v < WIDTH; v++) finish<bf16>(a, totals[(r - row) * WIDTH + v], r, (panel * WIDTH + v) * LANES);
}

// Whether these rows are worth tiles, and whole blocks of inputs have one scale.
bool fits_tiles(const QuantisedProduct& a) { return a.tiles && a.rows > 4 && a.inputs % BLOCK == 0 && a.group % BLOCK == 0; }

template <int KIND>
void by_tiles(const QuantisedProduct& a, const Halves& math, const std::vector<Segment>& segments, const float* sums_x) {
    const std::vector<bf16> x = padded(a);
    const int64_t panels = (a.outputs + WIDTH * LANES - 1) / (WIDTH * LANES), blocks = (a.rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel num_threads(a.threads)
    {
        Tiles tiles;
        const std::unique_ptr<__m512i[]> widened(new __m512i[KEPT / 2 * WIDTH]);
#pragma omp for schedule(static) collapse(2)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t panel = 0; panel < panels; panel++)
                tiles_of<KIND>(
                    tiles, a, math, segments, x.data(), sums_x, widened.get(), block * TOGETHER, std::min(a.rows, (block + 1) * TOGETHER),
                    panel);
    }
}

#endif

template <typename T, typename Math, int KIND>
void product(const QuantisedProduct& a, const typename Math::X* x) {
    static const Math math;
    const std::vector<Segment> segments = segments_of(a);
    const std::vector<float> sums_x = sums_of(a, segments, x);
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<Math, Halves>)
        if (fits_tiles(a)) return by_tiles<KIND>(a, math, segments, sums_x.data());
#endif
    const int64_t panels = (a.outputs + WIDTH * LANES - 1) / (WIDTH * LANES), blocks = (a.rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel num_threads(a.threads)
    {
        const std::unique_ptr<typename Math::Pair[]> widened(new typename Math::Pair[a.rows > Math::ROWS ? KEPT / 2 * Math::VECTORS : 0]);
#pragma omp for schedule(static) collapse(2)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t panel = 0; panel < panels; panel++)
                for (int64_t first = 0; first < WIDTH; first += Math::VECTORS)
                    outputs_of<T, Math, KIND>(
                        a, math, segments, x, sums_x.data(), widened.get(), block * TOGETHER, std::min(a.rows, (block + 1) * TOGETHER),
                        panel, first);
    }
}

template <typename T, typename Math>
void product(const QuantisedProduct& a, const typename Math::X* x) {
    switch (a.kind) {
        case INT4: return product<T, Math, INT4>(a, x);
        case INT8: return product<T, Math, INT8>(a, x);
        case FP8: return product<T, Math, FP8>(a, x);
    }
}

}  // namespace

extern "C" {

void inlay_quantised_product_float32(const QuantisedProduct* a) { product<float, Floats>(*a, static_cast<const float*>(a->x)); }

void inlay_quantised_product_bfloat16(const QuantisedProduct* a) {
#ifdef __AVX512BF16__
    product<bf16, Halves>(*a, static_cast<const bf16*>(a->x));
#else
    std::vector<float> x(a->rows * a->inputs);
    for (size_t i = 0; i < x.size(); i++) x[i] = load(static_cast<const bf16*>(a->x)[i]);
    product<bf16, Floats>(*a, x.data());
#endif
}

}  // extern "C"
