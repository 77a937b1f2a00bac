// A product of three signed digits alone, as an encoder's layers make it.

#include "activations.h"

// out [rows, outputs] of x [rows, inputs] and a packed weight; `workspace` of as many bytes as `product_bytes` says.
extern "C" int64_t product_bytes(int64_t rows, int64_t inputs) {
    Arena arena{nullptr};
    Digits::of(arena, whole(rows, BLOCK), inputs);
    return reinterpret_cast<int64_t>(arena.at) + 64;
}

extern "C" void product(const float* x, const void* weight, float* out, char* workspace, int64_t rows, int64_t inputs, int64_t outputs) {
    tiles_granted();
    Tiles tiles;
    Arena arena{workspace + 64 - reinterpret_cast<intptr_t>(workspace) % 64};
    Digits left = Digits::of(arena, whole(rows, BLOCK), inputs);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < inputs; i += LANES) left.put(row, i, load_lanes(x + row * inputs + i));
        left.settle(row);
    }
    left.product(tiles, 0, rows, weight, 0, outputs, [&](int64_t row, int64_t column, Lanes found) {
        store_lanes(out + row * outputs + column, found);
    });
}
