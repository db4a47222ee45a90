// Sparse attention: which entries a query sees by the blocks that answer to it best, and a single query over them.
#pragma once

#include "attention/native.h"

namespace tr {

struct EntryRange {
    int64_t begin, end;
};

// The queries of one group of key heads added up, [D]; `index` counts the request's queries.
void sum_heads(const AttentionShape& shape, const AttentionRequest& request, const AttentionRun& run, int64_t index,
               int64_t group, float* sum);

// Entries that the query sees, ascending and apart; `sum` is sum_heads of it, `means` those of the request's row are up to
// date.
void find_seen(const AttentionShape& shape, const AttentionRequest& request, const BlockMeans& means, int64_t index,
               int64_t group, const float* sum, std::vector<EntryRange>& seen);

// Brings the means of the request's blocks up to date, for one group; num_valid stays as it is.
void add_means(const AttentionShape& shape, const AttentionRequest& request, const AttentionRun& run, int64_t group);

// The heads of one group of a request with one query, which is sparse. `columns` as in prefill_item.
void sparse_decode_item(const AttentionShape& shape, const AttentionRequest& request, int64_t group,
                        const AttentionRun& run, float* columns);

}  // namespace tr
