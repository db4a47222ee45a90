// RMS norm of rows, with the residual added first and with int8 output where asked.
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "native/rows.h"

namespace tr {
namespace {

template <class V, typename T>
TR_INLINE float square_sum(const T* x, int64_t width) {
    f32x16 sum = {};
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {
        const f32x16 v = load16<V>(x + k);
        sum += v * v;
    }
    if (k < width) {
        const f32x16 v = load_some<V>(x + k, width - k);
        sum += v * v;
    }
    return sum16(sum);
}

template <class V, typename T>
TR_INLINE void add_to(const T* x, T* residual, int64_t width) {
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) store16<V>(residual + k, load16<V>(residual + k) + load16<V>(x + k));
    if (k < width)
        store_some<V>(residual + k, load_some<V>(residual + k, width - k) + load_some<V>(x + k, width - k), width - k);
}

template <class V, typename T>
TR_INLINE void scale_row(const T* x, const T* weight, float by, T* out, int64_t width) {
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) store16<V>(out + k, load16<V>(x + k) * by * load16<V>(weight + k));
    if (k < width)
        store_some<V>(out + k, load_some<V>(x + k, width - k) * by * load_some<V>(weight + k, width - k), width - k);
}

template <class V, typename T>
TR_INLINE void body(const NormArgs& a, bool quantize, T* scratch, int64_t begin, int64_t end) {
    const T* weight = static_cast<const T*>(a.weight);
    for (int64_t i = begin; i < end; ++i) {
        const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(i);
        if (a.residual) {
            T* residual = static_cast<T*>(a.residual) + i * a.residual_stride;
            add_to<V>(x, residual, a.width);
            x = residual;
        }
        const float rms = 1.0f / std::sqrt(square_sum<V>(x, a.width) / float(a.width) + a.eps);
        T* out = quantize ? scratch : static_cast<T*>(a.out) + a.out_rows.offset(i);
        scale_row<V>(x, weight, rms, out, a.width);
        if (quantize)
            quantize_row<V>(out, a.width, a.quantized.q + i * a.quantized.q_stride,
                         static_cast<T*>(a.quantized.scale) + i);
    }
}

TR_EACH_ISA(norm_bf16, body, (, bf16),
            (const NormArgs& a, bool quantize, bf16* scratch, int64_t begin, int64_t end),
            (a, quantize, scratch, begin, end))
TR_EACH_ISA(norm_float, body, (, float),
            (const NormArgs& a, bool quantize, float* scratch, int64_t begin, int64_t end),
            (a, quantize, scratch, begin, end))

}  // namespace

void rms_norm(const NormArgs& a, bool is_bf16, bool quantize) {
    const int64_t grain = a.width ? std::max<int64_t>(1, 16384 / a.width) : a.num_rows;
    at::parallel_for(0, a.num_rows, grain, [&](int64_t begin, int64_t end) {
        static thread_local std::vector<float> scratch;
        if (quantize && int64_t(scratch.size()) < a.width) scratch.resize(size_t(a.width));
        if (is_bf16) {
            norm_bf16(a, quantize, reinterpret_cast<bf16*>(scratch.data()), begin, end);
        } else {
            norm_float(a, quantize, scratch.data(), begin, end);
        }
    });
}

}  // namespace tr
