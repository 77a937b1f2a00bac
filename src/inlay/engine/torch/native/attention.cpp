// Attention over pages of keys and values: online softmax over blocks of 128 positions (FlashAttention, arXiv 2205.14135).
//
// The queries of all heads that share keys are rows, position after position. Prompts: a tile is 32 rows; its scores, weights and
// sums stay in a core's first caches, and keys and values of a block are laid out once a call as products want them, for all
// tiles. Decoding: up to 16 rows of a sequence read keys and values where they lie, once for every four.
//
// Blocks begin at multiples of 128 of the position in the sequence, what a row does not see weighs exactly zero, and rows do not
// touch each other. So a position of a prompt has the same bits whatever chunk it comes in.
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
};

}  // extern "C"

namespace {

constexpr int64_t ROWS = BLOCK;
// Keys and values that are laid out before tiles attend to them: more when one sequence's head alone is more.
constexpr int64_t WAVE_BYTES = 8 << 20;
// Rows of a sequence that decodes for which nothing is laid out: with more, what is laid out pays.
constexpr int64_t FEW_ROWS = 16;

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

public:
    explicit Attention(const PagedAttention& a)
        : a(a), key_width(whole(a.key_size, BLOCK)), value_width(whole(a.value_size, BLOCK)), block_size(KEYS * (key_width + value_width)) {
        while (few < a.decoding && a.counts[few] * a.group <= FEW_ROWS) most_rows = std::max(most_rows, a.counts[few++] * a.group);
        // Enough tasks that all threads end at about the same time.
        if (few && a.threads > 1) splits = std::max<int64_t>(1, (4 * a.threads + few * a.heads - 1) / (few * a.heads));
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
        float *scores, *out, *found;
    };

    // Of a row: its greatest score, the sum of its weights, and which positions it sees.
    struct Row {
        float top, sum;
        int64_t low, end;
    };

    const PagedAttention& a;
    const int64_t key_width, value_width, block_size;
    // Sequences that decode with few rows, the most rows of one, and the shares into which each one's blocks are divided.
    int64_t few = 0, most_rows = 0, splits = 1;
    int64_t wave;
    Element* laid_out = nullptr;
    std::vector<Scratch> scratches;
    float* shares = nullptr;

    void place(Arena& arena) {
        laid_out = arena.take<Element>(wave);
        shares = arena.take<float>(splits > 1 ? few * a.heads * splits * most_rows * (value_width + 2) : 0);
        for (int thread = 0; thread < a.threads; thread++)
            scratches.push_back(
                {arena.take<Element>(ROWS * key_width), arena.take<Element>(ROWS * KEYS), arena.take<Few>(FEW_ROWS * key_width),
                 arena.take<Few>(FEW_ROWS * KEYS), arena.take<T>(KEYS * a.value_size), arena.take<float>(ROWS * KEYS),
                 arena.take<float>(ROWS * value_width), arena.take<float>(ROWS * BLOCK)});
    }

    int64_t start_of(int64_t s) const { return a.contexts[s] - a.counts[s]; }
    // The first position that a query at `position` sees, and that any of a sequence does.
    int64_t low_of(int64_t position) const { return a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0; }
    int64_t first_of(int64_t s) const { return low_of(start_of(s)); }
    int64_t blocks_of(int64_t s) const { return (a.contexts[s] + KEYS - 1) / KEYS - first_of(s) / KEYS; }

    void attend_to(const std::vector<Part>& parts) {
        std::vector<Piece> blocks, tiles;
        for (int64_t p = 0; p < static_cast<int64_t>(parts.size()); p++) {
            for (int64_t block = 0; block < parts[p].blocks; block++) blocks.push_back({p, block});
            // The last see most: longest first.
            const int64_t rows = a.counts[parts[p].sequence] * a.group;
            for (int64_t row = (rows - 1) / ROWS * ROWS; row >= 0; row -= ROWS) tiles.push_back({p, row});
        }
        const int64_t num_blocks = blocks.size(), num_tiles = tiles.size();
#pragma omp parallel num_threads(a.threads)
        {
            Product product;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_blocks; i++) lay_out(parts[blocks[i].part], blocks[i].at);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_tiles; i++) attend(product, parts[tiles[i].part], tiles[i].at, scratches[omp_get_thread_num()]);
        }
    }

    void lay_out(const Part& part, int64_t block) const {
        const int64_t start = (part.first_block + block) * KEYS;
        // Neither what lies behind the sequence's end nor what has left a window may be read: it may be anything.
        const int64_t low = std::max(start, first_of(part.sequence)), high = std::min<int64_t>(start + KEYS, a.contexts[part.sequence]);
        Element* keys = laid_out + part.at + block * block_size;
        Element* values = keys + KEYS * key_width;
        if (high - low < KEYS || key_width > a.key_size || value_width > a.value_size)
            std::memset(static_cast<void*>(keys), 0, block_size * sizeof(Element));
        for (int64_t at = low; at < high; at++) {
            lay_out_key(keys, at - start, key_of(part.sequence, part.head, at), a.key_size, key_width);
            lay_out_value(values, at - start, value_of(part.sequence, part.head, at), a.value_size);
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
        const int64_t s = part.sequence, rows = std::min(ROWS, a.counts[s] * a.group - first);
        Row state[ROWS];
        std::memset(static_cast<void*>(own.queries + rows * key_width), 0, (ROWS - rows) * key_width * sizeof(Element));
        std::memset(static_cast<void*>(own.weights + rows * KEYS), 0, (ROWS - rows) * KEYS * sizeof(Element));
        const auto [low, end] = begin(state, own.queries, s, part.head, first, rows, own.out);
        for (int64_t block = low / KEYS; block * KEYS < end; block++) {
            const int64_t start = block * KEYS, columns = whole(std::min(KEYS, end - start), BLOCK);
            const Element* keys = laid_out + part.at + (block - part.first_block) * block_size;
            const Element* values = keys + KEYS * key_width;
            for (int64_t j = 0; j < columns; j += BLOCK) {
                const Element* right = keys + j * key_width;
                product(own.queries, key_width, right, right + TILE * key_width, key_width, rows, own.scores + j, KEYS);
            }
            float shrinks[ROWS];
            for (int64_t r = 0; r < rows; r++) shrinks[r] = soften(own.weights + r * KEYS, own.scores + r * KEYS, start, state[r]);
            for (int64_t i = 0; i < value_width; i += BLOCK) {
                const Element* right = values + i * KEYS;
                product(own.weights, KEYS, right, right + TILE * KEYS, columns, rows, own.found, BLOCK);
                for (int64_t r = 0; r < rows; r++) {
                    float* to = own.out + r * value_width + i;
                    const float* more = own.found + r * BLOCK;
                    store_lanes(to, load_lanes(to) * shrinks[r] + load_lanes(more));
                    store_lanes(to + LANES, load_lanes(to + LANES) * shrinks[r] + load_lanes(more + LANES));
                }
            }
        }
        for (int64_t r = 0; r < rows; r++) finish(s, part.head, first + r, own.out + r * value_width, state[r]);
    }

    void decode() {
        const int64_t tasks = few * a.heads * splits;
#pragma omp parallel num_threads(a.threads)
        {
            const Scratch& own = scratches[omp_get_thread_num()];
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks; task++) attend_few(task / splits / a.heads, task / splits % a.heads, task % splits, own);
            if (splits > 1) {
#pragma omp for schedule(static)
                for (int64_t task = 0; task < few * a.heads; task++) merge(task / a.heads, task % a.heads);
            }
        }
    }

    float* share_of(int64_t s, int64_t h, int64_t split, int64_t row) const {
        return shares + (((s * a.heads + h) * splits + split) * most_rows + row) * (value_width + 2);
    }

    // One share of the blocks of one sequence's head.
    void attend_few(int64_t s, int64_t h, int64_t split, const Scratch& own) const {
        const int64_t rows = a.counts[s] * a.group;
        Row state[FEW_ROWS];
        const auto [low, end] = begin(state, own.few_queries, s, h, 0, rows, own.out);
        const int64_t first = low / KEYS, share = ((end + KEYS - 1) / KEYS - first + splits - 1) / splits;
        const int64_t stop = std::min(end, (first + (split + 1) * share) * KEYS);
        for (int64_t start = (first + split * share) * KEYS; start < stop; start += KEYS) {
            const int64_t from = std::max(start, low / LANES * LANES), to = std::min(stop, start + KEYS);
            for (int64_t at = from, count; at < to; at += count) {
                count = run_of(at, to);
                const T *keys = key_of(s, h, at), *next = at + count < end ? key_of(s, h, at + count) : nullptr;
                by_rows(rows, [&](auto group, int64_t r) {
                    dots<group()>(
                        own.scores + r * KEYS + at - start, KEYS, own.few_queries + r * key_width, key_width, keys, r ? nullptr : next, count,
                        a.key_size);
                });
            }
            float shrinks[FEW_ROWS];
            for (int64_t r = 0; r < rows; r++) shrinks[r] = soften(own.few_weights + r * KEYS, own.scores + r * KEYS, start, state[r]);
            for (int64_t at = from, count; at < to; at += count) {
                count = run_of(at, to);
                const T *values = value_of(s, h, at), *next = at + count < end ? value_of(s, h, at + count) : nullptr;
                int64_t stride = a.value_stride;
                if (at < low || at + count > end) {
                    // What is no value of this sequence may be anything, and zero times that is not zero.
                    std::memset(static_cast<void*>(own.edge), 0, count * a.value_size * sizeof(T));
                    for (int64_t j = std::max(at, low); j < std::min(at + count, end); j++)
                        std::memcpy(own.edge + (j - at) * a.value_size, values + (j - at) * stride, a.value_size * sizeof(T));
                    values = own.edge;
                    stride = a.value_size;
                }
                by_rows(rows, [&](auto group, int64_t r) {
                    accumulate<group()>(
                        own.out + r * value_width, value_width, shrinks + r, own.few_weights + r * KEYS + at - start, KEYS, values,
                        r ? nullptr : next, count, a.value_size, stride);
                });
                std::fill(shrinks, shrinks + rows, 1.0f);
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            if (splits == 1) {
                finish(s, h, r, own.out + r * value_width, state[r]);
                continue;
            }
            float* to = share_of(s, h, split, r);
            to[0] = state[r].top;
            to[1] = state[r].sum;
            std::memcpy(to + 2, own.out + r * value_width, value_width * sizeof(float));
        }
    }

    // Positions from `at` on that lie in one page: whole sixteens, of which the last may lie past `to`.
    int64_t run_of(int64_t at, int64_t to) const { return std::min(a.page_size - at % a.page_size, whole(to - at, LANES)); }

    template <typename Do>
    static void by_rows(int64_t rows, Do&& run) {
        int64_t r = 0;
        for (; rows - r >= 4; r += 4) run(std::integral_constant<int, 4>(), r);
        for (; rows - r >= 2; r += 2) run(std::integral_constant<int, 2>(), r);
        if (r < rows) run(std::integral_constant<int, 1>(), r);
    }

    void merge(int64_t s, int64_t h) const {
        for (int64_t r = 0; r < a.counts[s] * a.group; r++) {
            float* out = share_of(s, h, 0, r) + 2;
            Row state{out[-2], out[-1], 0, 0};
            for (int64_t split = 1; split < splits; split++) {
                const float* more = share_of(s, h, split, r);
                const float top = std::max(state.top, more[0]), base = top == NOTHING ? 0.0f : top;
                const float mine = power_of_two(state.top - base), theirs = power_of_two(more[0] - base);
                state.top = top;
                state.sum = state.sum * mine + more[1] * theirs;
                for (int64_t i = 0; i < value_width; i++) out[i] = out[i] * mine + more[2 + i] * theirs;
            }
            finish(s, h, r, out, state);
        }
    }

    // Turns a row's scores against the block at `start` into weights: zero for what it does not see. Gives the factor of what came
    // before.
    template <typename To>
    float soften(To* to, const float* scores, int64_t start, Row& row) const {
        constexpr int64_t VECTORS = KEYS / LANES;
        Lanes x[VECTORS], most = Lanes{} + row.top;
        const float factor = a.softcap > 0 ? a.scaling / a.softcap : a.scaling * LOG2_E;
        for (int64_t v = 0; v < VECTORS; v++) x[v] = load_lanes(scores + v * LANES) * factor;
        if (a.softcap > 0)
            for (int64_t v = 0; v < VECTORS; v++)
                for (int64_t i = 0; i < LANES; i++) x[v][i] = a.softcap * LOG2_E * std::tanh(x[v][i]);
        if (row.low > start || row.end < start + KEYS) hide(x, row.low - start, row.end - start);
        for (int64_t v = 0; v < VECTORS; v++) most = x[v] > most ? x[v] : most;
        const float before = row.top, top = row.top = greatest_lane(most);
        // Nothing seen yet: not a number less itself would be.
        const float base = top == NOTHING ? 0.0f : top;
        Lanes total = {};
        for (int64_t v = 0; v < VECTORS; v++) {
            const Lanes weight = power_of_two(x[v] - base);
            total += weight;
            store_lanes(to + v * LANES, weight);
        }
        const float shrink = power_of_two(before - base);
        row.sum = row.sum * shrink + sum_lanes(total);
        return shrink;
    }

    static void hide(Lanes* x, int64_t low, int64_t end) {
        float values[KEYS];
        std::memcpy(values, x, sizeof(values));
        for (int64_t j = 0; j < KEYS; j++) values[j] = j < low || j >= end ? NOTHING : values[j];
        std::memcpy(static_cast<void*>(x), values, sizeof(values));
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
#if defined(__AMX_BF16__)
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
