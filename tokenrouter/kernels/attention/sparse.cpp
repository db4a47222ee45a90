// Sparse attention: which entries a query sees by the blocks that answer to it best, and a single query over them.
#include "attention/sparse.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "native/simd.h"

namespace tr {
namespace {

// to[d] += from[d], rows `stride` apart.
template <class V, typename T>
TR_INLINE void add_rows_body(const T* from, int64_t stride, int64_t rows, int64_t dim, float* to) {
    for (int64_t r = 0; r < rows; ++r, from += stride) {
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) store16<V>(to + d, load16<V>(to + d) + load16<V>(from + d));
        if (d < dim) store_some<V>(to + d, load_some<V>(to + d, dim - d) + load_some<V>(from + d, dim - d), dim - d);
    }
}

// The product of `sum` with each of `count` means [dim, stride], a block per column.
template <class V>
TR_INLINE void score_body(const float* sum, const float* means, int64_t stride, int64_t count, int64_t dim,
                          float* scores) {
    for (int64_t b = 0; b < count; b += kLanes) {
        const int64_t some = count - b;
        f32x16 total = {};
        if (some >= kLanes) {
            for (int64_t d = 0; d < dim; ++d) total += load16<V>(means + d * stride + b) * sum[d];
            store16<V>(scores + b, total);
        } else {
            for (int64_t d = 0; d < dim; ++d) total += load_some<V>(means + d * stride + b, some) * sum[d];
            store_some<V>(scores + b, total, some);
        }
    }
}

TR_EACH_ISA(add_rows_bf16, add_rows_body, (, bf16),
            (const bf16* from, int64_t stride, int64_t rows, int64_t dim, float* to), (from, stride, rows, dim, to))
TR_EACH_ISA(add_rows_float, add_rows_body, (, float),
            (const float* from, int64_t stride, int64_t rows, int64_t dim, float* to), (from, stride, rows, dim, to))
TR_EACH_ISA(score_blocks, score_body, (),
            (const float* sum, const float* means, int64_t stride, int64_t count, int64_t dim, float* scores),
            (sum, means, stride, count, dim, scores))

// `from` in the dtype of the model.
void add_rows(bool is_bf16, const void* from, int64_t stride, int64_t rows, int64_t dim, float* to) {
    if (is_bf16) {
        add_rows_bf16(static_cast<const bf16*>(from), stride, rows, dim, to);
    } else {
        add_rows_float(static_cast<const float*>(from), stride, rows, dim, to);
    }
}

// Joins what follows: `seen` ascends, and its last range ends where the next one may begin.
void append(std::vector<EntryRange>& seen, EntryRange next) {
    if (!seen.empty()) next.begin = std::max(next.begin, seen.back().end);
    if (next.begin >= next.end) return;
    if (!seen.empty() && seen.back().end == next.begin) {
        seen.back().end = next.end;
    } else {
        seen.push_back(next);
    }
}

// Numbers of the `top` best blocks, ascending; of equal ones the earlier; those without entries have a score of NaN.
void best_blocks(const std::vector<float>& scores, int64_t top, std::vector<int64_t>& best) {
    static thread_local std::vector<float> order;
    best.clear();
    order.clear();
    for (float score : scores)
        if (!std::isnan(score)) order.push_back(score);
    float least = -INFINITY;
    int64_t num_least = int64_t(order.size());  // of those equal to the least one taken
    if (top < num_least) {
        std::nth_element(order.begin(), order.begin() + top, order.end(), std::greater<>());
        least = top ? *std::min_element(order.begin(), order.begin() + top) : INFINITY;
        num_least = top - std::count_if(order.begin(), order.begin() + top, [&](float x) { return x > least; });
    }
    for (int64_t b = 0; b < int64_t(scores.size()) && int64_t(best.size()) < top; ++b) {
        const float score = scores[size_t(b)];
        if (score > least || (score == least && num_least-- > 0)) best.push_back(b);
    }
}

int64_t item_size(const AttentionShape& shape) { return shape.is_bf16 ? 2 : 4; }

float* means_of(const AttentionShape& shape, const AttentionRequest& request, const BlockMeans& means, int64_t group) {
    return means.values + (request.row * shape.num_groups + group) * shape.head_dim * means.num_blocks;
}

// A query's entries of one group, copied side by side: keys and values as in an arena with that group alone.
struct Gathered {
    std::vector<int64_t> entries, slots;
    std::vector<uint8_t> rows;
};

void gather(const AttentionShape& shape, const AttentionRequest& request, const AttentionRun& run, int64_t group,
            const std::vector<EntryRange>& seen, Gathered& to) {
    to.entries.clear();
    to.slots.clear();
    for (const EntryRange& range : seen)
        for (int64_t k = range.begin; k < range.end; ++k) {
            to.entries.push_back(k);
            to.slots.push_back(request.slots[k]);
        }
    const int64_t count = int64_t(to.slots.size()), dim = shape.head_dim;
    to.rows.resize(size_t(count * 2 * dim * item_size(shape)));
    copy_entries(shape, run.kv, to.slots.data(), count, group, {to.rows.data(), 2 * dim, dim});
}

}  // namespace

void sum_heads(const AttentionShape& shape, const AttentionRequest& request, const AttentionRun& run, int64_t index,
               int64_t group, float* sum) {
    const int64_t at = request.query_rows[index] * run.q_stride + group * shape.repeat() * shape.head_dim;
    std::fill_n(sum, shape.head_dim, 0.0f);
    add_rows(shape.is_bf16, static_cast<const uint8_t*>(run.q) + at * item_size(shape), shape.head_dim, shape.repeat(),
             shape.head_dim, sum);
}

void add_means(const AttentionShape& shape, const AttentionRequest& request, const AttentionRun& run, int64_t group) {
    static thread_local std::vector<uint8_t> rows;
    static thread_local std::vector<float> mean;
    const int64_t dim = shape.head_dim;
    const auto& edges = request.sparse->edges;
    rows.resize(size_t(shape.sparse.block * 2 * dim * item_size(shape)));
    float* means = means_of(shape, request, run.means, group);
    for (int64_t b = run.means.num_valid[request.row]; b < request.sparse->num_blocks(); ++b) {
        const int64_t first = edges[size_t(b)], count = edges[size_t(b) + 1] - first;
        mean.assign(size_t(dim), 0.0f);
        if (count) {
            copy_entries(shape, run.kv, request.slots + first, count, group, {rows.data(), 2 * dim, dim});
            add_rows(shape.is_bf16, rows.data(), 2 * dim, count, dim, mean.data());
        }
        for (int64_t d = 0; d < dim; ++d)
            means[d * run.means.num_blocks + b] = mean[size_t(d)] / float(std::max<int64_t>(1, count));
    }
}

void find_seen(const AttentionShape& shape, const AttentionRequest& request, const BlockMeans& means, int64_t index,
               int64_t group, const float* sum, std::vector<EntryRange>& seen) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<int64_t> best;
    const SparseShape& sparse = shape.sparse;
    const auto& edges = request.sparse->edges;
    const int64_t position = request.query_start + index, count = sparse.num_blocks(position);
    scores.resize(size_t(count));
    score_blocks(sum, means_of(shape, request, means, group), means.num_blocks, count, shape.head_dim, scores.data());
    for (int64_t b = 0; b < count; ++b) {
        float& score = scores[size_t(b)];
        const bool is_empty = edges[size_t(b)] == edges[size_t(b) + 1];
        score = is_empty ? NAN : std::isnan(score) ? -INFINITY : score;
    }
    best_blocks(scores, sparse.top_blocks, best);
    const int64_t last = request.last_key(position);
    seen.clear();
    append(seen, {0, std::min(last, request.last_key(sparse.sinks - 1))});
    for (int64_t b : best) append(seen, {edges[size_t(b)], edges[size_t(b) + 1]});
    append(seen, {edges[size_t(count)], last});
}

void sparse_decode_item(const AttentionShape& shape, const AttentionRequest& request, int64_t group,
                        const AttentionRun& run, float* columns) {
    static thread_local std::vector<float> sum, floats, received;
    static thread_local std::vector<EntryRange> seen;
    static thread_local std::vector<int64_t> counts;
    static thread_local std::vector<DecodePart> parts;
    static thread_local Gathered found;
    const int64_t dim = shape.head_dim, heads = shape.repeat(), item = item_size(shape);
    sum.resize(size_t(dim));
    sum_heads(shape, request, run, 0, group, sum.data());
    find_seen(shape, request, run.means, 0, group, sum.data(), seen);
    gather(shape, request, run, group, seen, found);

    const int64_t count = int64_t(found.slots.size()), num_parts = (count + kSplitKeys - 1) / kSplitKeys;
    std::iota(found.slots.begin(), found.slots.end(), int64_t(0));
    const AttentionShape alone{heads, 1, dim, shape.scale, 0, shape.is_bf16, {}};
    const int64_t query_row = 0;
    AttentionRequest part_request{&query_row, 1, count, found.slots.data(), nullptr, count, columns ? 1 : 0, 0, 0, nullptr};
    AttentionRun part_run = run;
    part_run.q = static_cast<const uint8_t*>(run.q) + (request.query_rows[0] * run.q_stride + group * heads * dim) * item;
    part_run.kv = {found.rows.data(), count, nullptr, nullptr};
    const int64_t size = heads * (2 + dim) + (columns ? heads * (kSplitChunks + kSplitKeys) : 0);
    const int64_t scratch = num_parts + heads * (2 + kSplitChunks);
    floats.resize(size_t(num_parts * size + scratch));
    parts.clear();
    counts.clear();
    for (int64_t i = 0; i < num_parts; ++i) {
        float* base = floats.data() + scratch + i * size;
        float* tops = base + heads * (2 + dim);
        parts.push_back({base, base + heads, base + 2 * heads, columns ? tops : nullptr,
                         columns ? tops + heads * kSplitChunks : nullptr});
        counts.push_back(std::min(kSplitKeys, count - i * kSplitKeys));
        decode_item(alone, part_request, {0, 0, i * kSplitKeys, i * kSplitKeys + counts.back(), 0, 0}, part_run, parts.back());
    }
    const int64_t out = (request.query_rows[0] * shape.num_heads + group * heads) * dim;
    received.assign(size_t(columns ? count : 0), 0.0f);
    merge_parts(alone, parts.data(), num_parts, counts.data(), floats.data(), static_cast<uint8_t*>(run.out) + out * item,
                columns ? received.data() : nullptr);
    for (int64_t i = 0; columns && i < count; ++i) columns[found.entries[size_t(i)]] += received[size_t(i)] * float(heads);
}

}  // namespace tr
