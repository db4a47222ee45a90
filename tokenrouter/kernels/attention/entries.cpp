// Entries of either form, side by side in the model's dtype.
#include <array>
#include <numeric>

#include "attention/native.h"

namespace tr {
namespace {

template <class V, typename T>
TR_INLINE void copy_body(const KvMemory& kv, const int64_t* slots, int64_t count, int64_t key, int64_t value,
                         int64_t planes, int64_t dim, const EntryRows& to) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = slots[i];
        for (int64_t part = 0; part < 2; ++part) {
            const int64_t plane = part ? value : key;
            T* row = static_cast<T*>(to.first) + i * to.stride + part * to.value_offset;
            if (kv.is_int8(slot)) {
                const int64_t at = (slot - kv.num_entries) * planes + plane;
                dequantize_row<V>(kv.int8 + at * dim, kv.scales[at], dim, row);
            } else {
                const T* from = static_cast<const T*>(kv.entries) + (slot * planes + plane) * dim;
                std::memcpy(row, from, size_t(dim) * sizeof(T));
            }
        }
    }
}

TR_EACH_ISA(copy_bf16, copy_body, (, bf16),
            (const KvMemory& kv, const int64_t* slots, int64_t count, int64_t key, int64_t value, int64_t planes,
             int64_t dim, const EntryRows& to),
            (kv, slots, count, key, value, planes, dim, to))
TR_EACH_ISA(copy_float, copy_body, (, float),
            (const KvMemory& kv, const int64_t* slots, int64_t count, int64_t key, int64_t value, int64_t planes,
             int64_t dim, const EntryRows& to),
            (kv, slots, count, key, value, planes, dim, to))

}  // namespace

void copy_entries(const AttentionShape& shape, const KvMemory& kv, const int64_t* slots, int64_t count, int64_t group,
                  const EntryRows& to) {
    const int64_t groups = shape.num_groups, dim = shape.head_dim;
    if (shape.is_bf16) {
        copy_bf16(kv, slots, count, group, groups + group, 2 * groups, dim, to);
    } else {
        copy_float(kv, slots, count, group, groups + group, 2 * groups, dim, to);
    }
}

const int64_t* neighbours() {
    static const auto numbers = [] {
        std::array<int64_t, kSplitKeys> n;
        std::iota(n.begin(), n.end(), int64_t(0));
        return n;
    }();
    return numbers.data();
}

}  // namespace tr
