// Rotates query and key heads and writes keys and values to their slots, as they are or as int8. Where there are int8 entries,
// queries and all keys go through a Hadamard matrix (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "native/rows.h"

namespace tr {
namespace {

template <class V, typename T>
TR_INLINE void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    if (half % kLanes == 0) {
        for (int64_t k = 0; k < half; k += kLanes) {
            const f32x16 low = load16<V>(x + k), high = load16<V>(x + half + k);
            store16<V>(out + k, low * load16<V>(cos + k) + high * load16<V>(sin + k));
            store16<V>(out + half + k, high * load16<V>(cos + half + k) + low * load16<V>(sin + half + k));
        }
        return;
    }
    for (int64_t k = 0; k < half; ++k) {
        const float low = to_float(x[k]), high = to_float(x[half + k]);
        from_float(low * to_float(cos[k]) + high * to_float(sin[k]), out + k);
        from_float(high * to_float(cos[half + k]) + low * to_float(sin[half + k]), out + half + k);
    }
}

// x times an orthonormal Hadamard matrix, in blocks of the largest power of two that divides head_dim: outlying channels are
// spread over all, which int8 keys need. Scores of queries and keys that both went through it are what they were.
template <class V, typename T>
TR_INLINE void spread(T* x, float* buffer, int64_t head_dim) {
    const int64_t block = head_dim & -head_dim;
    for (int64_t k = 0; k < head_dim; ++k) buffer[k] = to_float(x[k]);
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t start = 0; start < head_dim; start += 2 * half)
            for (int64_t k = start; k < start + half; ++k) {
                const float a = buffer[k], b = buffer[k + half];
                buffer[k] = a + b;
                buffer[k + half] = a - b;
            }
    const float scale = 1.0f / std::sqrt(float(block));
    for (int64_t k = 0; k < head_dim; ++k) from_float(buffer[k] * scale, x + k);
}

template <class V, typename T>
TR_INLINE void store_head(const RopeArgs& a, const T* head, int64_t slot, int64_t plane) {
    if (!a.kv.is_int8(slot)) {
        const int64_t entry = slot * 2 * a.num_kv_heads + plane;
        std::memcpy(static_cast<T*>(a.kv.entries) + entry * a.head_dim, head, size_t(a.head_dim) * sizeof(T));
        return;
    }
    const int64_t entry = (slot - a.kv.num_entries) * 2 * a.num_kv_heads + plane;
    T scale;
    quantize_row<V>(head, a.head_dim, a.kv.int8 + entry * a.head_dim, &scale);
    a.kv.scales[entry] = to_float(scale);
}

template <class V, typename T>
TR_INLINE void body(const RopeArgs& a, T* scratch, float* buffer, int64_t begin, int64_t end) {
    const bool spreads = a.kv.int8 != nullptr;
    const int64_t dim = a.head_dim;
    for (int64_t t = begin; t < end; ++t) {
        const T* x = static_cast<const T*>(a.qkv) + t * a.qkv_stride;
        const T *cos = static_cast<const T*>(a.cos) + t * dim, *sin = static_cast<const T*>(a.sin) + t * dim;
        T* q_out = static_cast<T*>(a.q_out) + t * a.num_heads * dim;
        for (int64_t h = 0; h < a.num_heads; ++h) {
            rotate<V>(x + h * dim, cos, sin, q_out + h * dim, dim);
            if (spreads) spread<V>(q_out + h * dim, buffer, dim);
        }
        x += a.num_heads * dim;
        for (int64_t h = 0; h < a.num_kv_heads; ++h) {
            rotate<V>(x + h * dim, cos, sin, scratch, dim);
            if (spreads) spread<V>(scratch, buffer, dim);
            store_head<V>(a, scratch, a.slots[t], h);
        }
        x += a.num_kv_heads * dim;
        for (int64_t h = 0; h < a.num_kv_heads; ++h) store_head<V>(a, x + h * dim, a.slots[t], a.num_kv_heads + h);
    }
}

TR_EACH_ISA(rope_bf16, body, (, bf16),
            (const RopeArgs& a, bf16* scratch, float* buffer, int64_t begin, int64_t end),
            (a, scratch, buffer, begin, end))
TR_EACH_ISA(rope_float, body, (, float),
            (const RopeArgs& a, float* scratch, float* buffer, int64_t begin, int64_t end),
            (a, scratch, buffer, begin, end))

}  // namespace

void rope_store_kv(const RopeArgs& a, bool is_bf16) {
    const int64_t width = std::max<int64_t>(1, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim);
    at::parallel_for(0, a.num_tokens, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
        static thread_local std::vector<float> scratch;
        if (int64_t(scratch.size()) < 2 * a.head_dim) scratch.resize(size_t(2 * a.head_dim));
        float* buffer = scratch.data() + a.head_dim;
        if (is_bf16) {
            rope_bf16(a, reinterpret_cast<bf16*>(scratch.data()), buffer, begin, end);
        } else {
            rope_float(a, scratch.data(), buffer, begin, end);
        }
    });
}

}  // namespace tr
