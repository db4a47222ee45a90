// One query of one request over a range of keys, all heads: the range's entries are streamed once, as they lie.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/native.h"

#if TR_X86
#include <immintrin.h>
#endif

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

// A range of entries. Keys of group g lie `g * dim` elements into an entry, values `value_offset` further.
struct Range {
    const void* entries;  // of slot 0
    int64_t stride, value_offset;
    const int64_t* slots;
    int64_t count, ahead;  // keys of the range; keys of the request from here on, which may be asked for early

    template <typename T>
    TR_INLINE const T* key(int64_t i, int64_t offset) const {
        return static_cast<const T*>(entries) + slots[i] * stride + offset;
    }
};

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
        if (part.weights) std::memcpy(part.weights + h * kSplitKeys, scores, size_t(range.count) * sizeof *scores);
    }
}

TR_EACH_ISA(decode_bf16, body, (, bf16),
            (const AttentionShape& shape, const Range& range, const bf16* q, const DecodePart& part),
            (shape, range, q, part))
TR_EACH_ISA(decode_float, body, (, float),
            (const AttentionShape& shape, const Range& range, const float* q, const DecodePart& part),
            (shape, range, q, part))

#if TR_X86
// ---- bf16 dot products ------------------------------------------------------------------------------------------------

constexpr int64_t kChunk = 64;       // keys between two rescalings
constexpr int64_t kAheadKeys = 48;  // how far ahead entries are asked for

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

// Scores of one head for 16 keys from k0 on (the last key again beyond the range). N: head_dim / 32.
template <int N>
TR_AVX512 inline __m512 scores_avx512(const Range& range, int64_t key, const uint16_t* q, int64_t k0) {
    __m512 dots[16];
    for (int64_t i = 0; i < 16; ++i) {
        const uint16_t* row = range.key<uint16_t>(std::min(k0 + i, range.count - 1), key);
        dots[i] = _mm512_setzero_ps();
        for (int n = 0; n < N; ++n)
            dots[i] = _mm512_dpbf16_ps(dots[i], (__m512bh)_mm512_loadu_si512(q + 32 * n),
                                       (__m512bh)_mm512_loadu_si512(row + 32 * n));
    }
    return sums_of(dots);
}

// What one head has seen so far.
struct Running {
    float largest, sum;
    float* values;  // [D], quarters of interleaved halves until the end
    float* scores;  // where they are kept, or null
};

// Scores of a chunk to weights, as bf16 pairs of neighbouring keys; what was summed up before is rescaled.
TR_AVX512 inline float soften_chunk(const __m512* s, float scale, Running& head, uint32_t* pairs) {
    const __m512 top = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
    const float largest = std::max(head.largest, max_of((f32x16)top) * scale);
    f32x16 p[kChunk / 16];
    for (int i = 0; i < kChunk / 16; ++i)
        p[i] = exp2_for_bf16<Avx512>((f32x16)s[i] * (scale * kLog2e) - largest * kLog2e);
    const float rescale = largest == head.largest ? 1.0f : std::exp(head.largest - largest);
    head.largest = largest;
    head.sum = head.sum * rescale + sum16((p[0] + p[1]) + (p[2] + p[3]));
    for (int i = 0; i < kChunk / 32; ++i)
        _mm512_storeu_si512(pairs + 16 * i, (__m512i)_mm512_cvtne2ps_pbh((__m512)p[2 * i + 1], (__m512)p[2 * i]));
    return rescale;
}

// Adds the weighted values of a chunk, two keys at a time: interleaved they meet a pair of weights, which R heads share.
template <int R, int N>
TR_AVX512 inline void add_values(const Range& range, int64_t value, int64_t k0, const uint32_t (*pairs)[kChunk / 2],
                                 const float* rescale, Running* heads) {
    __m512 acc[R][N][2];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
            for (int half = 0; half < 2; ++half)
                acc[r][n][half] = _mm512_mul_ps(_mm512_loadu_ps(heads[r].values + 32 * n + 16 * half),
                                                _mm512_set1_ps(rescale[r]));
    for (int64_t i = 0; i < kChunk / 2 && k0 + 2 * i < range.count; ++i) {
        const int64_t k = k0 + 2 * i;
        const uint16_t* v0 = range.key<uint16_t>(k, value);
        const uint16_t* v1 = range.key<uint16_t>(std::min(k + 1, range.count - 1), value);
        for (int64_t ahead = k + kAheadKeys; ahead < std::min(k + kAheadKeys + 2, range.ahead); ++ahead) {
            const uint16_t* next = range.key<uint16_t>(ahead, value);
            for (int n = 0; n < N; ++n) {
                _mm_prefetch((const char*)(next + 32 * n), _MM_HINT_T0);
                _mm_prefetch((const char*)(next - range.value_offset + 32 * n), _MM_HINT_T0);
            }
        }
        for (int n = 0; n < N; ++n) {
            const __m512i a = _mm512_loadu_si512(v0 + 32 * n), b = _mm512_loadu_si512(v1 + 32 * n);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
            const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
            for (int r = 0; r < R; ++r) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(int32_t(pairs[r][i]));
                acc[r][n][0] = _mm512_dpbf16_ps(acc[r][n][0], low, pair);
                acc[r][n][1] = _mm512_dpbf16_ps(acc[r][n][1], high, pair);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
            for (int half = 0; half < 2; ++half)
                _mm512_storeu_ps(heads[r].values + 32 * n + 16 * half, acc[r][n][half]);
}

// One chunk for R heads of a group.
template <int R, int N>
TR_AVX512 void chunk_avx512(const Range& range, int64_t key, int64_t k0, const uint16_t* q, float scale,
                            Running* heads) {
    alignas(64) uint32_t pairs[R][kChunk / 2];
    float rescale[R];
    const int64_t left = range.count - k0;
    for (int r = 0; r < R; ++r) {
        __m512 s[kChunk / 16];
        for (int i = 0; i < kChunk / 16; ++i) {
            const int64_t count = std::min<int64_t>(16, left - 16 * i);
            s[i] = _mm512_set1_ps(-INFINITY);
            if (count <= 0) continue;
            const __mmask16 seen = __mmask16((1u << count) - 1);
            s[i] = _mm512_mask_mov_ps(s[i], seen, scores_avx512<N>(range, key, q + r * 32 * N, k0 + 16 * i));
            if (heads[r].scores) _mm512_mask_storeu_ps(heads[r].scores + k0 + 16 * i, seen, s[i]);
        }
        rescale[r] = soften_chunk(s, scale, heads[r], pairs[r]);
    }
    add_values<R, N>(range, key + range.value_offset, k0, pairs, rescale, heads);
}

// Values come interleaved: quarter i of a low half holds values 8i .. 8i + 3, of a high half the next four.
TR_AVX512 void straighten(float* values, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 32) {
        float mixed[32];
        std::memcpy(mixed, values + d, sizeof mixed);
        for (int i = 0; i < 4; ++i) {
            std::memcpy(values + d + 8 * i, mixed + 4 * i, 16);
            std::memcpy(values + d + 8 * i + 4, mixed + 16 + 4 * i, 16);
        }
    }
}

template <class V>
TR_INLINE void weigh_body(float* scores, int64_t count, float scale, float largest) {
    for (int64_t k = 0; k < count; k += kLanes) {
        const int64_t n = std::min(kLanes, count - k);
        store_some<V>(scores + k, exp16<V>(load_some<V>(scores + k, n) * scale - largest), n);
    }
}

TR_AVX512 void weigh_avx512(float* scores, int64_t count, float scale, float largest) {
    weigh_body<Avx512>(scores, count, scale, largest);
}

template <int N>
TR_AVX512 void decode_heads(const AttentionShape& shape, const Range& range, const uint16_t* q,
                            const DecodePart& part) {
    static thread_local std::vector<Running> state;
    const int64_t dim = shape.head_dim, repeat = shape.repeat();
    state.clear();
    for (int64_t h = 0; h < shape.num_heads; ++h) {
        std::memset(part.values + h * dim, 0, size_t(dim) * sizeof(float));
        state.push_back({-INFINITY, 0.0f, part.values + h * dim, part.weights ? part.weights + h * kSplitKeys : nullptr});
    }
    for (int64_t k0 = 0; k0 < range.count; k0 += kChunk) {
        for (int64_t g = 0; g < shape.num_groups; ++g) {
            for (int64_t h = g * repeat, end = h + repeat; h < end; h += 3) {
                Running* heads = state.data() + h;
                const uint16_t* rows = q + h * dim;
                if (end - h >= 3) chunk_avx512<3, N>(range, g * dim, k0, rows, shape.scale, heads);
                if (end - h == 2) chunk_avx512<2, N>(range, g * dim, k0, rows, shape.scale, heads);
                if (end - h == 1) chunk_avx512<1, N>(range, g * dim, k0, rows, shape.scale, heads);
            }
        }
    }
    for (int64_t h = 0; h < shape.num_heads; ++h) {
        straighten(part.values + h * dim, dim);
        part.largest[h] = state[size_t(h)].largest;
        part.sum[h] = state[size_t(h)].sum;
        if (part.weights) weigh_avx512(part.weights + h * kSplitKeys, range.count, shape.scale, part.largest[h]);
    }
}

bool decode_avx512(const AttentionShape& shape, const Range& range, const uint16_t* q, const DecodePart& part) {
    if (isa() < Isa::avx512 || range.count == 0) return false;
    switch (shape.head_dim) {
        case 32: decode_heads<1>(shape, range, q, part); return true;
        case 64: decode_heads<2>(shape, range, q, part); return true;
        case 96: decode_heads<3>(shape, range, q, part); return true;
        case 128: decode_heads<4>(shape, range, q, part); return true;
        default: return false;
    }
}
#else
bool decode_avx512(const AttentionShape&, const Range&, const uint16_t*, const DecodePart&) { return false; }
#endif

// ---- ranges together --------------------------------------------------------------------------------------------------

template <class V, typename T>
TR_INLINE void merge_body(const DecodePart* parts, int64_t num_parts, const int64_t* counts, int64_t num_heads,
                          int64_t dim, float* scratch, T* out, float* received) {
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
        float* at = received;
        for (int64_t i = 0; i < num_parts; at += counts[i++])
            add_scaled<V>(parts[i].weights + h * kSplitKeys, scratch[i] * inverse / float(num_heads), at, counts[i]);
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

}  // namespace

void decode_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                 const AttentionRun& run, const DecodePart& part) {
    const int64_t keys = shape.num_groups * shape.head_dim, q_at = request.query_rows[0] * run.q_stride;
    const Range range{run.kv, 2 * keys, keys, request.slots + item.begin, item.end - item.begin,
                      request.num_keys - item.begin};
    if (!shape.is_bf16) {
        decode_float(shape, range, static_cast<const float*>(run.q) + q_at, part);
        return;
    }
    const bf16* q = static_cast<const bf16*>(run.q) + q_at;
    if (!decode_avx512(shape, range, reinterpret_cast<const uint16_t*>(q), part)) decode_bf16(shape, range, q, part);
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
