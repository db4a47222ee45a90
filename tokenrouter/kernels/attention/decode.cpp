// One query of one request over a range of keys, all heads: the range's entries are streamed once, as they lie.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/decode.h"

namespace tr {
namespace {

// Scores to weights: exp(scale * score - largest), and their sum; zeros up to a multiple of 16 beyond `count`.
template <class V>
TR_INLINE void soften_body(float* scores, int64_t count, float scale, float* largest, float* sum) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t k = count; k < padded; ++k) scores[k] = -INFINITY;
    f32x16 top = splat(-INFINITY), total = {};
    for (int64_t k = 0; k < padded; k += kLanes) top = max16<V>(top, load16<V>(scores + k));
    const float most = max_of(top);
    if (count == 0) {  // scores that are all NaN are not nothing: they stay NaN
        for (int64_t k = 0; k < padded; ++k) scores[k] = 0;
        *largest = most;
        *sum = 0;
        return;
    }
    for (int64_t k = 0; k < padded; k += kLanes) {
        const f32x16 weight = exp16<V>((load16<V>(scores + k) - most) * scale);
        store16<V>(scores + k, weight);
        total += weight;
    }
    *largest = most * scale;
    *sum = sum16(total);
}

template <class V, typename T>
TR_INLINE float dot(const T* a, const T* b, int64_t dim) {
    f32x16 sum = {};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) sum += load16<V>(a + d) * load16<V>(b + d);
    if (d < dim) sum += load_some<V>(a + d, dim - d) * load_some<V>(b + d, dim - d);
    return sum16(sum);
}

template <class V, typename T>
TR_INLINE void add_scaled(const T* x, float by, float* out, int64_t dim) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store16<V>(out + d, load16<V>(out + d) + load16<V>(x + d) * by);
    if (d < dim) store_some<V>(out + d, load_some<V>(out + d, dim - d) + load_some<V>(x + d, dim - d) * by, dim - d);
}

template <class V, typename T>
TR_INLINE void body(const AttentionShape& shape, const Range& range, const T* q, const DecodePart& part) {
    const int64_t dim = shape.head_dim;
    alignas(64) float scores[kSplitKeys + kLanes];
    for (int64_t h = 0; h < shape.num_heads; ++h) {
        const int64_t key = h / shape.repeat() * dim, value = key + range.value_offset;
        for (int64_t k = 0; k < range.count; ++k) scores[k] = dot<V>(q + h * dim, range.key<T>(k, key), dim);
        soften_body<V>(scores, range.count, shape.scale, part.largest + h, part.sum + h);
        float* values = part.values + h * dim;
        std::memset(values, 0, size_t(dim) * sizeof *values);
        for (int64_t k = 0; k < range.count; ++k) add_scaled<V>(range.key<T>(k, value), scores[k], values, dim);
        if (!part.weights) continue;
        T* weights = static_cast<T*>(part.weights) + h * kSplitKeys;
        for (int64_t k = 0; k < range.count; k += kLanes) store16<V>(weights + k, load16<V>(scores + k));
        std::fill_n(part.tops + h * kSplitChunks, kSplitChunks, part.largest[h]);
    }
}

TR_EACH_ISA(decode_bf16, body, (, bf16),
            (const AttentionShape& shape, const Range& range, const bf16* q, const DecodePart& part),
            (shape, range, q, part))
TR_EACH_ISA(decode_float, body, (, float),
            (const AttentionShape& shape, const Range& range, const float* q, const DecodePart& part),
            (shape, range, q, part))

// ---- ranges together --------------------------------------------------------------------------------------------------

// The weights of one range, each multiplied by `factors` [H, kSplitChunks] of its chunk and summed over heads.
template <class V, typename T>
TR_INLINE void sum_weights(const T* weights, const float* factors, int64_t count, int64_t num_heads, float* received) {
    for (int64_t k = 0; k < count; k += kLanes) {
        const bool whole = count - k >= kLanes;
        f32x16 total = whole ? load16<V>(received + k) : load_some<V>(received + k, count - k);
        for (int64_t h = 0; h < num_heads; ++h)
            total += load16<V>(weights + h * kSplitKeys + k) * factors[h * kSplitChunks + k / kChunkKeys];
        whole ? store16<V>(received + k, total) : store_some<V>(received + k, total, count - k);
    }
}

// exp(tops - largest) * scale, chunk by chunk of every head; `largest` and `scale` [H].
template <class V>
TR_INLINE void weigh_chunks(const float* tops, const float* largest, const float* scale, int64_t num_heads,
                            float* factors) {
    const int64_t count = num_heads * kSplitChunks;
    for (int64_t h = 0; h < num_heads; ++h)
        for (int64_t c = 0; c < kSplitChunks; ++c)
            factors[h * kSplitChunks + c] = tops[h * kSplitChunks + c] - largest[h];
    for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t some = count - i;
        some >= kLanes ? store16<V>(factors + i, exp16<V>(load16<V>(factors + i)))
                       : store_some<V>(factors + i, exp16<V>(load_some<V>(factors + i, some)), some);
    }
    for (int64_t h = 0; h < num_heads; ++h)
        for (int64_t c = 0; c < kSplitChunks; ++c) factors[h * kSplitChunks + c] *= scale[h];
}

template <class V, typename T>
TR_INLINE void merge_body(const DecodePart* parts, int64_t num_parts, const int64_t* counts, int64_t num_heads,
                          int64_t dim, float* scratch, T* out, float* received) {
    float *most = scratch + num_parts, *scale = most + num_heads, *factors = scale + num_heads;
    for (int64_t h = 0; h < num_heads; ++h) {
        float largest = -INFINITY, sum = 0;
        for (int64_t i = 0; i < num_parts; ++i)
            largest = parts[i].largest[h] > largest ? parts[i].largest[h] : largest;
        for (int64_t i = 0; i < num_parts; ++i) {
            scratch[i] = parts[i].sum[h] != 0 ? std::exp(parts[i].largest[h] - largest) : 0.0f;
            sum += scratch[i] * parts[i].sum[h];
        }
        const float inverse = sum != 0 ? 1.0f / sum : 0.0f;
        int64_t d = 0;
        for (; d < dim; d += kLanes) {
            f32x16 total = {};
            const int64_t count = dim - d;
            for (int64_t i = 0; i < num_parts; ++i) {
                const float* values = parts[i].values + h * dim + d;
                total += (count >= kLanes ? load16<V>(values) : load_some<V>(values, count)) * (scratch[i] * inverse);
            }
            T* to = out + h * dim + d;
            count >= kLanes ? store16<V>(to, total) : store_some<V>(to, total, count);
        }
        if (!received) continue;
        most[h] = largest;
        scale[h] = inverse / float(num_heads);
    }
    for (int64_t i = 0; received && i < num_parts; received += counts[i++]) {
        weigh_chunks<V>(parts[i].tops, most, scale, num_heads, factors);
        sum_weights<V>(static_cast<const T*>(parts[i].weights), factors, counts[i], num_heads, received);
    }
}

TR_EACH_ISA(merge_bf16, merge_body, (, bf16),
            (const DecodePart* parts, int64_t num_parts, const int64_t* counts, int64_t num_heads, int64_t dim,
             float* scratch, bf16* out, float* received),
            (parts, num_parts, counts, num_heads, dim, scratch, out, received))
TR_EACH_ISA(merge_float, merge_body, (, float),
            (const DecodePart* parts, int64_t num_parts, const int64_t* counts, int64_t num_heads, int64_t dim,
             float* scratch, float* out, float* received),
            (parts, num_parts, counts, num_heads, dim, scratch, out, received))

// The item's entries where they lie; where some are int8, in a copy that is laid out like them.
Range range_of(const AttentionShape& shape, const ItemEntries& from) {
    const int64_t dim = shape.head_dim, keys = shape.num_groups * dim, item = shape.is_bf16 ? 2 : 4;
    if (!from.any_int8(0, from.count)) return {from.kv.entries, 2 * keys, keys, from.slots, from.count};
    static thread_local std::vector<uint8_t> rows;
    rows.resize(size_t(from.count * 2 * keys * item));
    for (int64_t g = 0; g < shape.num_groups; ++g)
        copy_entries(shape, from.kv, from.slots, from.count, g, {rows.data() + g * dim * item, 2 * keys, keys});
    return {rows.data(), 2 * keys, keys, neighbours(), from.count};
}

}  // namespace

void decode_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                 const AttentionRun& run, const DecodePart& part) {
    const int64_t q_at = request.query_rows[0] * run.q_stride;
    const ItemEntries entries{run.kv, request.slots + item.begin, item.end - item.begin, request.num_keys - item.begin};
    if (!shape.is_bf16) {
        decode_float(shape, range_of(shape, entries), static_cast<const float*>(run.q) + q_at, part);
        return;
    }
    const bf16* q = static_cast<const bf16*>(run.q) + q_at;
    if (!decode_bf16_pairs(shape, entries, reinterpret_cast<const uint16_t*>(q), part))
        decode_bf16(shape, range_of(shape, entries), q, part);
}

void merge_parts(const AttentionShape& shape, const DecodePart* parts, int64_t num_parts, const int64_t* counts,
                 float* scratch, void* out, float* received) {
    if (shape.is_bf16) {
        merge_bf16(parts, num_parts, counts, shape.num_heads, shape.head_dim, scratch, static_cast<bf16*>(out),
                   received);
    } else {
        merge_float(parts, num_parts, counts, shape.num_heads, shape.head_dim, scratch, static_cast<float*>(out),
                    received);
    }
}

}  // namespace tr
