// A block of (query, head) rows of one group over packed keys and values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/native.h"
#include "native/panel.h"

namespace tr {
namespace {

constexpr int64_t kBlockPanels = kBlockKeys / 32;

// ---- products ---------------------------------------------------------------------------------------------------------

// sums [rows, 32] = a [rows, k] times a float panel [k, 32].
template <class V, int R>
TR_INLINE void float_rows(const float* a, int64_t a_stride, const float* panel, int64_t k_size, float* sums) {
    f32x16 acc[R][2] = {};
    for (int64_t k = 0; k < k_size; ++k) {
        const f32x16 w0 = load16<V>(panel + k * 32), w1 = load16<V>(panel + k * 32 + 16);
        for (int r = 0; r < R; ++r) {
            const float x = a[r * a_stride + k];
            acc[r][0] += w0 * x;
            acc[r][1] += w1 * x;
        }
    }
    for (int r = 0; r < R; ++r) {
        store16<V>(sums + r * 32, acc[r][0]);
        store16<V>(sums + r * 32 + 16, acc[r][1]);
    }
}

template <class V>
TR_INLINE void float_panel_body(const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t k_size,
                                float* sums) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) float_rows<V, 4>(a + i * a_stride, a_stride, panel, k_size, sums + i * 32);
    for (; i < rows; ++i) float_rows<V, 1>(a + i * a_stride, a_stride, panel, k_size, sums + i * 32);
}

TR_EACH_ISA(float_panel, float_panel_body, (),
            (const float* a, int64_t a_stride, int64_t rows, const float* panel, int64_t k_size, float* sums),
            (a, a_stride, rows, panel, k_size, sums))

// ---- softmax ----------------------------------------------------------------------------------------------------------

// What one row has seen so far.
struct RowState {
    float largest = -INFINITY, sum = 0;
    int64_t first, last;  // visible entries, counted from the first packed one
};

// Scores of entries that the row does not see become -inf.
TR_INLINE f32x16 visible(f32x16 scores, int64_t at, const RowState& row) {
    if (at >= row.first && at + kLanes <= row.last) return scores;
    for (int64_t i = 0; i < kLanes; ++i)
        if (at + i < row.first || at + i >= row.last) scores[i] = -INFINITY;
    return scores;
}

// The scores of row r for 16 keys from k on.
TR_INLINE float* score_at(float* scores, int64_t r, int64_t k) { return scores + ((k / 32) * 32 + r) * 32 + k % 32; }

// scores: num_panels x [32 rows, 32 keys], of entries from `at` on; those that a row does not see become -inf. weights
// [32, kBlockKeys]; rescale [32]: what earlier sums are worth now.
template <class V, typename T>
TR_INLINE void soften_body(float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
                           T* weights, float* rescale) {
    const int64_t count = num_panels * 32;
    for (int64_t r = 0; r < rows; ++r) {
        RowState& row = state[r];
        f32x16 top = splat(-INFINITY);
        for (int64_t k = 0; k < count; k += kLanes) {
            f32x16 x = load16<V>(score_at(scores, r, k));
            if (at + k < row.first || at + k + kLanes > row.last) {
                x = visible(x, at + k, row);
                store16<V>(score_at(scores, r, k), x);
            }
            top = max16<V>(top, x);
        }
        const float block = max_of(top) * scale;
        const float largest = larger(block, row.largest);
        T* to = weights + r * kBlockKeys;
        const bool sees = at < row.last && at + count > row.first;
        if (largest == -INFINITY && !sees) {  // nothing yet; scores that are all NaN are not nothing
            for (int64_t k = 0; k < count; k += kLanes) store16<V>(to + k, f32x16{});
            rescale[r] = 0.0f;
            continue;
        }
        f32x16 total = {};
        for (int64_t k = 0; k < count; k += kLanes) {
            const f32x16 x = load16<V>(score_at(scores, r, k));
            f32x16 weight = sizeof(T) == sizeof(bf16) ? exp2_for_bf16<V>(x * (scale * kLog2e) - largest * kLog2e)
                                                      : exp16<V>(x * scale - largest);
            if (at + k < row.first || at + k + kLanes > row.last)  // exp2_for_bf16 stops at 2^-126
                weight = x == -INFINITY ? f32x16{} : weight;
            store16<V>(to + k, weight);
            total += weight;
        }
        rescale[r] = row.largest == largest ? 1.0f : std::exp(row.largest - largest);
        row.sum = row.sum * rescale[r] + sum16(total);
        row.largest = largest;
    }
}

template <class V>
TR_INLINE void add_values_body(float* acc, int64_t stride, const float* sums, const float* rescale, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t half = 0; half < 32; half += kLanes) {
            float* to = acc + r * stride + half;
            store16<V>(to, load16<V>(to) * rescale[r] + load16<V>(sums + r * 32 + half));
        }
}

// Attention that every key receives from rows [begin, rows): columns[key] += weight of the finished softmax.
template <class V>
TR_INLINE void add_columns_body(const float* scores, int64_t at, float scale, const RowState* state, int64_t begin,
                                int64_t rows, int64_t count, float* columns) {
    for (int64_t half = 0; half < 32; half += kLanes) {
        f32x16 total = {};
        for (int64_t r = begin; r < rows; ++r) {
            if (state[r].sum == 0) continue;
            const f32x16 x = visible(load16<V>(scores + r * 32 + half) * scale, at + half, state[r]);
            total += exp16<V>(x - state[r].largest) / state[r].sum;
        }
        for (int64_t i = 0; i < kLanes && half + i < count; ++i) columns[half + i] += total[i];
    }
}

TR_EACH_ISA(soften_bf16, soften_body, (, bf16),
            (float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
             bf16* weights, float* rescale),
            (scores, num_panels, at, scale, state, rows, weights, rescale))
TR_EACH_ISA(soften_float, soften_body, (, float),
            (float* scores, int64_t num_panels, int64_t at, float scale, RowState* state, int64_t rows,
             float* weights, float* rescale),
            (scores, num_panels, at, scale, state, rows, weights, rescale))
TR_EACH_ISA(add_values, add_values_body, (),
            (float* acc, int64_t stride, const float* sums, const float* rescale, int64_t rows),
            (acc, stride, sums, rescale, rows))
TR_EACH_ISA(add_columns, add_columns_body, (),
            (const float* scores, int64_t at, float scale, const RowState* state, int64_t begin, int64_t rows,
             int64_t count, float* columns),
            (scores, at, scale, state, begin, rows, count, columns))

// ---- one block --------------------------------------------------------------------------------------------------------

template <class V, typename T>
TR_INLINE void write_row_body(const float* acc, float sum, T* out, int64_t dim) {
    const float inverse = sum != 0 ? 1.0f / sum : 0.0f;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store16<V>(out + d, load16<V>(acc + d) * inverse);
    if (d < dim) store_some<V>(out + d, load_some<V>(acc + d, dim - d) * inverse, dim - d);
}

TR_EACH_ISA(write_row_bf16, write_row_body, (, bf16),
            (const float* acc, float sum, bf16* out, int64_t dim),
            (acc, sum, out, dim))
TR_EACH_ISA(write_row_float, write_row_body, (, float),
            (const float* acc, float sum, float* out, int64_t dim),
            (acc, sum, out, dim))

struct Scratch {
    std::vector<uint8_t> queries;
    std::vector<float> values;
    alignas(64) float scores[kBlockPanels * 32 * 32];
    alignas(64) float sums[32 * 32];
    alignas(64) uint8_t weights[32 * kBlockKeys * sizeof(float)];
    float rescale[32];
    RowState state[32];
};

class Block {
  public:
    Block(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
          const AttentionRun& run, const PackedKeys& packed, Scratch& scratch)
        : shape_(shape), request_(request), item_(item), run_(run), packed_(packed), s_(scratch) {
        item_size_ = shape.is_bf16 ? 2 : 4;
        rows_ = item.end - item.begin;
        padded_ = shape.padded_dim();
        load_queries();
    }

    void attend() {
        s_.values.assign(size_t(32 * padded_), 0.0f);
        for (int64_t p = first_panel_; p < last_panel_; p += kBlockPanels) {
            const int64_t count = std::min(kBlockPanels, last_panel_ - p);
            for (int64_t i = 0; i < count; ++i) score(p + i, s_.scores + i * 1024);
            if (shape_.is_bf16) {
                soften_bf16(s_.scores, count, p * 32, shape_.scale, s_.state, rows_,
                            reinterpret_cast<bf16*>(s_.weights), s_.rescale);
            } else {
                soften_float(s_.scores, count, p * 32, shape_.scale, s_.state, rows_,
                             reinterpret_cast<float*>(s_.weights), s_.rescale);
            }
            for (int64_t d = 0; d < padded_; d += 32) {
                const uint8_t* panel = packed_.values + (d * packed_.num_panels + p * 32) * 32 * item_size_;
                product(s_.weights, kBlockKeys, panel, count * 32, s_.sums);
                add_values(s_.values.data() + d, padded_, s_.sums, s_.rescale, rows_);
            }
        }
        for (int64_t i = 0; i < rows_; ++i) write(i);
    }

    void observe(float* columns, int64_t observed_row) {
        const int64_t begin = std::max<int64_t>(0, observed_row - item_.begin);
        for (int64_t p = first_panel_; p < last_panel_; ++p) {
            const int64_t key = packed_.first_key + p * 32;
            score(p, s_.scores);
            add_columns(s_.scores, p * 32, shape_.scale, s_.state, begin, rows_, request_.num_keys - key,
                        columns + key);
        }
    }

  private:
    const AttentionShape& shape_;
    const AttentionRequest& request_;
    const AttentionItem& item_;
    const AttentionRun& run_;
    const PackedKeys& packed_;
    Scratch& s_;
    PanelKernels kernels_;
    int64_t item_size_, rows_, padded_, first_panel_ = 0, last_panel_ = 0;

    int64_t query(int64_t i) const { return (item_.begin + i) / shape_.repeat(); }
    int64_t head(int64_t i) const { return item_.group * shape_.repeat() + (item_.begin + i) % shape_.repeat(); }

    void load_queries() {
        int64_t first = packed_.num_panels * 32, last = 0;
        s_.queries.assign(size_t(32 * padded_ * item_size_), 0);
        for (int64_t i = 0; i < rows_; ++i) {
            const int64_t at = request_.query_rows[query(i)] * run_.q_stride + head(i) * shape_.head_dim;
            std::memcpy(s_.queries.data() + i * padded_ * item_size_,
                        static_cast<const uint8_t*>(run_.q) + at * item_size_, size_t(shape_.head_dim * item_size_));
            const int64_t position = request_.query_start + query(i);
            s_.state[i] = {};
            s_.state[i].first = request_.first_key(position, shape_.window) - packed_.first_key;
            s_.state[i].last = request_.last_key(position) - packed_.first_key;
            first = std::min(first, s_.state[i].first);
            last = std::max(last, s_.state[i].last);
        }
        first_panel_ = first / 32;
        last_panel_ = (last + 31) / 32;
    }

    // sums [32, 32] of rows [32, k_size] (stride in elements) with a panel.
    void product(const void* rows, int64_t stride, const uint8_t* panel, int64_t k_size, float* sums) {
        if (shape_.is_bf16) {
            kernels_.bf16({static_cast<const uint8_t*>(rows), stride * 2, 32, panel, k_size / 32, nullptr}, sums);
        } else {
            float_panel(static_cast<const float*>(rows), stride, rows_, reinterpret_cast<const float*>(panel), k_size,
                        sums);
        }
    }

    void score(int64_t panel, float* scores) {
        product(s_.queries.data(), padded_, packed_.keys + panel * packed_panel_bytes(shape_), padded_, scores);
    }

    void write(int64_t i) {
        const int64_t dim = shape_.head_dim;
        const int64_t at = (request_.query_rows[query(i)] * shape_.num_heads + head(i)) * dim;
        const float* acc = s_.values.data() + i * padded_;
        if (shape_.is_bf16) {
            write_row_bf16(acc, s_.state[i].sum, static_cast<bf16*>(run_.out) + at, dim);
        } else {
            write_row_float(acc, s_.state[i].sum, static_cast<float*>(run_.out) + at, dim);
        }
    }
};

}  // namespace

void prefill_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                  const AttentionRun& run, const PackedKeys& packed, float* columns, int64_t observed_row) {
    static thread_local Scratch scratch;
    Block block(shape, request, item, run, packed, scratch);
    block.attend();
    if (columns) block.observe(columns, observed_row);
}

}  // namespace tr
