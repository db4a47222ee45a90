// The largest value of each row and its lowest index; NaN counts as largest.
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "native/rows.h"

namespace tr {
namespace {

constexpr int64_t kBlock = 64 * kLanes;  // values whose largest is compared at once: the index lies in the first best block

TR_INLINE bool any(i32x16 mask) {
    int32_t found = 0;
    for (int64_t i = 0; i < kLanes; ++i) found |= mask[i];
    return found != 0;
}

template <typename T>
TR_INLINE int64_t first_of(const T* x, int64_t width, float wanted) {
    for (int64_t k = 0; k < width; ++k) {
        const float v = to_float(x[k]);
        if (wanted == wanted ? v == wanted : v != v) return k;
    }
    return 0;  // not reached: `wanted` is one of them
}

template <class V, typename T>
TR_INLINE int64_t largest_of(const T* x, int64_t width) {
    float best = to_float(x[0]);
    int64_t best_block = 0;
    for (int64_t k = 0; k < width; k += kBlock) {
        const int64_t stop = k + kBlock < width ? k + kBlock : width;
        f32x16 top = splat(to_float(x[k]));
        i32x16 is_nan = {};
        int64_t i = k;
        for (; i + kLanes <= stop; i += kLanes) {
            const f32x16 v = load16<V>(x + i);
            is_nan |= v != v;
            top = max16<V>(v, top);
        }
        float block = top[0];
        for (int64_t lane = 1; lane < kLanes; ++lane) block = top[lane] > block ? top[lane] : block;
        bool nan = any(is_nan);
        for (; i < stop; ++i) {
            const float v = to_float(x[i]);
            nan |= v != v;
            block = v > block ? v : block;
        }
        if (nan) return k + first_of(x + k, stop - k, std::numeric_limits<float>::quiet_NaN());
        if (block > best) {
            best = block;
            best_block = k;
        }
    }
    return best_block + first_of(x + best_block, width - best_block, best);
}

template <class V, typename T>
TR_INLINE void body(const T* x, int64_t stride, int64_t width, T* values, int64_t* ids, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        ids[i] = largest_of<V>(x + i * stride, width);
        values[i] = x[i * stride + ids[i]];
    }
}

TR_EACH_ISA(max_bf16, body, (, bf16),
            (const bf16* x, int64_t stride, int64_t width, bf16* values, int64_t* ids, int64_t begin, int64_t end),
            (x, stride, width, values, ids, begin, end))
TR_EACH_ISA(max_float, body, (, float),
            (const float* x, int64_t stride, int64_t width, float* values, int64_t* ids, int64_t begin, int64_t end),
            (x, stride, width, values, ids, begin, end))

}  // namespace

void row_max(const void* x, int64_t stride, int64_t num_rows, int64_t width, bool is_bf16, void* values, int64_t* ids) {
    at::parallel_for(0, num_rows, std::max<int64_t>(1, 32768 / width), [&](int64_t begin, int64_t end) {
        if (is_bf16) {
            max_bf16(static_cast<const bf16*>(x), stride, width, static_cast<bf16*>(values), ids, begin, end);
        } else {
            max_float(static_cast<const float*>(x), stride, width, static_cast<float*>(values), ids, begin, end);
        }
    });
}

}  // namespace tr
