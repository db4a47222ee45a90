// One query of one request over a range of keys, for the heads of one group.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/native.h"

#if TR_X86
#include <immintrin.h>
#endif

namespace tr {
namespace {

// Scores to weights: exp(scale * score - largest), their sum; zeros up to a multiple of 16 beyond `count`.
TR_INLINE void soften_body(float* scores, int64_t count, float scale, float* largest, float* sum) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t k = count; k < padded; ++k) scores[k] = -INFINITY;
    f32x16 top = splat(-INFINITY), total = {};
    for (int64_t k = 0; k < padded; k += kLanes) top = max16(top, load16(scores + k) * scale);
    const float most = max_of(top);
    if (most == -INFINITY) {
        for (int64_t k = 0; k < padded; ++k) scores[k] = 0;
        *largest = most;
        *sum = 0;
        return;
    }
    for (int64_t k = 0; k < padded; k += kLanes) {
        const f32x16 weight = exp16(load16(scores + k) * scale - most);
        store16(scores + k, weight);
        total += weight;
    }
    *largest = most;
    *sum = sum16(total);
}

struct Range {
    const void* entries;     // entry of slot 0: key of the group
    int64_t stride;          // elements from slot to slot
    int64_t value_offset;    // elements from a key to its value
    const int64_t* slots;
    int64_t count;
};

template <typename T>
TR_INLINE float dot(const T* a, const T* b, int64_t dim) {
    f32x16 sum = {};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) sum += load16(a + d) * load16(b + d);
    if (d < dim) sum += load_some(a + d, dim - d) * load_some(b + d, dim - d);
    return sum16(sum);
}

template <typename T>
TR_INLINE void add_scaled(const T* x, float by, float* out, int64_t dim) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store16(out + d, load16(out + d) + load16(x + d) * by);
    if (d < dim) store_some(out + d, load_some(out + d, dim - d) + load_some(x + d, dim - d) * by, dim - d);
}

template <typename T>
TR_INLINE void body(const AttentionShape& shape, const Range& range, const T* q, const DecodePart& part) {
    const int64_t heads = shape.repeat(), dim = shape.head_dim;
    const T* entries = static_cast<const T*>(range.entries);
    alignas(64) float scores[kSplitKeys];
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t k = 0; k < range.count; ++k)
            scores[k] = dot(q + h * dim, entries + range.slots[k] * range.stride, dim);
        soften_body(scores, range.count, shape.scale, part.largest + h, part.sum + h);
        float* values = part.values + h * dim;
        std::memset(values, 0, size_t(dim) * sizeof *values);
        for (int64_t k = 0; k < range.count; ++k)
            add_scaled(entries + range.slots[k] * range.stride + range.value_offset, scores[k], values, dim);
        if (part.weights) std::memcpy(part.weights + h * kSplitKeys, scores, size_t(range.count) * sizeof *scores);
    }
}

TR_EACH_ISA(decode_bf16, body<bf16>,
            (const AttentionShape& shape, const Range& range, const bf16* q, const DecodePart& part),
            (shape, range, q, part))
TR_EACH_ISA(decode_float, body<float>,
            (const AttentionShape& shape, const Range& range, const float* q, const DecodePart& part),
            (shape, range, q, part))

#if TR_X86
// ---- bf16 dot products ------------------------------------------------------------------------------------------------

TR_AVX512 inline __m512 add_lo_hi(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

TR_AVX512 inline __m512 add_pairs(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

TR_AVX512 inline __m512 add_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Lane i: the sum of v[i].
TR_AVX512 inline __m512 sums_of(const __m512* v) {
    __m512 u[4];
    for (int i = 0; i < 4; ++i)
        u[i] = add_pairs(add_lo_hi(v[4 * i], v[4 * i + 1]), add_lo_hi(v[4 * i + 2], v[4 * i + 3]));
    return add_quarters(add_quarters(u[0], u[1]), add_quarters(u[2], u[3]));
}

template <int N>  // head_dim / 32
TR_AVX512 void scores_avx512(const Range& range, const uint16_t* q, float* scores) {
    const uint16_t* entries = static_cast<const uint16_t*>(range.entries);
    __m512bh query[N];
    for (int n = 0; n < N; ++n) query[n] = (__m512bh)_mm512_loadu_si512(q + 32 * n);
    for (int64_t k0 = 0; k0 < range.count; k0 += 16) {
        __m512 dots[16];
        for (int64_t i = 0; i < 16; ++i) {
            const uint16_t* key = entries + range.slots[std::min(k0 + i, range.count - 1)] * range.stride;
            dots[i] = _mm512_setzero_ps();
            for (int n = 0; n < N; ++n)
                dots[i] = _mm512_dpbf16_ps(dots[i], query[n], (__m512bh)_mm512_loadu_si512(key + 32 * n));
        }
        _mm512_storeu_ps(scores + k0, sums_of(dots));
    }
}

// Two keys at a time: their values interleaved meet a pair of weights. Heads share the interleaving.
template <int R, int N>
TR_AVX512 void values_avx512(const Range& range, const float* const* weights, float* const* out) {
    const uint16_t* entries = static_cast<const uint16_t*>(range.entries) + range.value_offset;
    __m512 acc[R][N][2];
    for (auto& row : acc)
        for (auto& part : row) part[0] = part[1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < range.count; k += 2) {
        const int64_t last = std::min(k + 1, range.count - 1);
        const uint16_t* v0 = entries + range.slots[k] * range.stride;
        const uint16_t* v1 = entries + range.slots[last] * range.stride;
        __m512bh pair[R];
        for (int r = 0; r < R; ++r) {
            const __m128 two = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)(weights[r] + k)));
            const __m128i rounded = (__m128i)_mm_cvtneps_pbh(two);
            pair[r] = (__m512bh)_mm512_broadcastd_epi32(rounded);
        }
        for (int n = 0; n < N; ++n) {
            const __m512i a = _mm512_loadu_si512(v0 + 32 * n), b = _mm512_loadu_si512(v1 + 32 * n);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
            const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
            for (int r = 0; r < R; ++r) {
                acc[r][n][0] = _mm512_dpbf16_ps(acc[r][n][0], low, pair[r]);
                acc[r][n][1] = _mm512_dpbf16_ps(acc[r][n][1], high, pair[r]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int n = 0; n < N; ++n) {  // quarter i of low holds values 8i .. 8i + 3, of high the next four
            alignas(64) float low[16], high[16];
            _mm512_store_ps(low, acc[r][n][0]);
            _mm512_store_ps(high, acc[r][n][1]);
            for (int i = 0; i < 4; ++i) {
                std::memcpy(out[r] + 32 * n + 8 * i, low + 4 * i, 16);
                std::memcpy(out[r] + 32 * n + 8 * i + 4, high + 4 * i, 16);
            }
        }
    }
}

TR_AVX512 void soften_avx512(float* scores, int64_t count, float scale, float* largest, float* sum) {
    soften_body(scores, count, scale, largest, sum);
}

template <int R, int N>
TR_AVX512 void heads_avx512(const AttentionShape& shape, const Range& range, const uint16_t* q, const DecodePart& part,
                            int64_t first) {
    alignas(64) float scores[R][kSplitKeys + kLanes];
    const float* weights[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
        const int64_t h = first + r;
        scores_avx512<N>(range, q + h * shape.head_dim, scores[r]);
        soften_avx512(scores[r], range.count, shape.scale, part.largest + h, part.sum + h);
        scores[r][range.count] = 0;  // an odd range's second key of the last pair
        weights[r] = scores[r];
        out[r] = part.values + h * shape.head_dim;
        if (part.weights)
            std::memcpy(part.weights + h * kSplitKeys, scores[r], size_t(range.count) * sizeof(float));
    }
    values_avx512<R, N>(range, weights, out);
}

template <int N>
void by_heads(const AttentionShape& shape, const Range& range, const uint16_t* q, const DecodePart& part) {
    int64_t h = 0;
    for (; h + 3 <= shape.repeat(); h += 3) heads_avx512<3, N>(shape, range, q, part, h);
    if (shape.repeat() - h == 2) heads_avx512<2, N>(shape, range, q, part, h);
    if (shape.repeat() - h == 1) heads_avx512<1, N>(shape, range, q, part, h);
}

bool decode_avx512(const AttentionShape& shape, const Range& range, const uint16_t* q, const DecodePart& part) {
    if (isa() < Isa::avx512 || range.count == 0) return false;
    switch (shape.head_dim) {
        case 32: by_heads<1>(shape, range, q, part); return true;
        case 64: by_heads<2>(shape, range, q, part); return true;
        case 96: by_heads<3>(shape, range, q, part); return true;
        case 128: by_heads<4>(shape, range, q, part); return true;
        default: return false;
    }
}
#else
bool decode_avx512(const AttentionShape&, const Range&, const uint16_t*, const DecodePart&) { return false; }
#endif

}  // namespace

void decode_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                 const AttentionRun& run, const DecodePart& part) {
    const int64_t dim = shape.head_dim, first = item.group * dim;
    const int64_t q_at = request.query_rows[0] * run.q_stride + item.group * shape.repeat() * dim;
    Range range{nullptr, 2 * shape.num_groups * dim, shape.num_groups * dim, request.slots + item.begin,
                item.end - item.begin};
    if (!shape.is_bf16) {
        range.entries = static_cast<const float*>(run.kv) + first;
        decode_float(shape, range, static_cast<const float*>(run.q) + q_at, part);
        return;
    }
    range.entries = static_cast<const bf16*>(run.kv) + first;
    const bf16* q = static_cast<const bf16*>(run.q) + q_at;
    if (!decode_avx512(shape, range, reinterpret_cast<const uint16_t*>(q), part)) decode_bf16(shape, range, q, part);
}

}  // namespace tr
