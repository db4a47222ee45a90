// Decode attention by bf16 dot products, for processors that have them (avx512).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/fetcher.h"

#if TR_X86
#include <immintrin.h>

namespace tr {
namespace {

constexpr int64_t kChunk = kChunkKeys;

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

// ---- one chunk of keys ------------------------------------------------------------------------------------------------

// What one head has seen so far.
struct Running {
    float largest, sum;
    float* values;      // [D], quarters of interleaved halves until the end
    uint32_t* weights;  // where pairs of them are kept, a chunk after the other, or null
    float* tops;        // and the largest score that each chunk's are relative to
};

// A chunk of one group where some entries are int8: their integers, which bf16 holds exactly, and the others as they are.
template <int N>
struct Widened {
    alignas(64) uint16_t rows[kChunk * 2 * 32 * N];  // a key, then its value
    alignas(64) float key_scales[kChunk], value_scales[kChunk];
};

TR_AVX512 inline void widen_row(const int8_t* q, uint16_t* out) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <int N>
TR_AVX512 void widen_chunk(const ItemEntries& entries, int64_t k0, int64_t count, int64_t key, int64_t value,
                           int64_t planes, Widened<N>& to) {
    constexpr int64_t dim = 32 * N;
    const KvMemory& kv = entries.kv;
    for (int64_t i = 0; i < kChunk; ++i) to.key_scales[i] = to.value_scales[i] = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = entries.slots[k0 + i];
        uint16_t* row = to.rows + i * 2 * dim;
        if (!kv.is_int8(slot)) {
            const uint16_t* from = static_cast<const uint16_t*>(kv.entries) + slot * planes * dim;
            std::memcpy(row, from + key * dim, dim * 2);
            std::memcpy(row + dim, from + value * dim, dim * 2);
            continue;
        }
        const int64_t at = (slot - kv.num_entries) * planes;
        to.key_scales[i] = kv.scales[at + key];
        to.value_scales[i] = kv.scales[at + value];
        for (int n = 0; n < N; ++n) {
            widen_row(kv.int8 + (at + key) * dim + 32 * n, row + 32 * n);
            widen_row(kv.int8 + (at + value) * dim + 32 * n, row + dim + 32 * n);
        }
    }
}

// bf16 pairs of neighbouring keys' weights.
TR_AVX512 inline void store_pairs(const f32x16* p, uint32_t* pairs) {
    for (int i = 0; i < kChunk / 32; ++i)
        _mm512_storeu_si512(pairs + 16 * i, (__m512i)_mm512_cvtne2ps_pbh((__m512)p[2 * i + 1], (__m512)p[2 * i]));
}

// Scores of a chunk to weights, as pairs; what was summed up before is rescaled. `value_pairs`: the weights times
// `value_scales`, where these are given.
TR_AVX512 inline float soften_chunk(const __m512* s, float scale, Running& head, uint32_t* pairs,
                                    const float* value_scales, uint32_t* value_pairs) {
    __m512 top = s[0];
    for (int i = 1; i < kChunk / 16; ++i) top = _mm512_max_ps(top, s[i]);
    const float largest = std::max(head.largest, max_of((f32x16)top) * scale);
    f32x16 p[kChunk / 16];
    for (int i = 0; i < kChunk / 16; ++i)
        p[i] = exp2_for_bf16<Avx512>((f32x16)s[i] * (scale * kLog2e) - largest * kLog2e);
    const float rescale = largest == head.largest ? 1.0f : std::exp(head.largest - largest);
    head.largest = largest;
    f32x16 total = p[0];
    for (int i = 1; i < kChunk / 16; ++i) total += p[i];
    head.sum = head.sum * rescale + sum16(total);
    store_pairs(p, pairs);
    if (value_scales) {
        const __m512 least = _mm512_set1_ps(1e-30f);  // products of less may be denormal, which takes a hundred times as long
        for (int i = 0; i < kChunk / 16; ++i)
            p[i] = (f32x16)_mm512_maskz_mul_ps(_mm512_cmp_ps_mask((__m512)p[i], least, _CMP_NLT_UQ), (__m512)p[i],
                                               _mm512_load_ps(value_scales + 16 * i));
        store_pairs(p, value_pairs);
    }
    return rescale;
}

// Adds the weighted values of a chunk, two keys at a time: interleaved they meet a pair of weights, which R heads share.
template <int R, int N>
TR_AVX512 inline void add_values(const Range& range, int64_t value, int64_t k0, const uint32_t (*pairs)[kChunk / 2],
                                 const float* rescale, Running* heads, Fetcher& fetcher) {
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
        fetcher.fetch(fetcher.per_pair);
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

// One chunk for R heads of a group: from k0 of `range` on, which is `at` of the item. `widened`: what the range lies in, or
// null.
template <int R, int N>
TR_AVX512 void chunk_avx512(const Range& range, const Widened<N>* widened, int64_t key, int64_t k0, int64_t at,
                            const uint16_t* q, float scale, Running* heads, Fetcher& fetcher) {
    alignas(64) uint32_t pairs[R][kChunk / 2], value_pairs[R][kChunk / 2];
    float rescale[R];
    const int64_t left = range.count - k0;
    for (int r = 0; r < R; ++r) {
        __m512 s[kChunk / 16];
        for (int i = 0; i < kChunk / 16; ++i) {
            const int64_t count = std::min<int64_t>(16, left - 16 * i);
            s[i] = _mm512_set1_ps(-INFINITY);
            if (count <= 0) continue;
            fetcher.fetch(fetcher.per_scores);
            const __mmask16 seen = __mmask16((1u << count) - 1);
            __m512 scores = scores_avx512<N>(range, key, q + r * 32 * N, k0 + 16 * i);
            if (widened) scores = _mm512_mul_ps(scores, _mm512_load_ps(widened->key_scales + 16 * i));
            s[i] = _mm512_mask_mov_ps(s[i], seen, scores);
        }
        rescale[r] = soften_chunk(s, scale, heads[r], pairs[r], widened ? widened->value_scales : nullptr,
                                  value_pairs[r]);
        if (!heads[r].weights) continue;
        std::memcpy(heads[r].weights + at / 2, pairs[r], sizeof pairs[r]);
        heads[r].tops[at / kChunk] = heads[r].largest;
    }
    add_values<R, N>(range, key + range.value_offset, k0, widened ? value_pairs : pairs, rescale, heads, fetcher);
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

template <int N>
TR_AVX512 void decode_heads(const AttentionShape& shape, const ItemEntries& entries, const uint16_t* q,
                            const DecodePart& part) {
    Widened<N> widened;
    static thread_local std::vector<Running> state;
    const int64_t dim = shape.head_dim, repeat = shape.repeat();
    state.clear();
    for (int64_t h = 0; h < shape.num_heads; ++h) {
        std::memset(part.values + h * dim, 0, size_t(dim) * sizeof(float));
        state.push_back({-INFINITY, 0.0f, part.values + h * dim, nullptr, nullptr});
    }
    for (int64_t h = 0; part.weights && h < shape.num_heads; ++h) {
        state[size_t(h)].weights = static_cast<uint32_t*>(part.weights) + h * kSplitKeys / 2;
        state[size_t(h)].tops = part.tops + h * kSplitChunks;
    }
    const int64_t keys = shape.num_groups * dim;
    const Range in_place{entries.kv.entries, 2 * keys, keys, entries.slots, entries.count};
    Fetcher fetcher(shape, entries);
    for (int64_t k0 = 0; k0 < entries.count; k0 += kChunk) {
        fetcher.start_chunk(k0);
        const int64_t count = std::min(kChunk, entries.count - k0);
        const bool widens = entries.any_int8(k0, k0 + count);
        const Range wide{widened.rows, 2 * dim, dim, neighbours(), count};
        const Range& range = widens ? wide : in_place;
        for (int64_t g = 0; g < shape.num_groups; ++g) {
            if (widens) widen_chunk(entries, k0, count, g, shape.num_groups + g, 2 * shape.num_groups, widened);
            for (int64_t h = g * repeat, end = h + repeat; h < end; h += 3) {
                const auto chunk = end - h >= 3   ? chunk_avx512<3, N>
                                   : end - h == 2 ? chunk_avx512<2, N>
                                                  : chunk_avx512<1, N>;
                chunk(range, widens ? &widened : nullptr, widens ? 0 : g * dim, widens ? 0 : k0, k0, q + h * dim,
                      shape.scale, state.data() + h, fetcher);
            }
        }
    }
    for (int64_t h = 0; h < shape.num_heads; ++h) {
        straighten(part.values + h * dim, dim);
        part.largest[h] = state[size_t(h)].largest;
        part.sum[h] = state[size_t(h)].sum;
    }
}

}  // namespace

bool decode_bf16_pairs(const AttentionShape& shape, const ItemEntries& entries, const uint16_t* q,
                       const DecodePart& part) {
    if (isa() < Isa::avx512 || entries.count == 0) return false;
    switch (shape.head_dim) {
        case 32: decode_heads<1>(shape, entries, q, part); return true;
        case 64: decode_heads<2>(shape, entries, q, part); return true;
        case 96: decode_heads<3>(shape, entries, q, part); return true;
        case 128: decode_heads<4>(shape, entries, q, part); return true;
        default: return false;
    }
}

}  // namespace tr
#else
namespace tr {
bool decode_bf16_pairs(const AttentionShape&, const ItemEntries&, const uint16_t*, const DecodePart&) { return false; }
}  // namespace tr
#endif
