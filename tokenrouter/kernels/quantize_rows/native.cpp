// Rows to int8, one scale per row.
#include <ATen/Parallel.h>

#include "native/rows.h"

namespace tr {
namespace {

template <class V, typename T>
TR_INLINE void body(const T* x, int64_t x_stride, QuantizedOut out, int64_t width, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
        quantize_row<V>(x + i * x_stride, width, out.q + i * out.q_stride, static_cast<T*>(out.scale) + i);
}

TR_EACH_ISA(quantize_bf16, body, (, bf16),
            (const bf16* x, int64_t x_stride, QuantizedOut out, int64_t width, int64_t begin, int64_t end),
            (x, x_stride, out, width, begin, end))
TR_EACH_ISA(quantize_float, body, (, float),
            (const float* x, int64_t x_stride, QuantizedOut out, int64_t width, int64_t begin, int64_t end),
            (x, x_stride, out, width, begin, end))

}  // namespace

void quantize_rows(const void* x, int64_t x_stride, QuantizedOut out, int64_t num_rows, int64_t width, bool is_bf16) {
    const int64_t grain = width ? std::max<int64_t>(1, 16384 / width) : num_rows;
    at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
        if (is_bf16) {
            quantize_bf16(static_cast<const bf16*>(x), x_stride, out, width, begin, end);
        } else {
            quantize_float(static_cast<const float*>(x), x_stride, out, width, begin, end);
        }
    });
}

}  // namespace tr
