// A block of (query, head) rows of one group over packed keys and values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/soften.h"
#include "attention/sparse.h"
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

// Neighbouring panels.
struct PanelRun {
    int64_t first, count;
};

struct Scratch {
    std::vector<uint8_t> queries;
    std::vector<float> values;
    alignas(64) float scores[kBlockPanels * 32 * 32];
    alignas(64) float sums[32 * 32];
    alignas(64) uint8_t weights[32 * kBlockKeys * sizeof(float)];
    float rescale[32];
    RowState state[32];
    std::vector<PanelRun> runs;
    std::vector<uint32_t> masks;    // sparse: [32, panels], a bit per entry; then of any row
    std::vector<float> query_sum;   // sparse: of a group's heads
    std::vector<EntryRange> seen;   // sparse: by a query
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
        is_sparse() ? choose_panels() : take_panels();
    }

    void attend() {
        s_.values.assign(size_t(32 * padded_), 0.0f);
        for (const auto& [p, count] : s_.runs) {
            for (int64_t i = 0; i < count; ++i) score(p + i, s_.scores + i * 1024);
            soften(shape_.is_bf16, {s_.scores, count, p * 32}, shape_.scale, s_.state, rows_, s_.weights, s_.rescale);
            for (int64_t d = 0; d < padded_; d += 32) {
                const uint8_t* panel = packed_.values + (d * packed_.num_panels + p * 32) * 32 * item_size_;
                product(s_.weights, kBlockKeys, panel, count * 32, s_.sums);
                rescale_and_add(s_.values.data() + d, padded_, s_.sums, s_.rescale, rows_);
            }
        }
        for (int64_t i = 0; i < rows_; ++i) write(i);
    }

    void observe(float* columns) {
        int64_t begin = 0;
        while (begin < rows_ && !request_.is_observed(query(begin))) ++begin;
        for (const auto& run : s_.runs) {
            for (int64_t p = run.first; p < run.first + run.count; ++p) {
                const int64_t key = packed_.first_key + p * 32;
                score(p, s_.scores);
                sum_columns(s_.scores, p * 32, shape_.scale, s_.state, begin, rows_, request_.num_keys - key,
                            columns + key);
            }
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
    int64_t item_size_, rows_, padded_;

    bool is_sparse() const { return request_.sparse && item_.begin >= request_.sparse->num_full * shape_.repeat(); }
    int64_t query(int64_t i) const { return request_.query((item_.begin + i) / shape_.repeat()); }
    int64_t head(int64_t i) const { return item_.group * shape_.repeat() + (item_.begin + i) % shape_.repeat(); }

    void load_queries() {
        s_.queries.assign(size_t(32 * padded_ * item_size_), 0);
        for (int64_t i = 0; i < rows_; ++i) {
            const int64_t at = request_.query_rows[query(i)] * run_.q_stride + head(i) * shape_.head_dim;
            std::memcpy(s_.queries.data() + i * padded_ * item_size_,
                        static_cast<const uint8_t*>(run_.q) + at * item_size_, size_t(shape_.head_dim * item_size_));
            const int64_t position = request_.query_start + query(i);
            s_.state[i] = {};
            s_.state[i].first = request_.first_key(position, shape_.window) - packed_.first_key;
            s_.state[i].last = request_.last_key(position) - packed_.first_key;
        }
    }

    // All panels between the first and the last entry that some row sees.
    void take_panels() {
        int64_t first = packed_.num_panels * 32, last = 0;
        for (int64_t i = 0; i < rows_; ++i) {
            first = std::min(first, s_.state[i].first);
            last = std::max(last, s_.state[i].last);
        }
        s_.runs.clear();
        const int64_t end = (last + 31) / 32;
        for (int64_t p = first / 32; p < end; p += kBlockPanels) s_.runs.push_back({p, std::min(kBlockPanels, end - p)});
    }

    // The panels with entries that some row sees, and in masks which rows see which.
    void choose_panels() {
        const int64_t panels = packed_.num_panels;
        s_.masks.assign(size_t(33 * panels), 0);
        uint32_t* any = s_.masks.data() + 32 * panels;
        s_.query_sum.resize(size_t(shape_.head_dim));
        for (int64_t i = 0; i < rows_; ++i) {
            uint32_t* mask = s_.masks.data() + i * panels;
            s_.state[i].mask = mask;
            if (i && query(i) == query(i - 1)) {
                std::copy_n(mask - panels, panels, mask);
                continue;
            }
            sum_heads(shape_, request_, run_, query(i), item_.group, s_.query_sum.data());
            find_seen(shape_, request_, run_.means, query(i), item_.group, s_.query_sum.data(), s_.seen);
            for (const EntryRange& range : s_.seen) mark(mask, range);
            for (int64_t p = 0; p < panels; ++p) any[p] |= mask[p];
        }
        s_.runs.clear();
        for (int64_t p = 0; p < panels; ++p) {
            if (!any[p]) continue;
            const bool follows = !s_.runs.empty() && s_.runs.back().first + s_.runs.back().count == p;
            if (follows && s_.runs.back().count < kBlockPanels) {
                ++s_.runs.back().count;
            } else {
                s_.runs.push_back({p, 1});
            }
        }
    }

    void mark(uint32_t* mask, const EntryRange& range) const {
        const int64_t begin = range.begin - packed_.first_key, end = range.end - packed_.first_key;
        for (int64_t p = begin / 32; p * 32 < end; ++p) {
            const int64_t from = std::max<int64_t>(0, begin - p * 32), to = std::min<int64_t>(32, end - p * 32);
            mask[p] |= (to == 32 ? ~0u : (1u << to) - 1) & ~0u << from;
        }
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
                  const AttentionRun& run, const PackedKeys& packed, float* columns) {
    static thread_local Scratch scratch;
    Block block(shape, request, item, run, packed, scratch);
    block.attend();
    if (columns) block.observe(columns);
}

}  // namespace tr
