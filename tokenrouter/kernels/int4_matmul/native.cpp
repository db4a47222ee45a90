// See native.h. The product itself is the int8 one (native/gemm.cpp).
#include "int4_matmul/native.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "native/isa.h"

namespace tr {
namespace {

// Vectors of the processor's size: larger ones of bytes and words are taken apart number by number.
template <class V>
struct Words {
    static constexpr int64_t bytes = V::vector_lanes * 4;
    typedef uint8_t u8 __attribute__((vector_size(bytes)));
    typedef uint16_t u16 __attribute__((vector_size(bytes)));
};

// A byte of each of 16 channels, `times` in its 4 bytes.
TR_INLINE void spread(const uint8_t* from, uint32_t times, uint8_t* to) {
    for (int64_t c = 0; c < 16; ++c) {
        const uint32_t four = from[c] * times;
        std::memcpy(to + 4 * c, &four, sizeof four);
    }
}

// Two rows of codes of 16 channels: the low and the high nibbles.
template <class V>
TR_INLINE void expand_rows(const uint8_t* codes, const uint8_t* step, const uint8_t* offset, uint8_t* to) {
    using Bytes = typename Words<V>::u8;
    using Pairs = typename Words<V>::u16;
    for (int64_t at = 0; at < 64; at += Words<V>::bytes) {
        Pairs both, by;
        Bytes plus;
        std::memcpy(&both, codes + at, sizeof both);
        std::memcpy(&by, step + at, sizeof by);
        std::memcpy(&plus, offset + at, sizeof plus);
        const Bytes low = (Bytes)((both & 0x0f0f) * by) + plus, high = (Bytes)((both >> 4 & 0x0f0f) * by) + plus;
        std::memcpy(to + at, &low, sizeof low);
        std::memcpy(to + 64 + at, &high, sizeof high);
    }
}

template <class V>
TR_INLINE void expand_body(const uint8_t* packed, int64_t k_tiles, uint8_t* panel) {
    constexpr int64_t half_bytes = kTile / 2, groups = kTileBytes / kInt4Group;
    alignas(64) uint8_t step[64], offset[64];
    for (int64_t i = 0; i < k_tiles * groups; ++i, packed += kInt4GroupBytes) {
        uint8_t* group = panel + i / groups * kTile + i % groups * (half_bytes / groups);
        for (int64_t half = 0; half < 2; ++half) {
            spread(packed + half * 16, 0x00010001u, step);
            spread(packed + kPanel + half * 16, 0x01010101u, offset);
            const uint8_t* codes = packed + 64 + half * (kInt4GroupBytes - 64) / 2;
            for (int64_t r = 0; r < 4; ++r)
                expand_rows<V>(codes + r * 64, step, offset, group + half * half_bytes + r * 128);
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
