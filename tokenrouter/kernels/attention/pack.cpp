// Keys and values of prefill attention in panels.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attention/native.h"
#include "native/panel.h"

namespace tr {
namespace {

// bf16 keys and values lie in the panels of panel.h: keys are channels of the first product (k: the head's dimensions),
// dimensions are channels of the second (k: the keys). float panels are rows of 32 channels, one row per k.

struct Source {
    const void* entries;  // key of slot 0
    int64_t stride, value_offset;
    const int64_t* slots;
    int64_t count;        // 1 .. 32
};

template <typename T>
TR_INLINE const T* entry(const Source& from, int64_t i) {
    return static_cast<const T*>(from.entries) + from.slots[i] * from.stride;
}

template <class V>
TR_INLINE void pack_float_body(const Source& from, int64_t dim, int64_t padded, float* keys, float* values,
                               int64_t num_panels) {
    std::memset(keys, 0, size_t(32 * padded) * sizeof(float));
    for (int64_t d0 = 0; d0 < padded; d0 += 32)
        std::memset(values + d0 * 32 * num_panels, 0, 32 * 32 * sizeof(float));
    for (int64_t i = 0; i < from.count; ++i) {
        const float* key = entry<float>(from, i);
        for (int64_t d = 0; d < dim; ++d) keys[d * 32 + i] = key[d];
        const float* value = key + from.value_offset;
        for (int64_t d0 = 0; d0 < dim; d0 += 32)
            std::memcpy(values + d0 * 32 * num_panels + i * 32, value + d0,
                        size_t(std::min<int64_t>(32, dim - d0)) * sizeof(float));
    }
}

template <class V>
TR_INLINE void pack_bf16_body(const Source& from, int64_t dim, int64_t padded, uint8_t* keys, uint8_t* values,
                              int64_t num_panels) {
    std::memset(keys, 0, size_t(padded * 64));
    for (int64_t i = 0; i < from.count; ++i) {
        const uint8_t* key = reinterpret_cast<const uint8_t*>(entry<bf16>(from, i));
        uint8_t* to = keys + (i / 16) * 1024 + (i % 16) * 4;
        int64_t d = 0;
        for (; d + 1 < dim; d += 2) std::memcpy(to + d / 32 * kTile + d % 32 * 32, key + d * 2, 4);
        if (d < dim) std::memcpy(to + d / 32 * kTile + d % 32 * 32, key + d * 2, 2);
    }
    alignas(64) uint16_t rows[2][32];
    for (int64_t d0 = 0; d0 < padded; d0 += 32) {
        const int64_t width = std::min<int64_t>(32, dim - d0);
        for (int64_t pair = 0; pair < 16; ++pair) {
            uint8_t* to = values + d0 / 32 * kTile * num_panels + pair * 64;
            std::memset(rows, 0, sizeof rows);
            for (int64_t i = 0; i < 2; ++i)
                if (2 * pair + i < from.count)
                    std::memcpy(rows[i], entry<bf16>(from, 2 * pair + i) + from.value_offset + d0, size_t(width) * 2);
            alignas(64) uint32_t mixed[32];
            for (int64_t c = 0; c < 32; ++c) mixed[c] = rows[0][c] | uint32_t(rows[1][c]) << 16;
            std::memcpy(to, mixed, 64);
            std::memcpy(to + 1024, mixed + 16, 64);
        }
    }
}

TR_EACH_ISA(pack_float, pack_float_body, (),
            (const Source& from, int64_t dim, int64_t padded, float* keys, float* values, int64_t num_panels),
            (from, dim, padded, keys, values, num_panels))
TR_EACH_ISA(pack_bf16, pack_bf16_body, (),
            (const Source& from, int64_t dim, int64_t padded, uint8_t* keys, uint8_t* values, int64_t num_panels),
            (from, dim, padded, keys, values, num_panels))

}  // namespace

int64_t packed_panel_bytes(const AttentionShape& shape) { return 32 * shape.padded_dim() * (shape.is_bf16 ? 2 : 4); }

void pack_panel(const AttentionShape& shape, const AttentionRequest& request, int64_t group, const KvMemory& kv,
                const PackedKeys& packed, int64_t panel) {
    const int64_t dim = shape.head_dim, item = shape.is_bf16 ? 2 : 4;
    const int64_t first = packed.first_key + panel * 32, count = std::min<int64_t>(32, request.num_keys - first);
    const int64_t* slots = request.slots + first;
    Source from{static_cast<const uint8_t*>(kv.entries) + group * dim * item, 2 * shape.num_groups * dim,
                shape.num_groups * dim, slots, count};
    if (std::any_of(slots, slots + count, [&](int64_t slot) { return kv.is_int8(slot); })) {
        static thread_local std::vector<uint8_t> rows;
        rows.resize(size_t(32 * 2 * dim * item));
        copy_entries(shape, kv, slots, count, group, {rows.data(), 2 * dim, dim});
        from = {rows.data(), 2 * dim, dim, neighbours(), count};
    }
    uint8_t* keys = packed.keys + panel * packed_panel_bytes(shape);
    uint8_t* values = packed.values + panel * 32 * 32 * item;
    if (shape.is_bf16) {
        pack_bf16(from, dim, shape.padded_dim(), keys, values, packed.num_panels);
    } else {
        pack_float(from, dim, shape.padded_dim(), reinterpret_cast<float*>(keys), reinterpret_cast<float*>(values),
                   packed.num_panels);
    }
}

}  // namespace tr
