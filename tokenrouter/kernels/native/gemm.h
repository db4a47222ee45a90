// Products of rows with packed weights (panel.h): out[m, n] = epilogue(sum_k a[m, k] * w[n, k]).
#pragma once

#include <cstdint>

#include "native/panel.h"

namespace tr {

struct Gemm {
    const void* a;               // rows; int8 and bf16 products read k_tiles * 64 bytes of each, zeros beyond K
    int64_t a_stride;            // bytes from row to row
    bool a_is_bf16;              // int8_weight: else float
    int64_t m, n, k, k_tiles;    // n: columns of `out`
    bool gated;                  // panels hold 16 gate and 16 up channels; out is silu(gate) * up
    const void* w;               // packed panels
    bool int4;                   // of int4_matmul/native.h, which become int8 panels group by group
    void* out;                   // [m, n]
    int64_t out_stride;          // elements
    bool out_is_bf16;            // else float
    bool accumulate;             // out += instead of out =
    const float* bias;           // per channel, padded to panels; null: none
    const float* channel_scale;  // per channel, padded; null: 1
    const void* row_scale;       // per row; null: 1
    bool row_scale_is_bf16;
    const int32_t* channel_sum;  // int8 only: sum_k w[n, k], padded

    int64_t num_panels() const { return gated ? (n + 15) / 16 : tr::num_panels(n); }
};

enum class GemmKind : int {
    bf16 = 0,         // bf16 rows, bf16 weights, float sums
    int8 = 1,         // int8 rows, int8 weights, exact 32-bit sums: a row's result never depends on the others
    // bf16 or float rows, int8 weights. A row becomes two int8 rows, the second holding what rounding left of the first:
    // 16 bits of the row's largest magnitude, exact sums, and the weights are read as they are.
    int8_weight = 2,
};

struct GemmJob {
    Gemm gemm;
    GemmKind kind;
};

// One pass over the panels for all jobs, which have the same number of them: where they read the same weights, every panel is
// streamed once.
constexpr int64_t kMaxJobs = 2;
void gemm(const GemmJob* jobs, int64_t num_jobs);

// Weights [n, k] of `item` bytes each (1 or 2) in panels; `packed` holds num_panels * num_k_tiles * kTile bytes.
void pack_weights(const void* w, int64_t n, int64_t k, int64_t item, void* packed);

}  // namespace tr
