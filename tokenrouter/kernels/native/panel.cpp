// See panel.h. The micro-kernels: tiles, 512-bit dot products, 256-bit, plain.
#include "native/panel.h"

#include <algorithm>

#include "native/isa.h"
#include "native/simd.h"
#include "native/tiles.h"

namespace tr {
namespace {

TR_INLINE u32x16 load_words(const uint8_t* p) {
    u32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// ---- plain ----------------------------------------------------------------------------------------------------------

void int8_plain(const PanelArgs& p, void* out) {
    for (int64_t i = 0; i < p.rows; ++i) {
        const int8_t* a = reinterpret_cast<const int8_t*>(p.a + i * p.a_stride);
        const int8_t* w = reinterpret_cast<const int8_t*>(p.w);
        int32_t* sums = static_cast<int32_t*>(out) + i * kPanel;
        std::memset(sums, 0, kPanel * sizeof *sums);
        for (int64_t t = 0; t < p.k_tiles; ++t)
            for (int64_t half = 0; half < 2; ++half)
                for (int64_t r = 0; r < 16; ++r, w += 64)
                    for (int64_t c = 0; c < 16; ++c)
                        for (int64_t j = 0; j < 4; ++j)
                            sums[half * 16 + c] += int32_t(w[c * 4 + j]) * a[t * 64 + r * 4 + j];
    }
}

// R rows at once, portable vectors; also the 256-bit version.
template <int R>
TR_INLINE void bf16_rows(const PanelArgs& p, int64_t i, float* out) {
    f32x16 sums[R][2] = {};
    for (int64_t t = 0; t < p.k_tiles; ++t) {
        for (int64_t r = 0; r < 16; ++r) {
            const u32x16 w0 = load_words(p.w + t * kTile + r * 64);
            const u32x16 w1 = load_words(p.w + t * kTile + 1024 + r * 64);
            const f32x16 even0 = (f32x16)(w0 << 16), odd0 = (f32x16)(w0 & 0xffff0000u);
            const f32x16 even1 = (f32x16)(w1 << 16), odd1 = (f32x16)(w1 & 0xffff0000u);
            for (int row = 0; row < R; ++row) {
                const bf16* a = reinterpret_cast<const bf16*>(p.a + (i + row) * p.a_stride) + t * 32 + r * 2;
                const f32x16 x0 = splat(to_float(a[0])), x1 = splat(to_float(a[1]));
                sums[row][0] = sums[row][0] + even0 * x0 + odd0 * x1;
                sums[row][1] = sums[row][1] + even1 * x0 + odd1 * x1;
            }
        }
    }
    for (int row = 0; row < R; ++row)
        for (int half = 0; half < 2; ++half) store16<Portable>(out + (i + row) * kPanel + half * 16, sums[row][half]);
}

TR_INLINE void bf16_body(const PanelArgs& p, void* out) {
    int64_t i = 0;
    for (; i + 2 <= p.rows; i += 2) bf16_rows<2>(p, i, static_cast<float*>(out));
    if (i < p.rows) bf16_rows<1>(p, i, static_cast<float*>(out));
}

void bf16_plain(const PanelArgs& p, void* out) { bf16_body(p, out); }

#if TR_X86
// ---- 256 bit --------------------------------------------------------------------------------------------------------

// Four k of four channels per register: pairs are summed by madd (exact in 32 bits), the two pairs at the end.
TR_AVX2 void int8_avx2(const PanelArgs& p, void* out) {
    for (int64_t i = 0; i < p.rows; ++i) {
        const uint8_t* a = p.a + i * p.a_stride;
        __m256i acc[8];
        for (auto& v : acc) v = _mm256_setzero_si256();
        for (int64_t t = 0; t < p.k_tiles; ++t) {
            for (int64_t r = 0; r < 16; ++r) {
                int32_t four;
                std::memcpy(&four, a + t * 64 + r * 4, 4);
                const __m256i x = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
                for (int64_t q = 0; q < 8; ++q) {
                    const uint8_t* w = p.w + t * kTile + (q / 4) * 1024 + r * 64 + (q % 4) * 16;
                    const __m256i w16 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w));
                    acc[q] = _mm256_add_epi32(acc[q], _mm256_madd_epi16(w16, x));
                }
            }
        }
        int32_t* sums = static_cast<int32_t*>(out) + i * kPanel;
        for (int64_t q = 0; q < 8; ++q) {
            alignas(32) int32_t pairs[8];
            _mm256_store_si256((__m256i*)pairs, acc[q]);
            for (int64_t c = 0; c < 4; ++c) sums[q * 4 + c] = pairs[2 * c] + pairs[2 * c + 1];
        }
    }
}

TR_AVX2 void bf16_avx2(const PanelArgs& p, void* out) { bf16_body(p, out); }

// ---- 512 bit --------------------------------------------------------------------------------------------------------

// VNNI multiplies unsigned with signed bytes: activations come offset by 128, channel_sum takes the offset out again.
template <int R>
TR_AVX512 void int8_rows_avx512(const PanelArgs& p, int64_t i, void* out) {
    __m512i acc[R][2];
    const __m512i offset = _mm512_set1_epi32(-128);
    for (int h = 0; h < 2; ++h) {
        const __m512i sum = _mm512_loadu_si512(p.channel_sum + h * 16);
        for (int row = 0; row < R; ++row) acc[row][h] = _mm512_mullo_epi32(sum, offset);
    }
    const uint8_t* a = p.a + i * p.a_stride;
    for (int64_t t = 0; t < p.k_tiles; ++t) {
        for (int64_t r = 0; r < 16; ++r) {
            const __m512i w0 = _mm512_loadu_si512(p.w + t * kTile + r * 64);
            const __m512i w1 = _mm512_loadu_si512(p.w + t * kTile + 1024 + r * 64);
            for (int row = 0; row < R; ++row) {
                int32_t four;
                std::memcpy(&four, a + row * p.a_stride + t * 64 + r * 4, 4);
                const __m512i x = _mm512_set1_epi32(four);
                acc[row][0] = _mm512_dpbusd_epi32(acc[row][0], x, w0);
                acc[row][1] = _mm512_dpbusd_epi32(acc[row][1], x, w1);
            }
        }
    }
    int32_t* sums = static_cast<int32_t*>(out) + i * kPanel;
    for (int row = 0; row < R; ++row)
        for (int h = 0; h < 2; ++h) _mm512_storeu_si512(sums + row * kPanel + h * 16, acc[row][h]);
}

template <int R>
TR_AVX512 void bf16_rows_avx512(const PanelArgs& p, int64_t i, void* out) {
    __m512 acc[R][2];
    for (int row = 0; row < R; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
    const uint8_t* a = p.a + i * p.a_stride;
    for (int64_t t = 0; t < p.k_tiles; ++t) {
        for (int64_t r = 0; r < 16; ++r) {
            const __m512bh w0 = (__m512bh)_mm512_loadu_si512(p.w + t * kTile + r * 64);
            const __m512bh w1 = (__m512bh)_mm512_loadu_si512(p.w + t * kTile + 1024 + r * 64);
            for (int row = 0; row < R; ++row) {
                int32_t two;
                std::memcpy(&two, a + row * p.a_stride + t * 64 + r * 4, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(two);
                acc[row][0] = _mm512_dpbf16_ps(acc[row][0], x, w0);
                acc[row][1] = _mm512_dpbf16_ps(acc[row][1], x, w1);
            }
        }
    }
    float* sums = static_cast<float*>(out) + i * kPanel;
    for (int row = 0; row < R; ++row)
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + row * kPanel + h * 16, acc[row][h]);
}

using RowsKernel = void (*)(const PanelArgs&, int64_t, void*);
constexpr int64_t kMaxRows = 8;
constexpr RowsKernel kInt8Rows[kMaxRows] = {
    int8_rows_avx512<1>, int8_rows_avx512<2>, int8_rows_avx512<3>, int8_rows_avx512<4>,
    int8_rows_avx512<5>, int8_rows_avx512<6>, int8_rows_avx512<7>, int8_rows_avx512<8>};
constexpr RowsKernel kBf16Rows[kMaxRows] = {
    bf16_rows_avx512<1>, bf16_rows_avx512<2>, bf16_rows_avx512<3>, bf16_rows_avx512<4>,
    bf16_rows_avx512<5>, bf16_rows_avx512<6>, bf16_rows_avx512<7>, bf16_rows_avx512<8>};

void by_rows(const RowsKernel* kernels, const PanelArgs& p, void* out) {
    for (int64_t done = 0; done < p.rows;) {
        const int64_t step = std::min(kMaxRows, p.rows - done);
        kernels[step - 1](p, done, out);
        done += step;
    }
}

void int8_avx512(const PanelArgs& p, void* out) { by_rows(kInt8Rows, p, out); }

void bf16_avx512(const PanelArgs& p, void* out) { by_rows(kBf16Rows, p, out); }

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Tiles 0 to 3: sums (rows 0-15 and 16-31 by channels 0-15 and 16-31), 4 and 5: activations, 6 and 7: weights.
TR_AMX void configure(int64_t rows) {
    TileConfig config;
    const uint8_t top = uint8_t(std::min<int64_t>(rows, 16)), bottom = uint8_t(rows > 16 ? rows - 16 : 1);
    const uint8_t heights[8] = {top, top, bottom, bottom, top, bottom, 16, 16};
    for (int i = 0; i < 8; ++i) {
        config.columns[i] = 64;
        config.rows[i] = heights[i];
    }
    load(config);
}

TR_AMX void release() { _tile_release(); }

#define TR_TILE_PANEL(name, dot)                                                                   \
    TR_AMX void name(const PanelArgs& p, void* out) {                                              \
        constexpr int64_t row_bytes = kPanel * 4;                                                  \
        uint8_t* sums = static_cast<uint8_t*>(out);                                                \
        _tile_zero(0);                                                                             \
        _tile_zero(1);                                                                             \
        if (p.rows <= 16) {                                                                        \
            for (int64_t t = 0; t < p.k_tiles; ++t) {                                              \
                _tile_loadd(4, p.a + t * 64, p.a_stride);                                          \
                _tile_loadd(6, p.w + t * kTile, 64);                                               \
                dot(0, 4, 6);                                                                      \
                _tile_loadd(7, p.w + t * kTile + 1024, 64);                                        \
                dot(1, 4, 7);                                                                      \
            }                                                                                      \
        } else {                                                                                   \
            const uint8_t* bottom = p.a + 16 * p.a_stride;                                         \
            _tile_zero(2);                                                                         \
            _tile_zero(3);                                                                         \
            for (int64_t t = 0; t < p.k_tiles; ++t) {                                              \
                _tile_loadd(6, p.w + t * kTile, 64);                                               \
                _tile_loadd(4, p.a + t * 64, p.a_stride);                                          \
                dot(0, 4, 6);                                                                      \
                _tile_loadd(5, bottom + t * 64, p.a_stride);                                       \
                dot(2, 5, 6);                                                                      \
                _tile_loadd(7, p.w + t * kTile + 1024, 64);                                        \
                dot(1, 4, 7);                                                                      \
                dot(3, 5, 7);                                                                      \
            }                                                                                      \
            _tile_stored(2, sums + 16 * row_bytes, row_bytes);                                     \
            _tile_stored(3, sums + 16 * row_bytes + 64, row_bytes);                                \
        }                                                                                          \
        _tile_stored(0, sums, row_bytes);                                                          \
        _tile_stored(1, sums + 64, row_bytes);                                                     \
    }

TR_TILE_PANEL(int8_amx, _tile_dpbssd)
TR_TILE_PANEL(bf16_amx, _tile_dpbf16ps)
#endif  // TR_X86

}  // namespace

PanelKernels::PanelKernels() : level_(isa()) {
    int8_ = int8_plain;
    bf16_ = bf16_plain;
#if TR_X86
    if (level_ == Isa::amx) {
        int8_ = int8_amx;
        bf16_ = bf16_amx;
    } else if (level_ == Isa::avx512) {
        int8_ = int8_avx512;
        bf16_ = bf16_avx512;
    } else if (level_ == Isa::avx2) {
        int8_ = int8_avx2;
        bf16_ = bf16_avx2;
    }
#endif
}

PanelKernels::~PanelKernels() {
#if TR_X86
    if (configured_) release();
#endif
}

void PanelKernels::prepare(int64_t rows) {
#if TR_X86
    if (level_ == Isa::amx && configured_ != rows) {
        configure(rows);
        configured_ = rows;
    }
#endif
}

}  // namespace tr
