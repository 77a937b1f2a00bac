// Attention over pages of keys and values: online softmax over blocks of 128 positions (FlashAttention, arXiv 2205.14135).
//
// The queries of all heads that share keys are rows, position after position. Prompts: keys and values of a block are laid out once a
// call as products want them, and four tiles of 32 rows read them together. Weights of a tile are computed while the tiles before
// and after it multiply. Decoding: up to 16 rows of a sequence read keys and values where they lie, once for every four.
//
// Sums are scaled anew only where a score is above the greatest one before by 8 or more, in powers of two (FlashAttention-4 does so
// too): until then weights may be up to 256.
//
// Blocks begin at multiples of 128 of the position in the sequence, segments at multiples of 1,024; what a row does not see weighs
// exactly zero, and rows do not touch each other. So a position of a prompt has the same bits whatever chunk it comes in. With
// AVX512-BF16, decoding adds in the same order as well: without tiles always, with them where it uses them, for more than two heads
// that share keys or if it must (`invariant`). Elsewhere it then goes the way of prompts.
//
// NaN and infinity come out where they go in. Shapes: T positions in the batch, S sequences, Q query heads, H key/value heads,
// G = Q / H, N pages of P positions.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#include <vector>

#include "attention.h"
#include "vectors.h"

extern "C" {

struct PagedAttention {
    const void* query;           // [T, Q, key_size], strided
    const void* keys;            // [H, N, P, key_size]
    const void* values;          // [H, N, P, value_size], value_stride from one to the next; may be the first part of the keys
    void* out;                   // [T, Q, value_size], contiguous
    const int32_t* block_table;  // [sequences of the batch, table_stride]
    const int32_t* spans;        // [S], each sequence's line of the table
    const int32_t* rows;         // [S], its first query's position in the batch
    const int32_t* counts;       // [S], its queries
    const int32_t* contexts;     // [S], its positions, up to the last query's
    const int32_t* ends;         // [T], the first position of its sequence that a query does not see
    const float* sinks;          // [Q] or null
    void* workspace;             // of as many bytes as `inlay_paged_attention_bytes_*` says, at a multiple of 64
    int64_t query_stride_t, query_stride_q, table_stride;
    int64_t sequences, decoding;  // all, and how many of them, the first, decode
    int64_t heads, group, num_pages, page_size, key_size, value_size, value_stride, window;
    float scaling, softcap;
    int32_t threads;
    int32_t invariant;  // 1: the bits of a position must not depend on whether it decodes
};

}  // extern "C"

namespace {

// Rows of a tile, and of what reads a block of keys and values together.
constexpr int64_t ROWS = BLOCK, STRIP = 4 * ROWS;
// Keys and values that are laid out before tiles attend to them: more when one sequence's head alone is more.
constexpr int64_t WAVE_BYTES = 8 << 20;
// Rows of a sequence that decodes for which nothing is laid out: with more, what is laid out pays.
constexpr int64_t FEW_ROWS = 16;
// Positions whose weighted sums are added to those of others as a whole, so that threads may divide a sequence that decodes.
constexpr int64_t SEGMENT = 8 * KEYS;

// One sequence's head: its blocks, and where they are laid out.
struct Part {
    int64_t sequence, head, first_block, blocks, at;
};

// A piece of work on a part: one of its blocks, or the tile from a row on.
struct Piece {
    int64_t part, at;
};

template <typename T, typename Product>
class Attention {
    using Element = typename Product::Element;
    using Few = FewElement<T>;
    // A few rows are multiplied in the same order as tiles are.
    static constexpr bool ALIKE = std::is_same_v<Element, bf16> && PAIRS_BY_VECTORS;
    // They can be multiplied by tiles, in the order of prompts; of one or two rows vectors are faster.
    static constexpr bool TILED = std::is_same_v<Element, bf16> && std::is_same_v<Few, bf16> && !PAIRS_BY_VECTORS;

public:
    explicit Attention(const PagedAttention& a)
        : a(a), key_width(whole(a.key_size, BLOCK)), value_width(whole(a.value_size, BLOCK)), block_size(KEYS * (key_width + value_width)) {
        few_by_tiles = TILED && (a.invariant || a.group > 2) && key_width == a.key_size && value_width == a.value_size;
        if (ALIKE || few_by_tiles || !a.invariant)
            while (few < a.decoding && a.counts[few] * a.group <= FEW_ROWS) {
                most_rows = std::max(most_rows, a.counts[few] * a.group);
                most_segments = std::max(most_segments, segments_of(few++));
            }
        int64_t largest = 0;
        for (int64_t s = few; s < a.sequences; s++) largest = std::max(largest, blocks_of(s) * block_size);
        wave = few < a.sequences ? std::max<int64_t>(largest, WAVE_BYTES / sizeof(Element)) : 0;
    }

    int64_t bytes() const {
        Arena arena{nullptr};
        Attention(*this).place(arena);
        return reinterpret_cast<int64_t>(arena.at);
    }

    void run() {
        Arena arena{static_cast<char*>(a.workspace)};
        place(arena);
        if (few) decode();
        const int64_t count = a.sequences * a.heads;
        for (int64_t next = few * a.heads; next < count;) {
            std::vector<Part> parts;
            for (int64_t at = 0; next < count; next++) {
                const int64_t s = next / a.heads, blocks = blocks_of(s);
                if (at + blocks * block_size > wave) break;
                parts.push_back({s, next % a.heads, first_of(s) / KEYS, blocks, at});
                at += blocks * block_size;
            }
            attend_to(parts);
        }
    }

private:
    // What one thread works on: rows of queries, their scores and weights against a block, and what came of them so far.
    struct Scratch {
        Element *queries, *weights;
        Few *few_queries, *few_weights;
        T* edge;
        float *scores, *out;
        Element *few_keys, *few_values;
    };

    const PagedAttention& a;
    const int64_t key_width, value_width, block_size;
    // Sequences that decode with few rows, and the most rows and segments of one.
    int64_t few = 0, most_rows = 0, most_segments = 0;
    bool few_by_tiles;
    int64_t wave;
    Element* laid_out = nullptr;
    std::vector<Scratch> scratches;
    float* shares = nullptr;

    void place(Arena& arena) {
        laid_out = arena.take<Element>(wave);
        shares = arena.take<float>(few * a.heads * most_segments * most_rows * (value_width + 2));
        for (int thread = 0; thread < a.threads; thread++)
            scratches.push_back(
                {arena.take<Element>(STRIP * key_width), arena.take<Element>(2 * ROWS * KEYS), arena.take<Few>(FEW_ROWS * key_width),
                 arena.take<Few>(FEW_ROWS * KEYS), arena.take<T>(KEYS * a.value_stride + LANES * a.key_size),
                 arena.take<float>(2 * ROWS * KEYS), arena.take<float>(2 * STRIP * value_width),
                 arena.take<Element>(few_by_tiles * TILE * key_width), arena.take<Element>(few_by_tiles * KEYS * value_width)});
    }

    int64_t start_of(int64_t s) const { return a.contexts[s] - a.counts[s]; }
    // The first position that a query at `position` sees, and that any of a sequence does.
    int64_t low_of(int64_t position) const {
        if (a.window < 0) return position - position % -a.window;
        return a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
    }
    int64_t first_of(int64_t s) const { return low_of(start_of(s)); }
    int64_t blocks_of(int64_t s) const { return (a.contexts[s] + KEYS - 1) / KEYS - first_of(s) / KEYS; }
    int64_t segments_of(int64_t s) const { return (a.contexts[s] + SEGMENT - 1) / SEGMENT - first_of(s) / SEGMENT; }

    void attend_to(const std::vector<Part>& parts) {
        std::vector<Piece> blocks, tiles;
        for (int64_t p = 0; p < static_cast<int64_t>(parts.size()); p++) {
            for (int64_t block = 0; block < parts[p].blocks; block++) blocks.push_back({p, block});
            // The last see most: longest first.
            const int64_t rows = a.counts[parts[p].sequence] * a.group;
            for (int64_t row = (rows - 1) / STRIP * STRIP; row >= 0; row -= STRIP) tiles.push_back({p, row});
        }
        const int64_t num_blocks = blocks.size(), num_tiles = tiles.size();
#pragma omp parallel num_threads(a.threads)
        {
            Product product;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_blocks; i++) lay_out(parts[blocks[i].part], blocks[i].at, scratches[omp_get_thread_num()]);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_tiles; i++) attend(product, parts[tiles[i].part], tiles[i].at, scratches[omp_get_thread_num()]);
        }
    }

    void lay_out(const Part& part, int64_t block, const Scratch& own) const {
        const int64_t start = (part.first_block + block) * KEYS;
        // Neither what lies behind the sequence's end nor what has left a window may be read: it may be anything.
        const int64_t low = std::max(start, first_of(part.sequence)), high = std::min<int64_t>(start + KEYS, a.contexts[part.sequence]);
        Element* keys = laid_out + part.at + block * block_size;
        Element* values = keys + KEYS * key_width;
        if (high - low < KEYS || key_width > a.key_size || value_width > a.value_size)
            std::memset(static_cast<void*>(keys), 0, block_size * sizeof(Element));
        // Sixteen positions each lie in one page.
        for (int64_t at = low / LANES * LANES; at < high; at += LANES) {
            const T *key = key_of(part.sequence, part.head, at), *value = value_of(part.sequence, part.head, at);
            if (at < low || at + LANES > high) {
                T* edge = own.edge + LANES * a.value_stride;
                value = whole_of(own.edge, value, a.value_size, a.value_stride, at, low, high);
                key = whole_of(edge, key, a.key_size, a.key_size, at, low, high);
            }
            lay_out_keys(keys, at - start, key, a.key_size, key_width);
            lay_out_values(values, at - start, value, a.value_size, a.value_stride);
        }
    }

    int64_t slot_of(int64_t s, int64_t h, int64_t position) const {
        const int64_t page = a.block_table[a.spans[s] * a.table_stride + position / a.page_size];
        return (h * a.num_pages + page) * a.page_size + position % a.page_size;
    }
    const T* key_of(int64_t s, int64_t h, int64_t position) const {
        return static_cast<const T*>(a.keys) + slot_of(s, h, position) * a.key_size;
    }
    const T* value_of(int64_t s, int64_t h, int64_t position) const {
        return static_cast<const T*>(a.values) + slot_of(s, h, position) * a.value_stride;
    }

    const T* query_of(int64_t s, int64_t h, int64_t row) const {
        const int64_t t = a.rows[s] + row / a.group, head = h * a.group + row % a.group;
        return static_cast<const T*>(a.query) + t * a.query_stride_t + head * a.query_stride_q;
    }

    // Fills `rows` rows from one on; gives the first position that one of them sees, and the first that none does.
    template <typename To>
    std::pair<int64_t, int64_t> begin(Row* state, To* queries, int64_t s, int64_t h, int64_t first, int64_t rows, float* out) const {
        int64_t low = std::numeric_limits<int64_t>::max(), end = 0;
        std::memset(static_cast<void*>(queries), 0, rows * key_width * sizeof(To));
        std::memset(out, 0, rows * value_width * sizeof(float));
        for (int64_t r = 0; r < rows; r++) {
            const T* from = query_of(s, h, first + r);
            for (int64_t i = 0; i < a.key_size; i++) put(queries + r * key_width + i, from[i]);
            const int64_t position = (first + r) / a.group;
            state[r] = {NOTHING, 0, low_of(start_of(s) + position), a.ends[a.rows[s] + position]};
            low = std::min(low, state[r].low);
            end = std::max(end, state[r].end);
        }
        return {low, end};
    }

    void attend(Product& product, const Part& part, int64_t first, const Scratch& own) const {
        const int64_t s = part.sequence, rows = std::min(STRIP, a.counts[s] * a.group - first), padded = whole(rows, ROWS);
        Row state[STRIP];
        std::memset(static_cast<void*>(own.queries + rows * key_width), 0, (padded - rows) * key_width * sizeof(Element));
        std::memset(own.out + rows * value_width, 0, (padded - rows) * value_width * sizeof(float));
        // What each tile sees, and what all do.
        std::pair<int64_t, int64_t> seen[STRIP / ROWS];
        int64_t low = std::numeric_limits<int64_t>::max(), end = 0;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const auto [from, to] = seen[r / ROWS] =
                begin(state + r, own.queries + r * key_width, s, part.head, first + r, std::min(ROWS, rows - r), own.out + r * value_width);
            low = std::min(low, from);
            end = std::max(end, to);
        }
        // Of the segments before this one.
        Row before[STRIP];
        float* sums = own.out + STRIP * value_width;
        Pipeline pipeline{*this, product, own};
        for (int64_t block = low / KEYS; block * KEYS < end; block++) {
            if (block > low / KEYS && block * KEYS % SEGMENT == 0) {
                const bool second = block * KEYS / SEGMENT == low / SEGMENT + 1;
                for (int64_t r = 0; r < rows; r++) {
                    state[r].close();
                    if (second) {
                        before[r] = state[r];
                        std::memcpy(sums + r * value_width, own.out + r * value_width, value_width * sizeof(float));
                    } else {
                        add(before[r], sums + r * value_width, state[r], own.out + r * value_width);
                    }
                    state[r].begin();
                }
                std::memset(own.out, 0, rows * value_width * sizeof(float));
            }
            const Element* keys = laid_out + part.at + (block - part.first_block) * block_size;
            for (int64_t r = 0; r < rows; r += ROWS) {
                const auto [from, to] = seen[r / ROWS];
                if (from < (block + 1) * KEYS && to > block * KEYS)
                    pipeline.push(
                        {state + r, own.queries + r * key_width, keys, block * KEYS, std::min(ROWS, rows - r),
                         whole(std::min(KEYS, to - block * KEYS), BLOCK), own.out + r * value_width});
            }
            if ((block + 1) * KEYS % SEGMENT == 0 || (block + 1) * KEYS >= end) pipeline.finish();
        }
        const bool one = low / SEGMENT == (end - 1) / SEGMENT;
        for (int64_t r = 0; r < rows; r++) {
            state[r].close();
            if (!one) add(before[r], sums + r * value_width, state[r], own.out + r * value_width);
            finish(s, part.head, first + r, (one ? own.out : sums) + r * value_width, one ? state[r] : before[r]);
        }
    }

    // A tile's rows and a block of keys and values.
    struct Step {
        Row* state = nullptr;
        const Element *queries = nullptr, *keys = nullptr;
        int64_t start = 0, rows = 0, columns = 0;
        float* out = nullptr;
    };

    // Three steps at once: scores of one, weights of the one before, sums of the one before that. A core computes the weights while
    // its tiles multiply.
    struct Pipeline {
        const Attention& of;
        Product& product;
        const Scratch& own;
        Step second{}, third{};
        float shrinks[2][ROWS];
        int64_t turn = 0;

        void push(const Step& first) {
            const int64_t key_width = of.key_width, value_width = of.value_width, next = 1 - turn;
            float *scores = own.scores + turn * ROWS * KEYS, *ready = own.scores + next * ROWS * KEYS;
            Element *weights = own.weights + turn * ROWS * KEYS, *softened = own.weights + next * ROWS * KEYS;
            int64_t row = 0;
            const auto soften_next = [&] {
                if (row == second.rows) return;
                shrinks[next][row] =
                    soften(softened + row * KEYS, ready + row * KEYS, second.start, second.state[row], of.a.scaling, of.a.softcap);
                row++;
            };
            for (int64_t j = 0; j < first.columns; j += BLOCK) {
                const Element *right = first.keys + j * key_width, *right2 = right + TILE * key_width;
                product.template multiply<false>(
                    first.queries, key_width, right, right2, key_width, first.rows, scores + j, KEYS, soften_next);
            }
            for (int64_t r = 0; r < third.rows; r++) of.scale(third.out + r * value_width, shrinks[turn][r]);
            for (int64_t i = 0; third.rows && i < value_width; i += BLOCK) {
                const Element *right = third.keys + KEYS * key_width + i * KEYS, *right2 = right + TILE * KEYS;
                product.template multiply<true>(
                    weights, KEYS, right, right2, third.columns, third.rows, third.out + i, value_width, soften_next);
            }
            while (row < second.rows) soften_next();
            third = second;
            second = first;
            turn = next;
        }

        void finish() {
            push({});
            push({});
        }
    };

    void scale(float* sums, float factor) const {
        if (factor == 1.0f) return;
        for (int64_t i = 0; i < value_width; i += LANES) store_lanes(sums + i, load_lanes(sums + i) * factor);
    }

    void decode() {
        std::vector<Piece> segments;
        for (int64_t part = 0; part < few * a.heads; part++)
            for (int64_t segment = 0; segment < segments_of(part / a.heads); segment++) segments.push_back({part, segment});
        const int64_t tasks = segments.size();
#pragma omp parallel num_threads(a.threads)
        {
            const Scratch& own = scratches[omp_get_thread_num()];
            Product product;
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks; task++) {
                const auto [part, segment] = segments[task];
                const int64_t s = part / a.heads, rows = a.counts[s] * a.group;
                Row state[FEW_ROWS];
                attend_few(product, s, part % a.heads, first_of(s) / SEGMENT + segment, own, state);
                for (int64_t r = 0; r < rows; r++) {
                    float* to = share_of(part, segment, r);
                    state[r].close();
                    to[0] = state[r].top;
                    to[1] = state[r].sum;
                    std::memcpy(to + 2, own.out + r * value_width, value_width * sizeof(float));
                }
            }
#pragma omp for schedule(static)
            for (int64_t part = 0; part < few * a.heads; part++) merge(part);
        }
    }

    float* share_of(int64_t part, int64_t segment, int64_t row) const {
        return shares + ((part * most_segments + segment) * most_rows + row) * (value_width + 2);
    }

    void merge(int64_t part) const {
        const int64_t s = part / a.heads;
        for (int64_t r = 0; r < a.counts[s] * a.group; r++) {
            float* sums = share_of(part, 0, r) + 2;
            Row state{sums[-2], sums[-1], 0, 0};
            for (int64_t segment = 1; segment < segments_of(s); segment++) {
                const float* more = share_of(part, segment, r);
                add(state, sums, {more[0], more[1], 0, 0}, more + 2);
            }
            finish(s, part % a.heads, r, sums, state);
        }
    }

    // Adds another segment's sums to a row's. One function, that the compiler may round in one way only.
    __attribute__((noinline)) void add(Row& state, float* sums, const Row& other, const float* more) const {
        const float top = std::max(state.top, other.top), base = top == NOTHING ? 0.0f : top;
        const float mine = power_of_two(state.top - base), theirs = power_of_two(other.top - base);
        state.top = top;
        state.sum = state.sum * mine + other.sum * theirs;
        for (int64_t i = 0; i < value_width; i++) sums[i] = sums[i] * mine + more[i] * theirs;
    }

    // One segment of one sequence's head.
    void attend_few(Product& product, int64_t s, int64_t h, int64_t segment, const Scratch& own, Row* state) const {
        const int64_t rows = a.counts[s] * a.group, unit = few_by_tiles ? BLOCK : LANES;
        const auto [low, end] = begin(state, own.few_queries, s, h, 0, rows, own.out);
        if constexpr (TILED)
            if (few_by_tiles) lay_out_keys(own.few_keys, 0, own.few_queries, key_width, key_width);
        const int64_t stop = std::min(end, (segment + 1) * SEGMENT);
        for (int64_t start = std::max(low / KEYS * KEYS, segment * SEGMENT); start < stop; start += KEYS) {
            const int64_t from = std::max(start, low / unit * unit), count = whole(std::min(stop, start + KEYS) - from, unit) / LANES;
            // Sixteen positions each lie in one page; two more are fetched ahead.
            const T *keys[KEYS / LANES + 2], *values[KEYS / LANES + 2];
            for (int64_t j = 0; j < count + 2; j++) {
                const int64_t at = from + j * LANES, seen = std::clamp(at, low / LANES * LANES, (end - 1) / LANES * LANES);
                keys[j] = key_of(s, h, seen);
                values[j] = value_of(s, h, seen);
                if (j < count && (at < low || at + LANES > end))
                    values[j] = whole_of(own.edge + (at - start) * a.value_stride, values[j], a.value_size, a.value_stride, at, low, end);
            }
            float *scores = own.scores + from - start, *out = own.out;
            const Few* weights = own.few_weights + from - start;
            if (!few_by_tiles)
                by_rows(rows, [&](auto group, int64_t r) {
                    dots<group()>(scores + r * KEYS, KEYS, own.few_queries + r * key_width, key_width, keys, !r, count, a.key_size);
                });
            else if constexpr (TILED)
                dots_by_tiles(product, scores, rows, own.few_keys, keys, count, key_width);
            for (int64_t r = 0; r < rows; r++)
                scale(
                    out + r * value_width, soften(own.few_weights + r * KEYS, own.scores + r * KEYS, start, state[r], a.scaling, a.softcap));
            if (!few_by_tiles)
                by_rows(rows, [&](auto group, int64_t r) {
                    accumulate<group()>(
                        out + r * value_width, value_width, weights + r * KEYS, KEYS, values, !r, count, a.value_size, a.value_stride);
                });
            else if constexpr (TILED)
                accumulate_by_tiles(product, out, weights, values, count, value_width, a.value_stride, own.few_values);
        }
    }

    void finish(int64_t s, int64_t h, int64_t row, const float* from, const Row& state) const {
        const int64_t t = a.rows[s] + row / a.group, head = h * a.group + row % a.group;
        float factor = 1, sum = state.sum;
        if (a.sinks) {
            const float sink = a.sinks[head] * LOG2_E, top = std::max(state.top, sink);
            factor = power_of_two(state.top - top);
            sum = sum * factor + power_of_two(sink - top);
        }
        factor /= sum;
        T* to = static_cast<T*>(a.out) + (t * a.heads * a.group + head) * a.value_size;
        for (int64_t i = 0; i < a.value_size; i++) store(to + i, from[i] * factor);
    }

    static void put(bf16* to, bf16 value) { *to = value; }
    template <typename From>
    static void put(float* to, From value) {
        *to = load(value);
    }
};

template <typename T, typename Call>
auto choose(const PagedAttention& a, Call&& call) {
#if defined(TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (tiles_granted()) return call(Attention<T, Pairs>(a));
#elif defined(__AVX512BF16__) || defined(EMULATED_TILES)
    if constexpr (std::is_same_v<T, bf16>) return call(Attention<T, Pairs>(a));
#endif
    return call(Attention<T, Singles>(a));
}

template <typename T>
void attend(const PagedAttention& a) {
    choose<T>(a, [](auto&& attention) { attention.run(); });
}

template <typename T>
int64_t bytes(const PagedAttention& a) {
    return choose<T>(a, [](auto&& attention) { return attention.bytes(); });
}

}  // namespace

extern "C" {

void inlay_paged_attention_float32(const PagedAttention* a) { attend<float>(*a); }
void inlay_paged_attention_bfloat16(const PagedAttention* a) { attend<bf16>(*a); }

// Bytes of the workspace.
int64_t inlay_paged_attention_bytes_float32(const PagedAttention* a) { return bytes<float>(*a); }
int64_t inlay_paged_attention_bytes_bfloat16(const PagedAttention* a) { return bytes<bf16>(*a); }

#ifdef __FLT16_MAX__
void inlay_paged_attention_float16(const PagedAttention* a) { attend<fp16>(*a); }
int64_t inlay_paged_attention_bytes_float16(const PagedAttention* a) { return bytes<fp16>(*a); }
#endif

}  // extern "C"
