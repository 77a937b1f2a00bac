// All layers of an encoder of BERT's kind (norms after the residual, GELU, learned positions) over sequences laid end to end; of
// MPNet's, whose scores have a bias for each distance, too.
//
// A thread takes sequences of about CHUNK positions through all layers, so that what lies between two products stays in its
// cache and no thread waits for another. Where there are fewer such chunks than threads, all work on one, and wait for each
// other after every step.
//
// Products of float32 are made of eight of signed bytes (`Digits`), or to about 16 bits of three of bfloat16, of which two hold 8
// bits of a float32 each (Henry, Tang and Heinecke, arXiv 1904.06376).
//
// Shapes: T positions, S sequences, C hidden size, I inner size, D head size; C, I and D are multiples of 32.

#include <algorithm>
#include <atomic>
#include <omp.h>
#include <sched.h>
#include <vector>

#include "activations.h"

extern "C" {

// Weights are packed for tiles, as `Activations` say.
struct EncoderLayer {
    const void *qkv, *out, *up, *down;
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;
    const float *attention_norm, *attention_norm_bias, *norm, *norm_bias;
};

struct Encode {
    const EncoderLayer* layers;
    const float *first_norm, *first_norm_bias;  // before the layers, or null
    const void *words, *places, *types;         // [.., C] of embeddings, bfloat16 or float32
    const float* distances;  // [heads, 2 reach - 1], what each distance of two positions adds to scores; or null
    const int64_t* ids;      // [T], whose embeddings go in; null where `states` holds what goes in
    const int64_t* seconds;  // [S], from which positions of a sequence have the second type; null where none has
    const int64_t* starts;   // [S + 1], of the sequences, and T
    float* states;          // [T, C], what goes in and what comes out
    void* workspace;        // of as many bytes as `inlay_encode_bytes_*` says, at a multiple of 64
    int64_t num_layers, sequences, hidden, inner, heads, first_place, reach;
    float eps;
    int32_t threads;
};

}  // extern "C"

namespace {

// Positions that share a reading of all weights.
constexpr int64_t CHUNK = 512;
// Positions to a thread from which threads divide positions among them, not columns.
constexpr int64_t OWN_ROWS = 64;

// Turns scores into what is to be divided by their sum, which it gives. What lies beyond `count` becomes next to nothing. `bias` is
// added before scores are scaled; it may be null.
template <typename T>
float soften(T* to, float* scores, const float* bias, int64_t count, int64_t padded, float scaling) {
    if (bias)
        for (int64_t i = 0; i < count; i++) scores[i] += bias[i];
    std::fill(scores + count, scores + padded, -INFINITY);
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < padded; i++) top = scores[i] > top ? scores[i] : top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < padded; i++) {
        scores[i] = exponential((scores[i] - top) * scaling);
        sum += scores[i];
    }
    for (int64_t i = 0; i < padded; i += LANES) store_lanes(to + i, load_lanes(scores + i));
    return sum;
}

// One head of one sequence. `query`, `key` and `value` are of its first position; positions are `stride` apart. `bias` is of the
// distance 0, or null.
template <typename T>
struct Head {
    const T *query, *key, *value;
    const float* bias;
    int64_t stride, length, size;

    // Of the positions that one sees, from the first on.
    const float* bias_of(int64_t row) const { return bias ? bias - row : nullptr; }
};

inline int64_t attention_bytes(int64_t longest, int64_t size) {
    const int64_t padded = whole(longest, BLOCK);
    return padded * size * 4 + BLOCK * padded * 8 + BLOCK * size * 4 + 64 * 8;
}

// By tiles, in bfloat16; probabilities are rounded before they are multiplied, as everyone does.
template <typename Put>
void attend(Tiles& tiles, const Head<bf16>& head, char* scratch, Put&& put) {
    const int64_t length = head.length, size = head.size, padded = whole(length, BLOCK);
    const float scaling = 1.0f / std::sqrt(static_cast<float>(size));
    Arena arena{scratch};
    uint32_t* keys = arena.take<uint32_t>(padded * size / 2);
    uint32_t* values = arena.take<uint32_t>(padded * size / 2);
    float* scores = arena.take<float>(BLOCK * padded);
    bf16* weights = arena.take<bf16>(BLOCK * padded);
    float* out = arena.take<float>(BLOCK * BLOCK);
    float sums[BLOCK];
    std::memset(keys, 0, padded * size * 2);
    std::memset(values, 0, padded * size * 2);
    // Keys are columns of the one product, and values rows of the other.
    for (int64_t j = 0; j < length; j++) {
        uint32_t* to = keys + (j / TILE) * (size / 2) * TILE + j % TILE;
        const bf16* from = head.key + j * head.stride;
        for (int64_t pair = 0; pair < size / 2; pair++) std::memcpy(to + pair * TILE, from + 2 * pair, 4);
    }
    for (int64_t j = 0; j < length; j += 2) {
        const bf16 *from = head.value + j * head.stride, *from2 = j + 1 < length ? from + head.stride : nullptr;
        for (int64_t group = 0; group < size / TILE; group++) {
            uint32_t* to = values + (group * (padded / 2) + j / 2) * TILE;
            for (int64_t i = 0; i < TILE; i++) to[i] = from[group * TILE + i].bits;
            if (from2)
                for (int64_t i = 0; i < TILE; i++) to[i] |= static_cast<uint32_t>(from2[group * TILE + i].bits) << 16;
        }
    }
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, length - first);
        const bool both = rows > TILE;
        for (int64_t j = 0; j < padded; j += BLOCK) {
            const bf16* right = reinterpret_cast<const bf16*>(keys + j * size / 2);
            tiles.clear();
            tiles.add(head.query + first * head.stride, head.stride, 0, right, right + TILE * size, 0, size / BLOCK, both);
            tiles.save(scores + j, padded, both);
        }
        for (int64_t row = 0; row < rows; row++)
            sums[row] = soften(weights + row * padded, scores + row * padded, head.bias_of(first + row), length, padded, scaling);
        for (int64_t column = 0; column < size; column += BLOCK) {
            const bf16* right = reinterpret_cast<const bf16*>(values + column * (padded / 2));
            tiles.clear();
            tiles.add(weights, padded, 0, right, right + TILE * padded, 0, padded / BLOCK, both);
            tiles.save(out, BLOCK, both);
            for (int64_t row = 0; row < rows; row++) {
                const float* own = out + row * BLOCK;
                const float factor = 1.0f / sums[row];
                put(first + row, column, load_lanes(own) * factor);
                put(first + row, column + LANES, load_lanes(own + LANES) * factor);
            }
        }
    }
}

// In float32, six queries at a time.
template <typename Put>
void attend(Tiles&, const Head<float>& head, char* scratch, Put&& put) {
    constexpr int ROWS = 6;
    const int64_t length = head.length, size = head.size, padded = whole(length, BLOCK);
    const float scaling = 1.0f / std::sqrt(static_cast<float>(size));
    Arena arena{scratch};
    float* keys = arena.take<float>(padded * size);
    float* scores = arena.take<float>(ROWS * padded);
    for (int64_t i = 0; i < size; i++) {
        float* to = keys + i * padded;
        for (int64_t j = 0; j < length; j++) to[j] = head.key[j * head.stride + i];
        std::fill(to + length, to + padded, 0.0f);
    }
    for (int64_t first = 0; first < length; first += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, length - first);
        const float* queries[ROWS];
        float sums[ROWS];
        for (int64_t row = 0; row < ROWS; row++) queries[row] = head.query + (first + std::min(row, rows - 1)) * head.stride;
        for (int64_t j = 0; j < padded; j += BLOCK) {
            Lanes found[ROWS][2] = {};
            for (int64_t i = 0; i < size; i++) {
                const Lanes k = load_lanes(keys + i * padded + j), k2 = load_lanes(keys + i * padded + j + LANES);
                for (int row = 0; row < ROWS; row++) {
                    found[row][0] += queries[row][i] * k;
                    found[row][1] += queries[row][i] * k2;
                }
            }
            for (int row = 0; row < ROWS; row++) std::memcpy(scores + row * padded + j, found[row], sizeof(found[row]));
        }
        for (int64_t row = 0; row < ROWS; row++) {
            float* own = scores + row * padded;
            sums[row] = soften(own, own, head.bias_of(std::min(first + row, length - 1)), length, padded, scaling);
        }
        for (int64_t column = 0; column < size; column += BLOCK) {
            Lanes found[ROWS][2] = {};
            for (int64_t j = 0; j < length; j++) {
                const float* from = head.value + j * head.stride + column;
                const Lanes v = load_lanes(from), v2 = load_lanes(from + LANES);
                for (int row = 0; row < ROWS; row++) {
                    const float weight = scores[row * padded + j];
                    found[row][0] += weight * v;
                    found[row][1] += weight * v2;
                }
            }
            for (int64_t row = 0; row < rows; row++) {
                const float factor = 1.0f / sums[row];
                put(first + row, column, found[row][0] * factor);
                put(first + row, column + LANES, found[row][1] * factor);
            }
        }
    }
}

// Mean and variance of one position's states, in place.
inline void normalise(float* x, const float* weight, const float* bias, float eps, int64_t size) {
    float sum = 0, squares = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    const float mean = sum / size;
    for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; i++) x[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

struct Chunk {
    int64_t first, last;  // sequences
};

// Where threads wait for each other for microseconds: OpenMP's barrier sleeps when it is told to spin little, as engines tell it
// to. Whoever waits longer gives way.
class Meeting {
public:
    void wait(int size) {
        const int round = rounds.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            rounds.store(round + 1, std::memory_order_release);
            return;
        }
        for (int64_t looks = 0; rounds.load(std::memory_order_acquire) == round; looks++)
            if (looks > PATIENCE) sched_yield();
    }

private:
    static constexpr int64_t PATIENCE = 20000;
    std::atomic<int> arrived{0}, rounds{0};
};

// What lies between the steps of a chunk of `rows` positions.
template <typename Activations>
struct Between {
    using State = typename Activations::State;
    Activations input, attended, inner;
    // [rows][heads][3][D] of queries, keys and values; what a product adds to the states; states where threads share columns.
    State* qkv;
    float *sums, *states;

    // `first` is another thread's, for threads that work on one chunk.
    static Between of(Arena& arena, const Encode& a, int64_t rows, const Between* first) {
        // Tiles read whole blocks of rows.
        rows = whole(rows, BLOCK) + BLOCK;
        return {
            Activations::of(arena, rows, a.hidden),
            first ? first->attended.beside(arena) : Activations::of(arena, rows, a.hidden),
            first ? first->inner.beside(arena) : Activations::of(arena, rows, a.inner),
            first ? first->qkv : arena.take<State>(rows * 3 * a.hidden),
            first ? first->sums : arena.take<float>(rows * a.hidden),
            arena.take<float>(std::min(rows, a.threads * OWN_ROWS) * a.hidden)};
    }
};

// One thread's part of taking a chunk through all layers.
//
// Threads that share columns each have the states of all positions and make the same of them: what another core wrote comes
// slowly, so only results of products are exchanged.
template <typename Activations>
class Pass {
    using State = typename Activations::State;

public:
    Pass(const Encode& a, Chunk chunk, Between<Activations> between, char* scratch, Meeting& meeting, int rank, int size)
        : a(a), chunk(chunk), between(between), scratch(scratch), meeting(meeting), rank(rank), size(size), base(a.starts[chunk.first]),
          rows(a.starts[chunk.last] - base), by_columns(size > 1 && rows < size * OWN_ROWS),
          states(by_columns ? between.states : a.states + base * a.hidden) {
        const int64_t share = by_columns ? rows : whole((rows + size - 1) / size, BLOCK);
        low = by_columns ? 0 : std::min(rows, rank * share);
        high = std::min(rows, low + share);
    }

    void run() {
        if (a.ids)
            embed();
        else if (by_columns)
            std::memcpy(states, a.states + base * a.hidden, rows * a.hidden * sizeof(float));
        for (int64_t row = low; row < high; row++) {
            if (a.first_norm) normalise(state(row), a.first_norm, a.first_norm_bias, a.eps, a.hidden);
            put(row);
        }
        for (int64_t layer = 0; layer < a.num_layers; layer++) {
            const EncoderLayer& l = a.layers[layer];
            // A thread that has columns has those of its heads.
            product(between.input, l.qkv, l.qkv_bias, 3 * a.hidden, 3 * a.hidden / a.heads, [&](int64_t row, int64_t column, Lanes found) {
                store_lanes(between.qkv + row * 3 * a.hidden + column, found);
            });
            if (!by_columns) wait();
            attention();
            wait();
            rest(l);
        }
        if (by_columns && rank == 0) std::memcpy(a.states + base * a.hidden, states, rows * a.hidden * sizeof(float));
    }

private:
    const Encode& a;
    Chunk chunk;
    Between<Activations> between;
    char* scratch;
    Meeting& meeting;
    int rank, size;
    int64_t base, rows, low, high;
    bool by_columns;
    float* states;
    Tiles tiles;

    float* state(int64_t row) { return states + row * a.hidden; }

    void wait() {
        if (size > 1) meeting.wait(size);
    }

    // Where every thread has a part of every position.
    void agree() {
        if (by_columns) wait();
    }

    void settle(Activations& full) {
        for (int64_t row = low; row < high; row++) full.settle(row);
    }

    // Embeddings of ids, of their places, and of their types.
    void embed() {
        const auto *words = static_cast<const State*>(a.words), *places = static_cast<const State*>(a.places);
        const auto* types = static_cast<const State*>(a.types);
        for (int64_t s = chunk.first; s < chunk.last; s++)
            for (int64_t at = std::max(a.starts[s], base + low); at < std::min(a.starts[s + 1], base + high); at++) {
                const int64_t place = at - a.starts[s];
                const State *word = words + a.ids[at] * a.hidden, *own = places + (a.first_place + place) * a.hidden;
                const State* type = types + (a.seconds && place >= a.seconds[s] ? a.hidden : 0);
                for (int64_t i = 0; i < a.hidden; i += LANES)
                    store_lanes(state(at - base) + i, load_lanes(word + i) + load_lanes(own + i) + load_lanes(type + i));
            }
    }

    void put(int64_t row) {
        for (int64_t column = 0; column < a.hidden; column += LANES) between.input.put(row, column, load_lanes(state(row) + column));
        between.input.settle(row);
    }

    // `unit` columns, a multiple of 32, are one thread's.
    template <typename End>
    void product(const Activations& left, const void* weight, const float* bias, int64_t columns, int64_t unit, End&& end) {
        const int64_t units = columns / unit, start = by_columns ? units * rank / size * unit : 0;
        const int64_t stop = by_columns ? units * (rank + 1) / size * unit : columns;
        left.product(tiles, low, high, weight, start, stop, [&](int64_t row, int64_t column, Lanes found) {
            end(row, column, found + load_lanes(bias + column));
        });
    }

    void attention() {
        if (!by_columns) {
            const int64_t items = (chunk.last - chunk.first) * a.heads;
            for (int64_t item = rank; item < items; item += size) attend_head(chunk.first + item / a.heads, item % a.heads);
            return;
        }
        for (int64_t sequence = chunk.first; sequence < chunk.last; sequence++)
            for (int64_t head = a.heads * rank / size; head < a.heads * (rank + 1) / size; head++) attend_head(sequence, head);
    }

    void attend_head(int64_t sequence, int64_t head) {
        const int64_t head_size = a.hidden / a.heads, first = a.starts[sequence] - base;
        const State* own = between.qkv + first * 3 * a.hidden + head * 3 * head_size;
        const float* bias = a.distances ? a.distances + head * (2 * a.reach - 1) + a.reach - 1 : nullptr;
        const int64_t length = a.starts[sequence + 1] - a.starts[sequence];
        const Head<State> given{own, own + head_size, own + 2 * head_size, bias, 3 * a.hidden, length, head_size};
        attend(tiles, given, scratch, [&](int64_t row, int64_t at, Lanes found) {
            between.attended.put(first + row, head * head_size + at, found);
        });
    }

    // All of a layer after its attention.
    void rest(const EncoderLayer& l) {
        settle(between.attended);
        add(between.attended, l.out, l.out_bias, l.attention_norm, l.attention_norm_bias);
        product(between.input, l.up, l.up_bias, a.inner, BLOCK, [&](int64_t row, int64_t column, Lanes found) {
            between.inner.put(row, column, Activations::activate(found));
        });
        agree();
        settle(between.inner);
        add(between.inner, l.down, l.down_bias, l.norm, l.norm_bias);
    }

    // Adds a product to the states and normalises them.
    void add(const Activations& left, const void* weight, const float* bias, const float* scale, const float* shift) {
        product(left, weight, bias, a.hidden, BLOCK, [&](int64_t row, int64_t column, Lanes found) {
            store_lanes(between.sums + row * a.hidden + column, found);
        });
        agree();
        for (int64_t row = low; row < high; row++) {
            float* to = state(row);
            const float* sums = between.sums + row * a.hidden;
            for (int64_t i = 0; i < a.hidden; i += LANES) store_lanes(to + i, load_lanes(to + i) + load_lanes(sums + i));
            normalise(to, scale, shift, a.eps, a.hidden);
            put(row);
        }
    }
};

// How a batch is divided, and where its parts lie.
struct Plan {
    std::vector<Chunk> chunks;
    int64_t rows = 0, longest = 0;
    bool together;

    explicit Plan(const Encode& a) {
        for (int64_t s = 0; s < a.sequences; s++) {
            const int64_t length = a.starts[s + 1] - a.starts[s];
            if (chunks.empty() || a.starts[s + 1] - a.starts[chunks.back().first] > CHUNK) chunks.push_back({s, s});
            chunks.back().last = s + 1;
            rows = std::max(rows, a.starts[s + 1] - a.starts[chunks.back().first]);
            longest = std::max(longest, length);
        }
        together = static_cast<int64_t>(chunks.size()) < a.threads;
    }
};

// Bytes of what one thread alone uses.
inline int64_t scratch_bytes(const Encode& a, const Plan& plan) { return whole(attention_bytes(plan.longest, a.hidden / a.heads), 64); }

template <typename Activations>
int64_t bytes(const Encode& a) {
    const Plan plan(a);
    Arena arena{nullptr};
    const auto first = Between<Activations>::of(arena, a, plan.rows, nullptr);
    for (int thread = 1; thread < a.threads; thread++) Between<Activations>::of(arena, a, plan.rows, plan.together ? &first : nullptr);
    return reinterpret_cast<int64_t>(arena.at) + scratch_bytes(a, plan) * a.threads;
}

template <typename Activations>
void encode(const Encode& a) {
    tiles_granted();
    const Plan plan(a);
    Arena arena{static_cast<char*>(a.workspace)};
    std::vector<char*> scratches;
    std::vector<Between<Activations>> betweens;
    for (int thread = 0; thread < a.threads; thread++) {
        scratches.push_back(arena.take<char>(scratch_bytes(a, plan)));
        betweens.push_back(Between<Activations>::of(arena, a, plan.rows, thread && plan.together ? &betweens[0] : nullptr));
    }
    const int64_t chunks = plan.chunks.size();
    Meeting meeting;
    if (plan.together) {
#pragma omp parallel num_threads(a.threads)
        for (const Chunk chunk : plan.chunks) {
            const int rank = omp_get_thread_num();
            Pass<Activations>(a, chunk, betweens[rank], scratches[rank], meeting, rank, omp_get_num_threads()).run();
            meeting.wait(omp_get_num_threads());
        }
    } else {
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, 1)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int thread = omp_get_thread_num();
            Pass<Activations>(a, plan.chunks[chunk], betweens[thread], scratches[thread], meeting, 0, 1).run();
        }
    }
}

}  // namespace

extern "C" {

// Whether this CPU has tiles and this process may use them: 1; 0 where loops stand for them; -1 where it may not.
int32_t inlay_tiles() { return tiles_granted() ? 1 : TILES_COMPILED ? -1 : 0; }

// Whether this CPU has vectors of sixteen float32.
int32_t inlay_wide() {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

void inlay_encode_0(const Encode* a) { encode<Plain>(*a); }
void inlay_encode_1(const Encode* a) { encode<Split<1>>(*a); }
void inlay_encode_2(const Encode* a) { encode<Split<2>>(*a); }
void inlay_encode_3(const Encode* a) { encode<Digits>(*a); }

// Bytes of the workspace.
int64_t inlay_encode_bytes_0(const Encode* a) { return bytes<Plain>(*a); }
int64_t inlay_encode_bytes_1(const Encode* a) { return bytes<Split<1>>(*a); }
int64_t inlay_encode_bytes_2(const Encode* a) { return bytes<Split<2>>(*a); }
int64_t inlay_encode_bytes_3(const Encode* a) { return bytes<Digits>(*a); }

}  // extern "C"
