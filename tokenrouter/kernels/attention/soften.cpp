// Scores of a block of rows to weights, and what is summed up by them.
#include "attention/soften.h"

#include <cmath>

#include "native/simd.h"

namespace tr {
namespace {

constexpr uint32_t kAll = 0xffff;

// Which of the 16 entries from `at` on the row sees, a bit each.
TR_INLINE uint32_t seen(const RowState& row, int64_t at) {
    if (row.mask) return row.mask[at / 32] >> at % 32 & kAll;
    if (at >= row.first && at + kLanes <= row.last) return kAll;
    uint32_t bits = 0;
    for (int64_t i = 0; i < kLanes; ++i) bits |= uint32_t(at + i >= row.first && at + i < row.last) << i;
    return bits;
}

// Scores of entries that are not seen become -inf.
TR_INLINE f32x16 visible(f32x16 scores, uint32_t bits) {
    for (int64_t i = 0; bits != kAll && i < kLanes; ++i)
        if (!(bits >> i & 1)) scores[i] = -INFINITY;
    return scores;
}

// The scores of row r for 16 keys from k on.
TR_INLINE float* score_at(float* scores, int64_t r, int64_t k) { return scores + ((k / 32) * 32 + r) * 32 + k % 32; }

// scores: num_panels x [32 rows, 32 keys], of entries from `at` on; those that a row does not see become -inf. weights
// [32, kBlockKeys]; rescale [32]: what earlier sums are worth now.
template <class V, typename T>
TR_INLINE void soften_body(float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
                           T* weights, float* rescale) {
    const int64_t count = num_panels * 32;
    for (int64_t r = 0; r < rows; ++r) {
        RowState& row = state[r];
        f32x16 top = splat(-INFINITY);
        bool sees = false;
        for (int64_t k = 0; k < count; k += kLanes) {
            f32x16 x = load16<V>(score_at(scores, r, k));
            const uint32_t bits = seen(row, at + k);
            if (bits != kAll) {
                x = visible(x, bits);
                store16<V>(score_at(scores, r, k), x);
            }
            sees |= bits != 0;
            top = max16<V>(top, x);
        }
        const float block = max_of(top) * scale;
        const float largest = larger(block, row.largest);
        T* to = weights + r * kBlockKeys;
        if (largest == -INFINITY && !sees) {  // nothing yet; scores that are all NaN are not nothing
            for (int64_t k = 0; k < count; k += kLanes) store16<V>(to + k, f32x16{});
            rescale[r] = 0.0f;
            continue;
        }
        f32x16 total = {};
        for (int64_t k = 0; k < count; k += kLanes) {
            const f32x16 x = load16<V>(score_at(scores, r, k));
            f32x16 weight = sizeof(T) == sizeof(bf16) ? exp2_for_bf16<V>(x * (scale * kLog2e) - largest * kLog2e)
                                                      : exp16<V>(x * scale - largest);
            if (seen(row, at + k) != kAll)  // exp2_for_bf16 stops at 2^-126
                weight = x == -INFINITY ? f32x16{} : weight;
            store16<V>(to + k, weight);
            total += weight;
        }
        rescale[r] = row.largest == largest ? 1.0f : std::exp(row.largest - largest);
        row.sum = row.sum * rescale[r] + sum16(total);
        row.largest = largest;
    }
}

template <class V>
TR_INLINE void add_values_body(float* acc, int64_t stride, const float* sums, const float* rescale, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t half = 0; half < 32; half += kLanes) {
            float* to = acc + r * stride + half;
            store16<V>(to, load16<V>(to) * rescale[r] + load16<V>(sums + r * 32 + half));
        }
}

// Attention that every key receives from rows [begin, rows): columns[key] += weight of the finished softmax.
template <class V>
TR_INLINE void add_columns_body(const float* scores, int64_t at, float scale, const RowState* state, int64_t begin,
                                int64_t rows, int64_t count, float* columns) {
    for (int64_t half = 0; half < 32; half += kLanes) {
        f32x16 total = {};
        for (int64_t r = begin; r < rows; ++r) {
            if (state[r].sum == 0) continue;
            const f32x16 x = visible(load16<V>(scores + r * 32 + half) * scale, seen(state[r], at + half));
            total += exp16<V>(x - state[r].largest) / state[r].sum;
        }
        for (int64_t i = 0; i < kLanes && half + i < count; ++i) columns[half + i] += total[i];
    }
}

TR_EACH_ISA(soften_bf16, soften_body, (, bf16),
            (float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
             bf16* weights, float* rescale),
            (scores, num_panels, at, scale, state, rows, weights, rescale))
TR_EACH_ISA(soften_float, soften_body, (, float),
            (float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
             float* weights, float* rescale),
            (scores, num_panels, at, scale, state, rows, weights, rescale))
TR_EACH_ISA(add_values, add_values_body, (),
            (float* acc, int64_t stride, const float* sums, const float* rescale, int64_t rows),
            (acc, stride, sums, rescale, rows))
TR_EACH_ISA(add_columns, add_columns_body, (),
            (const float* scores, int64_t at, float scale, const RowState* state, int64_t begin, int64_t rows,
             int64_t count, float* columns),
            (scores, at, scale, state, begin, rows, count, columns))

}  // namespace

void soften(bool is_bf16, const ScoreBlock& block, float scale, RowState* state, int64_t rows, void* weights,
            float* rescale) {
    if (is_bf16) {
        soften_bf16(block.scores, block.num_panels, block.at, scale, state, rows, static_cast<bf16*>(weights), rescale);
    } else {
        soften_float(block.scores, block.num_panels, block.at, scale, state, rows, static_cast<float*>(weights),
                     rescale);
    }
}

void rescale_and_add(float* values, int64_t stride, const float* sums, const float* rescale, int64_t rows) {
    add_values(values, stride, sums, rescale, rows);
}

void sum_columns(const float* scores, int64_t at, float scale, const RowState* state, int64_t begin, int64_t rows,
                 int64_t count, float* columns) {
    add_columns(scores, at, scale, state, begin, rows, count, columns);
}

}  // namespace tr
