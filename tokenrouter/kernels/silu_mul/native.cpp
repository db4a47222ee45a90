// silu(gate) * up, with int8 output where asked.
#include <ATen/Parallel.h>

#include <vector>

#include "native/rows.h"

namespace tr {
namespace {

TR_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp16(-x)); }

template <typename T>
TR_INLINE f32x16 rounded(f32x16 v);

template <>
TR_INLINE f32x16 rounded<float>(f32x16 v) { return v; }

template <>
TR_INLINE f32x16 rounded<bf16>(f32x16 v) { return (f32x16)(round_bits((u32x16)v) << 16); }

template <typename T>
TR_INLINE void body(const SiluArgs& a, bool quantize, T* scratch, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T* gate = static_cast<const T*>(a.gate_up) + i * a.stride;
        const T* up = gate + a.width;
        T* out = quantize ? scratch : static_cast<T*>(a.out) + i * a.out_stride;
        int64_t k = 0;
        for (; k + kLanes <= a.width; k += kLanes)
            store16(out + k, rounded<T>(silu(load16(gate + k))) * load16(up + k));
        if (k < a.width) {
            const int64_t count = a.width - k;
            store_some(out + k, rounded<T>(silu(load_some(gate + k, count))) * load_some(up + k, count), count);
        }
        if (quantize)
            quantize_row(out, a.width, a.quantized.q + i * a.quantized.q_stride,
                         static_cast<T*>(a.quantized.scale) + i);
    }
}

TR_EACH_ISA(silu_bf16, body<bf16>, (const SiluArgs& a, bool quantize, bf16* scratch, int64_t begin, int64_t end),
            (a, quantize, scratch, begin, end))
TR_EACH_ISA(silu_float, body<float>, (const SiluArgs& a, bool quantize, float* scratch, int64_t begin, int64_t end),
            (a, quantize, scratch, begin, end))

}  // namespace

void silu_mul(const SiluArgs& a, bool is_bf16, bool quantize) {
    const int64_t grain = a.width ? std::max<int64_t>(1, 4096 / a.width) : a.num_rows;
    at::parallel_for(0, a.num_rows, grain, [&](int64_t begin, int64_t end) {
        static thread_local std::vector<float> scratch;
        if (quantize && int64_t(scratch.size()) < a.width) scratch.resize(size_t(a.width));
        if (is_bf16) {
            silu_bf16(a, quantize, reinterpret_cast<bf16*>(scratch.data()), begin, end);
        } else {
            silu_float(a, quantize, scratch.data(), begin, end);
        }
    });
}

}  // namespace tr
