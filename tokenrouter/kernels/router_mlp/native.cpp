// The score of a learned router. Look-ups miss the caches, so those of some tokens are asked for before the first is read; sums
// have the reference's order, and no product is fused with a sum: the result is the same to the bit.
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>

#include "native/scratch.h"
#include "native/simd.h"
#include "router_mlp/native.h"

namespace tr {
namespace {

constexpr int64_t kBlock = 16;   // tokens whose rows are asked for together
constexpr int64_t kGrain = 256;  // tokens that are worth a thread

TR_INLINE int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What products of hidden units are padded to: sums go by halves.
TR_INLINE int64_t folded_size(int64_t hidden) {
    return std::max(kLanes, int64_t(std::bit_ceil(uint64_t(std::max<int64_t>(hidden, 1)))));
}

// The next 16 values, or as many as there are and zeros.
template <class V>
TR_INLINE f32x16 load_row(const float* p, int64_t left) {
    return left >= kLanes ? load16<V>(p) : load_some<V>(p, left);
}

// How many of ascending edges a value exceeds; NaN exceeds all.
TR_INLINE int64_t bin_of(const float* edges, int64_t count, float value) {
    int64_t first = 0, stop = count;
    while (first < stop) {
        const int64_t middle = (first + stop) / 2;
        if (edges[middle] >= value) {
            stop = middle;
        } else {
            first = middle + 1;
        }
    }
    return first;
}

// The row of the id before among `size` ids; what is no id has the row behind them.
TR_INLINE int64_t id_of(float value, int64_t size) {
    return value > -1.0f && value < 0x1p62f ? std::min(int64_t(value), size) : size;
}

TR_INLINE int64_t num_rows_of(const RouterArgs& a) { return a.num_features + (a.previous_column < 0 ? 1 : 3); }

TR_INLINE void find_rows(const RouterArgs& a, int64_t token, int64_t* rows) {
    const float* values = a.values + token * a.token_stride;
    for (int64_t f = 0; f < a.num_features; ++f) {
        const int64_t bin = bin_of(a.edges + f * a.num_edges, a.num_edges, values[f * a.feature_stride]);
        *rows++ = a.starts[f] + std::min(bin, a.lasts[f]);
    }
    const int64_t id = a.ids[token * a.id_stride];
    *rows++ = a.id_rows[std::min(id, a.num_ids - 1)];
    if (a.previous_column < 0) return;
    *rows++ = a.vocab_row + std::min(id, a.vocab_size);
    *rows = a.vocab_row + a.vocab_size + 1 + id_of(values[a.previous_column * a.feature_stride], a.vocab_size);
}

TR_INLINE void ask_for(const RouterArgs& a, const int64_t* rows, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
        const float* row = a.table + rows[n] * a.num_columns;
        for (int64_t c = 0; c < a.num_columns; c += kLanes) __builtin_prefetch(row + c);
        __builtin_prefetch(row + a.num_columns - 1);
    }
}

// Each column in the order of the rows.
template <class V>
TR_INLINE void add_rows(const RouterArgs& a, const int64_t* rows, int64_t count, float* sums) {
    for (int64_t c = 0; c < a.num_columns; c += kLanes) {
        f32x16 sum = {};
        for (int64_t n = 0; n < count; ++n)
            sum += load_row<V>(a.table + rows[n] * a.num_columns + c, a.num_columns - c);
        store16<V>(sums + c, sum);
    }
}

// What the hidden units add to the score: the upper half of the products is added to the lower one until one is left.
template <class V>
TR_INLINE float weigh(const float* sums, const float* head, int64_t hidden, float* products) {
    int64_t size = folded_size(hidden);
    for (int64_t k = 0; k < size; k += kLanes) {
        f32x16 product = {};
        if (k < hidden) {
            const f32x16 unit = load_row<V>(sums + k, hidden - k);
            product = (unit < 0.0f ? f32x16{} : unit) * load_row<V>(head + k, hidden - k);
        }
        store16<V>(products + k, product);
    }
    __asm__ __volatile__("" : : "r"(products) : "memory");  // rounded before they are added
    for (size /= 2; size >= kLanes; size /= 2)
        for (int64_t k = 0; k < size; k += kLanes)
            store16<V>(products + k, load16<V>(products + k) + load16<V>(products + k + size));
    for (; size; size /= 2)
        for (int64_t k = 0; k < size; ++k) products[k] += products[k + size];
    return products[0];
}

template <class V>
TR_INLINE void body(const RouterArgs& a, int64_t* rows, float* sums, float* products, int64_t begin, int64_t end) {
    const int64_t count = num_rows_of(a);
    for (int64_t first = begin; first < end; first += kBlock) {
        const int64_t stop = std::min(end, first + kBlock);
        for (int64_t t = first; t < stop; ++t) {
            find_rows(a, t, rows + (t - first) * count);
            ask_for(a, rows + (t - first) * count, count);
        }
        for (int64_t t = first; t < stop; ++t) {
            add_rows<V>(a, rows + (t - first) * count, count, sums);
            const int64_t phase = a.phases[t * a.phase_stride];
            const float direct = sums[a.hidden + phase];
            const float* head = a.head + phase * a.hidden;
            a.scores[t] = a.hidden ? direct + weigh<V>(sums, head, a.hidden, products) : direct;
        }
    }
}

TR_EACH_ISA(score, body, (), (const RouterArgs& a, int64_t* rows, float* sums, float* products, int64_t begin, int64_t end),
            (a, rows, sums, products, begin, end))

}  // namespace

void router_mlp(const RouterArgs& a) {
    const int64_t row_bytes = kBlock * num_rows_of(a) * int64_t(sizeof(int64_t));
    const int64_t sum_floats = padded(a.num_columns), bytes = row_bytes + (sum_floats + folded_size(a.hidden)) * 4;
    at::parallel_for(0, a.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
        uint8_t* memory = scratch().get(Scratch::kRouter, bytes);
        float* sums = reinterpret_cast<float*>(memory + row_bytes);
        score(a, reinterpret_cast<int64_t*>(memory), sums, sums + sum_floats, begin, end);
    });
}

}  // namespace tr
