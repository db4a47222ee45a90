// Products of up to 32 rows with one panel of packed weights.
//
// Weights lie in panels of 32 output channels. A panel is a row of K tiles, each 2 x 16 x 64 bytes: two halves of 16
// channels, 16 rows of 64 bytes, one row holding for each of the 16 channels its next 4 bytes of k (4 int8 or 2 bf16).
// This is what the tile unit loads, what VNNI and bf16 dot products read, and one sequential stream per panel.
// N is padded with zero channels to whole panels and K with zeros to whole tiles.
#pragma once

#include <cstdint>

#include "native/isa.h"

namespace tr {

constexpr int64_t kPanel = 32;         // output channels of a panel
constexpr int64_t kTileBytes = 64;     // bytes of k of one channel in a tile
constexpr int64_t kTile = 2048;        // bytes of a tile: kPanel x kTileBytes
constexpr int64_t kMaxPanelRows = 32;  // rows that one product takes

inline int64_t num_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t num_k_tiles(int64_t k, int64_t item) { return (k * item + kTileBytes - 1) / kTileBytes; }

struct PanelArgs {
    const uint8_t* a;            // rows of int8 or bf16; k_tiles * 64 readable bytes each
    int64_t a_stride;            // bytes
    int64_t rows;                // 1 .. 32
    const uint8_t* w;            // the panel
    int64_t k_tiles;
    const int32_t* channel_sum;  // int8: sum of each channel's weights, for unsigned activations
};

// The micro-kernels of the instruction set in use. One object per thread and loop: it owns the tile configuration.
class PanelKernels {
  public:
    PanelKernels();
    ~PanelKernels();
    PanelKernels(const PanelKernels&) = delete;
    PanelKernels& operator=(const PanelKernels&) = delete;

    // Whether int8 activations must come offset by 128 (as unsigned bytes).
    static bool wants_unsigned() { return isa() == Isa::avx512; }

    // sums [rows, 32] of int32: exact.
    void int8(const PanelArgs& p, int32_t* sums) {
        prepare(p.rows);
        int8_(p, sums);
    }

    // sums [rows, 32] of float.
    void bf16(const PanelArgs& p, float* sums) {
        prepare(p.rows);
        bf16_(p, sums);
    }

  private:
    using Product = void (*)(const PanelArgs&, void*);
    void prepare(int64_t rows);

    Isa level_;
    Product int8_, bf16_;
    int64_t configured_ = 0;
};

}  // namespace tr
