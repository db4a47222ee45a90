// See native.h. The product itself is the int8 one (native/gemm.cpp).
#include "int4_matmul/native.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "native/simd.h"

namespace tr {
namespace {

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));

// A byte of each of 16 channels, in the low byte of its 4.
template <class V>
TR_INLINE u32x16 channels(const uint8_t* p) {
    i8x16 bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return (u32x16)widen<V>(bytes) & 0xffu;
}

TR_INLINE void put_row(u32x16 codes, u32x16 step, u32x16 offset, uint8_t* to) {
    const u16x32 scaled = (u16x32)codes * (u16x32)step;
    const u8x64 values = (u8x64)scaled + (u8x64)offset;
    std::memcpy(to, &values, sizeof values);
}

template <class V>
TR_INLINE void expand_body(const uint8_t* packed, int64_t k_tiles, uint8_t* panel) {
    constexpr int64_t row_bytes = 64, half_bytes = kTile / 2, groups = kTileBytes / kInt4Group;
    for (int64_t i = 0; i < k_tiles * groups; ++i, packed += kInt4GroupBytes) {
        uint8_t* group = panel + i / groups * kTile + i % groups * (half_bytes / groups);
        for (int64_t half = 0; half < 2; ++half) {
            const u32x16 step = channels<V>(packed + half * 16) * 0x00010001u;
            const u32x16 offset = channels<V>(packed + kPanel + half * 16) * 0x01010101u;
            const uint8_t* codes = packed + 64 + half * (kInt4GroupBytes - 64) / 2;
            uint8_t* to = group + half * half_bytes;
            for (int64_t r = 0; r < 4; ++r, codes += row_bytes, to += 2 * row_bytes) {
                u32x16 both;
                std::memcpy(&both, codes, sizeof both);
                put_row(both & 0x0f0f0f0fu, step, offset, to);
                put_row((both >> 4) & 0x0f0f0f0fu, step, offset, to + row_bytes);
            }
        }
    }
}

TR_EACH_ISA(expand, expand_body, (), (const uint8_t* packed, int64_t k_tiles, uint8_t* panel),
            (packed, k_tiles, panel))

void pack_group(const Int4Weights& w, int64_t channel, int64_t group, uint8_t* to) {
    const int64_t c = channel % kPanel, at = channel * w.groups + group;
    to[c] = w.step[at];
    std::memcpy(to + kPanel + c, w.offset + at, 1);
    uint8_t* half = to + 64 + c / 16 * (kInt4GroupBytes - 64) / 2 + c % 16 * 4;
    const uint8_t* codes = w.codes + at * kInt4Group;
    for (int64_t k = 0; k < kInt4Group; ++k)
        half[k / 8 * 64 + k % 4] |= uint8_t((codes[k] & 15) << (k / 4 % 2 * 4));
}

}  // namespace

void pack_int4(const Int4Weights& w, int64_t k_tiles, uint8_t* packed) {
    at::parallel_for(0, num_panels(w.n), 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            uint8_t* panel = packed + p * k_tiles * kInt4Tile;
            std::memset(panel, 0, size_t(k_tiles * kInt4Tile));
            for (int64_t n = p * kPanel; n < std::min(w.n, (p + 1) * kPanel); ++n)
                for (int64_t g = 0; g < w.groups; ++g) pack_group(w, n, g, panel + g * kInt4GroupBytes);
        }
    });
}

void expand_int4(const uint8_t* packed, int64_t k_tiles, uint8_t* panel) { expand(packed, k_tiles, panel); }

void sum_channels(const uint8_t* panel, int64_t k_tiles, int32_t* sums) {
    std::memset(sums, 0, kPanel * sizeof *sums);
    for (int64_t i = 0; i < k_tiles * kTile; ++i) sums[i % kTile / 1024 * 16 + i % 64 / 4] += int8_t(panel[i]);
}

}  // namespace tr
