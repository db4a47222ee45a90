// Weights of 4 bits, which become the int8 panels of panel.h before they are multiplied.
//
// A tile of k is two groups of 32 inputs (kInt4Group), each 9 x 64 bytes: the steps of 32 channels, their offsets, and for
// each half of 16 channels 4 rows of 64 bytes, a row holding in its low nibbles one row of the int8 tile and in its high
// nibbles the next one. A value is code * step + offset; code * step is at most 255, so that two bytes are one product.
#pragma once

#include <cstdint>

#include "native/panel.h"

namespace tr {

constexpr int64_t kInt4Group = 32;
constexpr int64_t kInt4GroupBytes = 64 + kPanel * kInt4Group / 2;
constexpr int64_t kInt4Tile = kTileBytes / kInt4Group * kInt4GroupBytes;  // bytes of a tile

struct Int4Weights {
    const uint8_t* codes;    // [n, groups * kInt4Group], 0 .. 15
    const uint8_t* step;     // [n, groups], at most 17
    const int8_t* offset;    // [n, groups]
    int64_t n, groups;
};

// `packed` holds num_panels(n) * k_tiles * kInt4Tile bytes; zeros beyond n and the groups.
void pack_int4(const Int4Weights& w, int64_t k_tiles, uint8_t* packed);

// One panel of k_tiles tiles.
void expand_int4(const uint8_t* packed, int64_t k_tiles, uint8_t* panel);

// Of each channel of one int8 panel, the sum of its weights.
void sum_channels(const uint8_t* panel, int64_t k_tiles, int32_t* sums);

}  // namespace tr
