// silu(gate) * up.
#include <ATen/Parallel.h>

#include "native/rows.h"

namespace tr {
namespace {

template <class V, typename T>
TR_INLINE f32x16 gate_of(f32x16 x) {
    return sizeof(T) == sizeof(bf16) ? silu_for_bf16<V>(x) : silu<V>(x);
}

template <class V, typename T>
TR_INLINE void body(const SiluArgs& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T* gate = static_cast<const T*>(a.gate_up) + i * a.stride;
        const T* up = gate + a.width;
        T* out = static_cast<T*>(a.out) + i * a.out_stride;
        int64_t k = 0;
        for (; k + kLanes <= a.width; k += kLanes)
            store16<V>(out + k, (gate_of<V, T>(load16<V>(gate + k))) * load16<V>(up + k));
        if (k < a.width) {
            const int64_t count = a.width - k;
            store_some<V>(out + k, (gate_of<V, T>(load_some<V>(gate + k, count))) * load_some<V>(up + k, count), count);
        }
    }
}

TR_EACH_ISA(silu_bf16, body, (, bf16), (const SiluArgs& a, int64_t begin, int64_t end), (a, begin, end))
TR_EACH_ISA(silu_float, body, (, float), (const SiluArgs& a, int64_t begin, int64_t end), (a, begin, end))

}  // namespace

void silu_mul(const SiluArgs& a, bool is_bf16) {
    const int64_t grain = a.width ? std::max<int64_t>(1, 4096 / a.width) : a.num_rows;
    at::parallel_for(0, a.num_rows, grain, [&](int64_t begin, int64_t end) {
        is_bf16 ? silu_bf16(a, begin, end) : silu_float(a, begin, end);
    });
}

}  // namespace tr
