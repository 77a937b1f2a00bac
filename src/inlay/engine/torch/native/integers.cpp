// Products in integers with weights in the blocks of GGUF files: y = x W^T + b, where each 32 inputs of a row of x are eight-bit
// integers with one scale.
//
// A row is quantised by itself; products of 32 inputs are added up as integers, exactly; and float32 adds those up in one order, the
// inputs' own, for each output. Work is divided by outputs and rows alone. So what a row gives has the same bits whatever the number
// of rows and threads, and on all CPUs. For block b of 32 inputs, with `fma` rounded once:
//     total = fma(float(sum of codes * x) * scale_x[b], scale_w[b], total), and total = fma(-min_w[b], scale_x[b] * sum_x[b], total)
// Layout: `blocks.h`. Shapes: R rows, I inputs (a multiple of 32), O outputs.

// Sums in the order that is written.
#if defined(__clang__)
#pragma clang fp reassociate(off) reciprocal(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")
#endif

#include <cstdint>

extern "C" {

struct IntegerPart {
    const uint8_t* panels;  // of ceil(O / 16) panels, codes, then scales
    int64_t outputs;
    int64_t type;
};

struct IntegerProduct {
    const void* x;             // [R, I]
    const IntegerPart* parts;  // matrices one below another
    const void* bias;          // [O] of all parts, or null
    void* out;                 // [R, O]
    int64_t rows, inputs, outputs, count;
    int32_t threads;
};

}  // extern "C"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "blocks.h"
#include "integer_lanes.h"

namespace {

// Rows of x whose codes, about as many bytes as this, go through all panels together: they stay in the second level of caches.
constexpr int64_t TOGETHER_BYTES = 1 << 18;

// Of so few rows, products are bound by memory, and take two panels at a time: the next ones of both halves of a thread's share. On a
// core of Zen 4 two runs through memory are read at its full speed (32 GB/s); with one, with four, with two that jump, or with
// instructions that fetch ahead, each of which waits in the first cache's list of misses, it was 17 to 25.
constexpr int64_t FEWEST = 2;
constexpr int TWO = 2;

// Of more, what is between two loads is too much for a core to look ahead over: codes are asked for so many bytes ahead. Products take
// four panels at a time, so that x is read once for them; or one, where sums of all rows fill the registers.
constexpr int64_t FEW = AT_ONCE / 2;
constexpr int FOUR = 4;
constexpr int64_t ahead(int panels) { return panels == 1 ? 4096 : panels == FOUR ? 2048 : 0; }

// Below it, numbers count as zero: their reciprocal may be infinite.
constexpr float LEAST = 1e-30f;

// x as integers, rows in groups of at most AT_ONCE which products take together: of a group of n rows, codes [I / 4][n][4], and of
// each block scales, scales times sums, and less the sums of its halves, and of all of it [I / 32][n].
struct Activations {
    int64_t rows, inputs, groups;
    std::vector<int8_t> codes;
    std::vector<float> scales, scaled_sums;
    std::vector<int32_t> less_sums[3];

    Activations(int64_t rows, int64_t inputs) : rows(rows), inputs(inputs), groups((rows + AT_ONCE - 1) / AT_ONCE) {}

    // The first row of a group; groups are about equal.
    int64_t first(int64_t group) const { return group * rows / groups; }

    void reserve() {
        const size_t blocks = rows * inputs / BLOCK;
        if (codes.size() < blocks * BLOCK) codes.resize(blocks * BLOCK);
        for (auto* each : {&scales, &scaled_sums})
            if (each->size() < blocks) each->resize(blocks);
        for (auto& each : less_sums)
            if (each.size() < blocks) each.resize(blocks);
    }

    template <typename T>
    void quantise(int64_t group, const T* x) {
        const int64_t start = first(group), count = first(group + 1) - start, blocks = inputs / BLOCK;
        for (int64_t r = 0; r < count; r++)
            for (int64_t b = 0; b < blocks; b++) {
                const T* from = x + (start + r) * inputs + b * BLOCK;
                int8_t found[BLOCK];
                const int64_t at = start * blocks + b * count + r;
                int32_t halves[2];
                scales[at] = quantise_block(from, found, halves);
                int8_t* to = codes.data() + start * inputs + b * BLOCK * count + r * 4;
                for (int64_t i = 0; i < BLOCK; i += 4) std::memcpy(to + i * count, found + i, 4);
                for (int part = 0; part < 3; part++) less_sums[part][at] = part < 2 ? -halves[part] : -halves[0] - halves[1];
                scaled_sums[at] = scales[at] * static_cast<float>(halves[0] + halves[1]);
            }
    }

    // Gives the scale, codes, and the sums of both halves. The largest becomes 127 or -127; what is not finite has NaN for a scale, and
    // so gives NaN.
    template <typename T>
    static float quantise_block(const T* from, int8_t* to, int32_t* halves) {
        const Lanes x[2] = {load_lanes(from), load_lanes(from + LANES)};
        // Of magnitudes, as integers: comparisons of floats lose NaN.
        const WideLanes one = reinterpret_cast<WideLanes>(x[0]) & 0x7fffffffu, two = reinterpret_cast<WideLanes>(x[1]) & 0x7fffffffu;
        const uint32_t most = largest(one > two ? one : two);
        float top;
        std::memcpy(&top, &most, sizeof(top));
        const bool finite = most < 0x7f800000u;
        const float factor = finite && top > LEAST ? 127.0f / top : 0.0f;
        for (int half = 0; half < 2; half++) halves[half] = nearest(to + half * LANES, finite ? x[half] * factor : Lanes{});
        return !finite ? std::numeric_limits<float>::quiet_NaN() : top > LEAST ? top / 127.0f : 0.0f;
    }
};

// What sums begin with, for codes that are OFFSET, a power of two, above their values; from less the sum of what they multiply.
template <typename F>
inline Ints first_sums(int32_t less_sum) {
    if constexpr (F::OFFSET == 0 || !START_AT_OFFSET<F::BITS, F::TABLE != nullptr>) return Ints{};
    return times_power(all(less_sum), __builtin_ctz(F::OFFSET + !F::OFFSET));
}

// The scales of a unit of weights, of 16 outputs or half of them; `of` gives those of one of its blocks.
template <typename F>
struct Scales {
    Floats scale, min;

    void load(const uint8_t* unit, int64_t output) {
        scale = F::BRAIN ? brains(unit + 2 * output) : halves_of(unit + 2 * output);
        if constexpr (F::MINS) min = halves_of(unit + F::MIN + 2 * output);
    }

    Scales of(const uint8_t* unit, int64_t block, int64_t output) const {
        Scales own = *this;
        if constexpr (F::SHARED == BLOCK) {
            own.scale = multiply(scale, floats(bytes_at(unit + F::FINE + block * PANEL + output)));
            if constexpr (F::MINS) own.min = multiply(min, floats(bytes_at(unit + F::FINE_MIN + block * PANEL + output)));
        }
        return own;
    }
};

// Codes of four inputs of some outputs, of step `step` of a block.
template <typename F>
inline Ints codes_at(const uint8_t* lines, int step, Ints table) {
    const Ints line = load_ints(lines + low_line<F::BITS>(step) * LINE);
    if constexpr (F::BITS == 8) return line;
    const Ints low = both(step % 2 ? right(line, 4) : line, 15);
    if constexpr (F::TABLE != nullptr) return look_up(table, low);
    if constexpr (F::BITS == 5) {
        const Ints high = load_ints(lines + high_line<F::BITS>(step) * LINE);
        return with_bits(low, step < 4 ? left(high, 4 - step) : right(high, step - 4), 16);
    }
    if constexpr (F::BITS == 6) {
        const Ints high = load_ints(lines + high_line<F::BITS>(step) * LINE);
        return with_bits(low, step % 4 < 2 ? left(high, 4 - 2 * (step % 4)) : right(high, 2 * (step % 4) - 4), 48);
    }
    return low;
}

// Where products read panels that lie `codes_stride` and `scales_stride` bytes apart.
struct Panels {
    const uint8_t *codes, *scales;
    int64_t codes_stride, scales_stride;
};

// ROWS rows, from `start` on, times PANELS panels, or halves of them from `output` on: totals [ROWS][PANELS][16].
template <typename F, int ROWS, int PANELS>
__attribute__((noinline)) void multiply_rows(const Activations& x, int64_t start, const Panels& own, int64_t output, float* to) {
    constexpr bool HALVES = F::SHARED == BLOCK / 2;
    const int64_t blocks = x.inputs / BLOCK;
    const int8_t* codes = x.codes.data() + start * x.inputs;
    const int64_t at = start * blocks;
    const float *scales = x.scales.data() + at, *scaled_sums = x.scaled_sums.data() + at;
    const int32_t *first = x.less_sums[HALVES ? 0 : 2].data() + at, *second = x.less_sums[1].data() + at;
    const uint8_t *lines = own.codes + output * 4, *unit = own.scales;
    Ints table{};
    if constexpr (F::TABLE != nullptr) table = load_table(F::TABLE);
    Floats totals[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) totals[r][p] = Floats{};
    for (int64_t block = 0; block < blocks; block += F::BLOCKS, unit += F::SCALES) {
        Scales<F> whole[PANELS];
        for (int p = 0; p < PANELS; p++) whole[p].load(unit + p * own.scales_stride, output);
#pragma GCC unroll 1
        for (int64_t within = 0; within < F::BLOCKS; within++) {
            if (ahead(PANELS))
                for (int p = 0; p < PANELS; p++)
                    for (int64_t i = 0; i < F::CODES; i += LINE) __builtin_prefetch(lines + p * own.codes_stride + ahead(PANELS) + i, 0, 2);
            Ints sums[ROWS][PANELS], kept[ROWS][PANELS];
            for (int r = 0; r < ROWS; r++)
                for (int p = 0; p < PANELS; p++) sums[r][p] = first_sums<F>(first[r]);
#pragma GCC unroll 8
            for (int step = 0; step < 8; step++) {
                Ints weights[PANELS];
                for (int p = 0; p < PANELS; p++) weights[p] = codes_at<F>(lines + p * own.codes_stride, step, table);
                if constexpr (HALVES)
                    if (step == 4)
                        for (int p = 0; p < PANELS; p++) {
                            const Ints fine = bytes_at(unit + p * own.scales_stride + F::FINE + 2 * within * PANEL + output);
                            for (int r = 0; r < ROWS; r++) {
                                kept[r][p] = multiply(sums[r][p], fine);
                                sums[r][p] = first_sums<F>(second[r]);
                            }
                        }
                for (int r = 0; r < ROWS; r++)
                    for (int p = 0; p < PANELS; p++)
                        sums[r][p] = add_products<F::BITS, F::TABLE != nullptr>(sums[r][p], weights[p], codes + (step * ROWS + r) * 4);
            }
            for (int p = 0; p < PANELS; p++) {
                const Scales<F> scale = whole[p].of(unit + p * own.scales_stride, within, output);
                const Ints fine = HALVES ? bytes_at(unit + p * own.scales_stride + F::FINE + (2 * within + 1) * PANEL + output) : Ints{};
                for (int r = 0; r < ROWS; r++) {
                    if (HALVES) sums[r][p] = add(kept[r][p], multiply(sums[r][p], fine));
                    totals[r][p] = add_product(multiply(floats(sums[r][p]), all(scales[r])), scale.scale, totals[r][p]);
                    if (F::MINS) totals[r][p] = subtract_product(scale.min, all(scaled_sums[r]), totals[r][p]);
                }
            }
            lines += F::CODES, codes += BLOCK * ROWS, scales += ROWS, scaled_sums += ROWS, first += ROWS, second += ROWS;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store_floats(to + (r * PANELS + p) * PANEL + output, totals[r][p]);
}

// Calls with `count` as a constant, of 1 to MOST.
template <int MOST, typename Use>
inline void with_count(int64_t count, Use&& use) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, use);
    use(std::integral_constant<int, MOST>());
}

// Of one matrix, PANELS panels from `panel` on, `apart` from each other, and groups [group, end) of x.
template <typename F, int PANELS, typename T>
void multiply_panels(
    const IntegerProduct& a, const IntegerPart& part, int64_t column, const Activations& x, int64_t panel, int64_t apart, int64_t group, int64_t end) {
    const int64_t codes = a.inputs / BLOCK * F::CODES, scales = a.inputs / F::INPUTS * F::SCALES;
    const Panels own{part.panels + panel * codes, scales_of<F>(part.panels, part.outputs, a.inputs) + panel * scales, apart * codes, apart * scales};
    for (; group < end; group++) {
        const int64_t row = x.first(group), rows = x.first(group + 1) - row;
        alignas(64) float totals[AT_ONCE * PANELS * PANEL];
        with_count<PANELS == 1 ? AT_ONCE : PANELS == TWO ? FEWEST : FEW>(rows, [&](auto ROWS) {
            for (int64_t output = 0; output < PANEL; output += OUTPUTS) multiply_rows<F, ROWS(), PANELS>(x, row, own, output, totals);
        });
        for (int64_t r = 0; r < rows; r++)
            for (int p = 0; p < PANELS; p++) {
                const int64_t first = (panel + p * apart) * PANEL, outputs = std::min(PANEL, part.outputs - first);
                T* to = static_cast<T*>(a.out) + (row + r) * a.outputs + column + first;
                const T* bias = a.bias ? static_cast<const T*>(a.bias) + column + first : nullptr;
                const float* from = totals + (r * PANELS + p) * PANEL;
                if (outputs == PANEL)
                    store_lanes(to, bias ? load_lanes(from) + load_lanes(bias) : load_lanes(from));
                else
                    for (int64_t o = 0; o < outputs; o++) store(to + o, bias ? from[o] + load(bias[o]) : from[o]);
            }
    }
}

// All groups of x times panels [panel, end) of a part, a few at a time.
template <typename F, int PANELS, typename T>
void multiply_few(const IntegerProduct& a, const IntegerPart& part, int64_t column, const Activations& x, int64_t panel, int64_t end) {
    const int64_t apart = (end - panel) / PANELS;
    for (int64_t i = 0; i < apart; i++) multiply_panels<F, PANELS, T>(a, part, column, x, panel + i, apart, 0, x.groups);
    for (int64_t i = panel + PANELS * apart; i < end; i++) multiply_panels<F, 1, T>(a, part, column, x, i, 0, 0, x.groups);
}

template <typename T>
void product(const IntegerProduct& a) {
    // Kept: pages that are new in every call cost more than what is written to them.
    static thread_local std::unique_ptr<Activations> memory;
    if (!a.rows) return;
    if (!memory) memory.reset(new Activations(0, 0));
    Activations& x = *memory;
    x.rows = a.rows, x.inputs = a.inputs, x.groups = (a.rows + AT_ONCE - 1) / AT_ONCE;
    x.reserve();
    const int64_t together = std::max<int64_t>(1, TOGETHER_BYTES / (AT_ONCE * a.inputs)), blocks = (x.groups + together - 1) / together;
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(static)
        for (int64_t group = 0; group < x.groups; group++) x.quantise(group, static_cast<const T*>(a.x));
        for (int64_t p = 0, column = 0; p < a.count; column += a.parts[p++].outputs)
            with_type(a.parts[p].type, [&](auto TYPE) {
                using F = Format<TYPE()>;
                const IntegerPart& part = a.parts[p];
                const int64_t panels = (part.outputs + PANEL - 1) / PANEL;
                if (a.rows <= FEW) {
                    const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
                    const int64_t first = rank * panels / size, last = (rank + 1) * panels / size;
                    if (a.rows <= FEWEST)
                        multiply_few<F, TWO, T>(a, part, column, x, first, last);
                    else
                        multiply_few<F, FOUR, T>(a, part, column, x, first, last);
                    return;
                }
#pragma omp for schedule(static) collapse(2) nowait
                for (int64_t block = 0; block < blocks; block++)
                    for (int64_t panel = 0; panel < panels; panel++)
                        multiply_panels<F, 1, T>(a, part, column, x, panel, 0, block * together, std::min(x.groups, (block + 1) * together));
            });
    }
}

}  // namespace

extern "C" {

int32_t inlay_have_integers() { return 1; }

// Bytes of the panels of a matrix [outputs, inputs]; 0 for a type, or a number of inputs, that there is no product of.
int64_t inlay_integer_panels_bytes(int32_t type, int64_t outputs, int64_t inputs) {
    int64_t found = 0;
    with_type(type, [&](auto TYPE) {
        if (inputs % Format<TYPE()>::INPUTS == 0) found = panels_bytes<TYPE()>(outputs, inputs);
    });
    return found;
}

// Lays out the blocks of a file [rows][inputs / INPUTS], of outputs from `begin` on, a multiple of PANEL, in `panels`, which are zero;
// returns the first output with a scale that is no finite number, or -1.
int64_t inlay_integer_panels(
    int32_t type, uint8_t* panels, const uint8_t* blocks, int64_t begin, int64_t rows, int64_t outputs, int64_t inputs, int32_t threads) {
    int64_t wrong = outputs;
    with_type(type, [&](auto TYPE) {
        using F = Format<TYPE()>;
        const int64_t units = inputs / F::INPUTS;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(min : wrong)
        for (int64_t first = 0; first < rows; first += PANEL)
            for (int64_t unit = 0; unit < units; unit++) {
                const int64_t count = std::min(PANEL, rows - first);
                Unpacked own[PANEL];
                if (count < PANEL) std::memset(own, 0, sizeof(own));
                for (int64_t o = 0; o < count; o++) {
                    unpack<TYPE()>(blocks + ((first + o) * units + unit) * F::FILE, own[o]);
                    if (!is_finite<TYPE()>(own[o])) wrong = std::min(wrong, begin + first + o);
                }
                const auto place = Place<uint8_t>::of<F>(panels, outputs, inputs, (begin + first) / PANEL, unit);
                put<TYPE()>(place, own);
            }
    });
    return wrong == outputs ? -1 : wrong;
}

// Rows `ids` [count] of the matrix, as float32 [count, inputs]; returns the place of an id that it does not have, or -1.
int64_t inlay_integer_rows(
    int32_t type, const uint8_t* panels, const int64_t* ids, int64_t count, int64_t outputs, int64_t inputs, float* out, int32_t threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= outputs) return i;
    with_type(type, [&](auto TYPE) {
        using F = Format<TYPE()>;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
        for (int64_t i = 0; i < count; i++)
            for (int64_t unit = 0; unit < inputs / F::INPUTS; unit++) {
                Unpacked block;
                take<TYPE()>(Place<const uint8_t>::of<F>(panels, outputs, inputs, ids[i] / PANEL, unit), ids[i] % PANEL, block);
                dequantise<TYPE()>(block, out + i * inputs + unit * F::INPUTS);
            }
    });
    return -1;
}

void inlay_integer_product_float32(const IntegerProduct* a) { product<float>(*a); }
void inlay_integer_product_bfloat16(const IntegerProduct* a) { product<bf16>(*a); }

}  // extern "C"

#else

extern "C" {

int32_t inlay_have_integers() { return 0; }
int64_t inlay_integer_panels_bytes(int32_t, int64_t, int64_t) { return 0; }
int64_t inlay_integer_panels(int32_t, uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, int32_t) { return -1; }
int64_t inlay_integer_rows(int32_t, const uint8_t*, const int64_t*, int64_t, int64_t, int64_t, float*, int32_t) { return -1; }
void inlay_integer_product_float32(const IntegerProduct*) {}
void inlay_integer_product_bfloat16(const IntegerProduct*) {}

}  // extern "C"

#endif
