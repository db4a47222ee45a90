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
    void* out;             // [rows, width] unless quantized
    int64_t out_stride;
    QuantizedOut quantized;
    int64_t num_rows, width;
};

void silu_mul(const SiluArgs& args, bool is_bf16, bool quantize);

void quantize_rows(const void* x, int64_t x_stride, QuantizedOut out, int64_t num_rows, int64_t width, bool is_bf16);

struct RopeArgs {
    const void* qkv;       // [tokens, qkv_stride]: query heads, key heads, value heads
    int64_t qkv_stride;
    const void *cos, *sin; // [tokens, head_dim]; sin's first half negated
    const int64_t* slots;  // [tokens]
    void* q_out;           // [tokens, num_heads, head_dim]
    void* kv;              // [slots, 2 * num_kv_heads, head_dim]; int8 when kv_scale is given
    float* kv_scale;       // [slots, 2 * num_kv_heads], or null
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

void rope_store_kv(const RopeArgs& args, bool is_bf16);

// One row to int8: the scale is max|y| / 127 rounded to the scale's dtype, and what divides is what is stored.
template <typename T>
TR_INLINE void quantize_row(const T* y, int64_t width, int8_t* q, T* scale_out) {
    u32x16 largest = {};
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {  // as integers: NaN is the largest and stays
        const u32x16 magnitude = (u32x16)load16(y + k) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (k < width) {
        const u32x16 magnitude = (u32x16)load_some(y + k, width - k) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t top = 0;
    for (int64_t i = 0; i < kLanes; ++i) top = largest[i] > top ? largest[i] : top;
    float amax;
    std::memcpy(&amax, &top, sizeof amax);
    const float wanted = amax * (1.0f / 127.0f);
    T rounded;
    from_float(wanted < 1e-35f ? 1e-35f : wanted, &rounded);
    *scale_out = rounded;
    const float inverse = 1.0f / to_float(rounded);
    const f32x16 magic = splat(12582912.0f);  // rounds half to even
    for (k = 0; k < width; k += kLanes) {
        const int64_t count = width - k;
        const f32x16 x = count >= kLanes ? load16(y + k) : load_some(y + k, count);
        const f32x16 n = (x * inverse + magic) - magic;
        const i8x16 bytes = __builtin_convertvector(__builtin_convertvector(n, i32x16), i8x16);
        std::memcpy(q + k, &bytes, size_t(count >= kLanes ? kLanes : count));
    }
}

}  // namespace tr
