// One query of one request over a range of keys, all heads: what the two implementations share.
#pragma once

#include "attention/native.h"

namespace tr {

// A range of entries in the model's dtype. Keys of group g lie `g * dim` elements into an entry, values `value_offset`
// further.
struct Range {
    const void* entries;  // of slot 0
    int64_t stride, value_offset;
    const int64_t* slots;
    int64_t count;

    template <typename T>
    TR_INLINE const T* key(int64_t i, int64_t offset) const {
        return static_cast<const T*>(entries) + slots[i] * stride + offset;
    }
};

// The entries of one item, of either form. `ahead`: keys of the request from here on, which may be asked for early.
struct ItemEntries {
    const KvMemory& kv;
    const int64_t* slots;
    int64_t count, ahead;

    bool any_int8(int64_t begin, int64_t end) const {
        return std::any_of(slots + begin, slots + end, [this](int64_t slot) { return kv.is_int8(slot); });
    }
};

// By bf16 dot products, for the head sizes and processors that have them; false: nothing was done.
bool decode_bf16_pairs(const AttentionShape& shape, const ItemEntries& entries, const uint16_t* q,
                       const DecodePart& part);

}  // namespace tr
