// Scores of a block of rows to weights, and what is summed up by them.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/native.h"

namespace tr {

// What one row has seen so far.
struct RowState {
    float largest = -INFINITY, sum = 0;
    int64_t first, last;             // visible entries, counted from the first packed one
    const uint32_t* mask = nullptr;  // or which of them, a bit per entry of each panel; null: all between the two
};

// Scores of up to kBlockKeys entries from `at` on: num_panels x [32 rows, 32 keys].
struct ScoreBlock {
    float* scores;
    int64_t num_panels, at;
};

// Scores of entries that a row does not see become -inf. `weights` [32, kBlockKeys], bf16 or float; `rescale` [32]: what
// earlier sums are worth now.
void soften(bool is_bf16, const ScoreBlock& block, float scale, RowState* state, int64_t rows, void* weights,
            float* rescale);

// values [rows, 32] = values * rescale + sums; rows of values `stride` apart.
void rescale_and_add(float* values, int64_t stride, const float* sums, const float* rescale, int64_t rows);

// Attention that entries receive from rows [begin, rows) of one panel: columns[key] += weight of the finished softmax.
void sum_columns(const float* scores, int64_t at, float scale, const RowState* state, int64_t begin, int64_t rows,
                 int64_t count, float* columns);

}  // namespace tr
