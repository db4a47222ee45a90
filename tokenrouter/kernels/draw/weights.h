// What drawing from a row is made of: its largest value, the weights of its values, and their sum.
#pragma once

#include <limits>

#include "native/simd.h"

namespace tr {

typedef double f64x8 __attribute__((vector_size(64)));

// The first n (0 .. 15) of 16 values; the others are -inf.
template <class V, typename T>
TR_INLINE f32x16 load_rest(const T* x, int64_t n) {
    float part[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) part[i] = i < n ? to_float(x[i]) : -std::numeric_limits<float>::infinity();
    return load16<V>(part);
}

// NaN is left to the weights.
template <class V, typename T>
TR_INLINE float top_of(const T* x, int64_t count) {
    f32x16 top = splat(-std::numeric_limits<float>::infinity());
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) top = max16<V>(load16<V>(x + k), top);
    if (k < count) top = max16<V>(load_rest<V>(x + k, count - k), top);
    return max_of(top);
}

// Weights are exp((x - top) * inverse temperature), at most 1. NaN has none, nor has a row of infinity or of -inf alone.
struct Scale {
    float top, inverse_temperature;

    TR_INLINE f32x16 scaled(f32x16 x) const { return (x - top) * inverse_temperature; }

    template <class V>
    TR_INLINE f32x16 weights(f32x16 x) const {
        return exp16<V>(scaled(x));
    }
};

struct Sum {
    f64x8 low = {}, high = {};

    TR_INLINE void add(f32x16 w) {
        low += __builtin_convertvector(__builtin_shufflevector(w, w, 0, 1, 2, 3, 4, 5, 6, 7), f64x8);
        high += __builtin_convertvector(__builtin_shufflevector(w, w, 8, 9, 10, 11, 12, 13, 14, 15), f64x8);
    }

    TR_INLINE double total() const {
        const f64x8 lanes = low + high;
        double sum = 0;
        for (int64_t i = 0; i < 8; ++i) sum += lanes[i];
        return sum;
    }
};

}  // namespace tr
