// Asks for entries of decode attention ahead of their use.
#pragma once

#include <algorithm>

#include "attention/decode.h"

namespace tr {

constexpr int64_t kAheadKeys = 32;  // how far ahead of a chunk entries are asked for

// Asks for entries ahead, line by line, into the second cache. A chunk's share is spread over its scores and its values, so that
// memory is as busy while it computes as the bandwidth allows: in bursts, requests wait for each other and then for the
// next burst.
class Fetcher {
  public:
    Fetcher(const AttentionShape& shape, const ItemEntries& entries)
        : entries_(entries), width_(2 * shape.num_groups * shape.head_dim) {
        const int64_t passes = shape.num_groups * ((shape.repeat() + 2) / 3);
        per_scores = share(3, shape.num_heads * (kChunkKeys / 16));
        per_pair = share(5, passes * (kChunkKeys / 2));
        open(kAheadKeys);
    }

    int64_t per_scores, per_pair;  // lines to ask for beside 16 scores of a head, and beside a pair of values

    void start_chunk(int64_t k0) { stop_ = std::min(k0 + kChunkKeys + kAheadKeys, entries_.ahead); }

    TR_INLINE void fetch(int64_t count) {
        for (; count > 0 && key_ < stop_; --count) {
            __builtin_prefetch(at_ + line_ * 64, 0, 2);
            if (++line_ == lines_) open(key_ + 1);
        }
    }

  private:
    const ItemEntries& entries_;
    int64_t width_, lines_ = 0, line_ = 0, key_ = 0, stop_ = 0;
    const char* at_ = nullptr;

    int64_t share(int64_t eighths, int64_t calls) const {
        return (kChunkKeys * (width_ * 2 / 64) * eighths + 8 * calls - 1) / (8 * calls);
    }

    TR_INLINE void open(int64_t key) {
        key_ = key;
        line_ = 0;
        if (key >= entries_.ahead) return;
        const int64_t slot = entries_.slots[key];
        const KvMemory& kv = entries_.kv;
        const bool int8 = kv.is_int8(slot);
        lines_ = width_ * (int8 ? 1 : 2) / 64;
        at_ = int8 ? reinterpret_cast<const char*>(kv.int8 + (slot - kv.num_entries) * width_)
                   : static_cast<const char*>(kv.entries) + slot * width_ * 2;
    }
};

}  // namespace tr
