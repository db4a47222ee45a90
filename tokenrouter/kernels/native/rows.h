// Row-wise operators. Rows may be strided: row i starts at (i / inner) * outer_stride + (i % inner) * inner_stride.
#pragma once

#include <cstdint>

#include "native/simd.h"

namespace tr {

struct RowLayout {
    int64_t inner = 1, outer_stride = 0, inner_stride = 0;  // elements

    TR_INLINE int64_t offset(int64_t row) const {
        return (row / inner) * outer_stride + (row % inner) * inner_stride;
    }
};

// int8 rows with a scale each (of the rows' own dtype where that is bf16, else float).
struct QuantizedOut {
    int8_t* q;       // [rows, q_stride]
    int64_t q_stride;
    void* scale;     // [rows]
};

struct NormArgs {
    const void* x;
    RowLayout x_rows;
    void* residual;        // null, or rows that x is added to first; what is normed is the sum, rounded to the dtype
    int64_t residual_stride;
    const void* weight;    // [width]
    void* out;             // unless quantized
    RowLayout out_rows;
    QuantizedOut quantized;
    int64_t num_rows, width;
    float eps;
};

void rms_norm(const NormArgs& args, bool is_bf16, bool quantize);

struct SiluArgs {
    const void* gate_up;   // [rows, 2 * width], gate first
    int64_t stride;
    void* out;             // [rows, width]
    int64_t out_stride;
    int64_t num_rows, width;
};

void silu_mul(const SiluArgs& args, bool is_bf16);

void quantize_rows(const void* x, int64_t x_stride, QuantizedOut out, int64_t num_rows, int64_t width, bool is_bf16);

// Of `width` > 0 values per row: the largest, and its lowest index; NaN counts as largest.
void row_max(const void* x, int64_t stride, int64_t num_rows, int64_t width, bool is_bf16, void* values, int64_t* ids);

struct DrawArgs {
    const void* x;                     // [rows, stride]
    int64_t stride, num_rows, width;   // width > 0
    const float* inverse_temperature;  // [rows], finite, above 0
    const double* uniform;             // [rows], in [0, 1)
    int64_t* ids;                      // [rows]
};

// An index per row with probability proportional to exp(x * inverse temperature); -1: the row has NaN, inf, or only -inf.
void draw(const DrawArgs& args, bool is_bf16);

struct CutArgs {
    DrawArgs draw;
    const int64_t* top_k;  // [rows], 0: all
    const double* top_p;   // [rows], in (0, 1]
    const double* min_p;   // [rows], in [0, 1]
};

// As `draw`, of the values that the cut leaves, in descending order; of equal ones the lower index comes first.
void draw_cut(const CutArgs& args, bool is_bf16);

// One layer's KV memory: entries of the rows' dtype, and behind them, numbered on, entries in int8 with a scale per plane.
struct KvMemory {
    void* entries;        // [num_entries, 2 * num_kv_heads, head_dim]: key heads, then value heads
    int64_t num_entries;
    int8_t* int8;         // [.., 2 * num_kv_heads, head_dim] or null: then no slot is num_entries or more
    float* scales;        // [.., 2 * num_kv_heads]

    bool is_int8(int64_t slot) const { return slot >= num_entries; }
};

struct RopeArgs {
    const void* qkv;       // [tokens, qkv_stride]: query heads, key heads, value heads
    int64_t qkv_stride;
    const void *cos, *sin; // [tokens, head_dim]; sin's first half negated
    const int64_t* slots;  // [tokens]
    void* q_out;           // [tokens, num_heads, head_dim]
    KvMemory kv;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

void rope_store_kv(const RopeArgs& args, bool is_bf16);

// The largest magnitude of a row, compared as integers: NaN is the largest and stays.
template <class V>
TR_INLINE float largest_magnitude(const float* y, int64_t width) {
    u32x16 largest = {};
    for (int64_t k = 0; k < width; k += kLanes) {
        const f32x16 x = width - k >= kLanes ? load16<V>(y + k) : load_some<V>(y + k, width - k);
        const u32x16 magnitude = (u32x16)x & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t top = 0;
    for (int64_t i = 0; i < kLanes; ++i) top = largest[i] > top ? largest[i] : top;
    float amax;
    std::memcpy(&amax, &top, sizeof amax);
    return amax;
}

typedef uint16_t u16x32 __attribute__((vector_size(64)));

template <class V>
TR_INLINE float largest_magnitude(const bf16* y, int64_t width) {
    u16x32 largest = {};
    for (int64_t k = 0; k < width; k += 32) {
        u16x32 x = {};
        if (width - k >= 32) {
            std::memcpy(&x, y + k, sizeof x);
        } else {
            std::memcpy(&x, y + k, size_t(width - k) * sizeof *y);
        }
        const u16x32 magnitude = x & uint16_t(0x7fff);
        largest = magnitude > largest ? magnitude : largest;
    }
    bf16 top{0};
    for (int64_t i = 0; i < 32; ++i) top.bits = largest[i] > top.bits ? largest[i] : top.bits;
    return to_float(top);
}

// One row to int8: the scale is max|y| / 127 rounded to the scale's dtype, and what divides is what is stored.
template <class V, typename T>
TR_INLINE void quantize_row(const T* y, int64_t width, int8_t* q, T* scale_out) {
    const float wanted = largest_magnitude<V>(y, width) * (1.0f / 127.0f);
    T rounded;
    from_float(wanted < 1e-35f ? 1e-35f : wanted, &rounded);
    *scale_out = rounded;
    const float inverse = 1.0f / to_float(rounded);
    for (int64_t k = 0; k < width; k += kLanes) {
        const int64_t count = width - k;
        const f32x16 x = count >= kLanes ? load16<V>(y + k) : load_some<V>(y + k, count);
        const i8x16 bytes = __builtin_convertvector(round_to_int<V>(x * inverse), i8x16);
        if (count >= kLanes) {
            std::memcpy(q + k, &bytes, sizeof bytes);
        } else {
            std::memcpy(q + k, &bytes, size_t(count));
        }
    }
}

// q * scale, in T.
template <class V, typename T>
TR_INLINE void dequantize_row(const int8_t* q, float scale, int64_t width, T* out) {
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {
        i8x16 bytes;
        std::memcpy(&bytes, q + k, sizeof bytes);
        store16<V>(out + k, __builtin_convertvector(widen<V>(bytes), f32x16) * scale);
    }
    for (; k < width; ++k) from_float(float(q[k]) * scale, out + k);
}

}  // namespace tr
