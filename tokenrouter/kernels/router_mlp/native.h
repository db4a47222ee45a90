// The score of a learned router: look-ups and one hidden layer.
#pragma once

#include <cstdint>

namespace tr {

// Rows of features, ids and ids before are rows of `table`; the binding has checked all of them.
struct RouterArgs {
    const float* values;                          // [tokens, features], any strides
    int64_t token_stride, feature_stride;
    const int64_t *ids, *phases;                  // [tokens]
    int64_t id_stride, phase_stride, num_tokens;
    const float* edges;                           // [features, edges], ascending, padded with infinity
    const int64_t *starts, *lasts;                // [features]: the row of the first bin, and how many follow it
    int64_t num_features, num_edges;
    const int64_t* id_rows;                       // [known ids + 1], the last one for all beyond
    int64_t num_ids;
    const float* table;                           // [rows, hidden + phases]
    int64_t num_columns;
    const float* head;                            // [phases, hidden]
    int64_t hidden;
    int64_t previous_column;                      // the feature that is the id before; -1: ids have no rows beyond id_rows
    int64_t vocab_row, vocab_size;                // a row per id and one more, then as many for the id before
    float* scores;                                // [tokens]
};

void router_mlp(const RouterArgs& args);

}  // namespace tr
