// Plan and driver: which items there are, who runs them, and what remains when a request's last item is done.
#include "attention/native.h"
#include "attention/sparse.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tr {
namespace {

// Work space of the calling thread's runs. Grows, and is reused by every layer and step.
struct WorkSpace {
    std::vector<float> parts, columns;
    std::vector<uint8_t> panels;
};

WorkSpace& work_space() {
    static thread_local WorkSpace space;
    return space;
}

template <typename V>
typename V::value_type* at_least(V& v, int64_t size) {
    if (int64_t(v.size()) < size) v.resize(size_t(size));
    return v.data();
}

int64_t part_floats(const AttentionShape& shape, bool with_weights) {
    return shape.num_heads * (2 + shape.head_dim + (with_weights ? kSplitChunks + kSplitKeys : 0));
}

// `room`: parts have room for weights; `with_weights`: this one keeps them.
DecodePart part_at(const AttentionShape& shape, float* parts, int64_t index, bool room, bool with_weights) {
    float* base = parts + index * part_floats(shape, room);
    const int64_t heads = shape.num_heads;
    float* values = base + 2 * heads;
    if (!with_weights) return {base, base + heads, values, nullptr, nullptr};
    float* tops = values + heads * shape.head_dim;
    return {base, base + heads, values, tops, tops + heads * kSplitChunks};
}

}  // namespace

int64_t AttentionRequest::last_key(int64_t position) const {
    if (!positions) return std::min(num_keys, position + 1);
    return std::upper_bound(positions, positions + num_keys, position) - positions;
}

int64_t AttentionRequest::first_key(int64_t position, int64_t window) const {
    const int64_t oldest = window ? position - window + 1 : 0;
    if (oldest <= 0) return 0;
    if (!positions) return std::min(num_keys, oldest);
    return std::lower_bound(positions, positions + num_keys, oldest) - positions;
}

AttentionPlan::AttentionPlan(const AttentionShape& shape, std::vector<AttentionRequest> requests)
    : shape_(shape), requests_(std::move(requests)) {
    const size_t count = requests_.size();
    for (auto* v : {&first_part_, &num_request_items_, &first_key_, &panel_offset_, &column_offset_}) v->resize(count);
    for (size_t i = 0; i < count; ++i) {
        requests_[i].received_offset = received_size_;
        received_size_ += requests_[i].num_keys;
        column_offset_[i] = num_column_floats_;
        plan_sparse(requests_[i]);
        const size_t before = items_.size();
        requests_[i].num_queries == 1 ? plan_decode(int64_t(i)) : plan_prefill(int64_t(i));
        num_request_items_[i] = int64_t(items_.size() - before);
    }
    std::stable_sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    open_items_ = std::make_unique<std::atomic<int64_t>[]>(count);
}

// Which of the request's queries are sparse and do not see all, and where the blocks before the last one's window lie.
void AttentionPlan::plan_sparse(AttentionRequest& request) {
    SparseQueries found{{}, 0, {}};
    std::vector<int64_t> limited;
    for (int64_t i = 0; request.is_sparse && i < request.num_queries; ++i)
        (request.is_sparse[i] && shape_.sparse.limits(request.query_start + i) ? limited : found.order).push_back(i);
    if (limited.empty()) return;
    found.num_full = int64_t(found.order.size());
    found.order.insert(found.order.end(), limited.begin(), limited.end());
    const int64_t count = shape_.sparse.num_blocks(request.query_start + limited.back());
    for (int64_t b = 0; b <= count; ++b) found.edges.push_back(request.last_key(b * shape_.sparse.block - 1));
    sparse_.push_back(std::move(found));
    request.sparse = &sparse_.back();
}

int64_t AttentionPlan::num_blocks() const {
    int64_t most = 0;
    for (const SparseQueries& queries : sparse_) most = std::max(most, queries.num_blocks());
    return most;
}

void AttentionPlan::plan_decode(int64_t r) {
    const AttentionRequest& request = requests_[size_t(r)];
    if (request.sparse) {
        const int64_t keys = (shape_.sparse.top_blocks + 2) * shape_.sparse.block + shape_.sparse.window;
        for (int64_t g = 0; g < shape_.num_groups; ++g)
            items_.push_back({r, g, 0, 1, request.num_observed ? g : -1, keys * 3});
        num_column_floats_ += request.num_observed ? shape_.num_groups * request.num_keys : 0;
        return;
    }
    const int64_t first = request.first_key(request.query_start, shape_.window);
    const int64_t last = std::max(first, request.last_key(request.query_start));
    first_key_[size_t(r)] = first;
    first_part_[size_t(r)] = num_parts_;
    for (int64_t k = first; k == first || k < last; k += kSplitKeys) {
        const int64_t end = std::min(last, k + kSplitKeys);
        items_.push_back({r, 0, k, end, num_parts_++, (end - k) * 2 * shape_.num_groups});
    }
}

void AttentionPlan::plan_prefill(int64_t r) {
    const AttentionRequest& request = requests_[size_t(r)];
    const int64_t first = request.first_key(request.query_start, shape_.window) / 32 * 32;
    const int64_t num_panels = (request.num_keys - first + 31) / 32;
    const int64_t num_full = request.sparse ? request.sparse->num_full : request.num_queries;
    first_key_[size_t(r)] = first;
    panel_offset_[size_t(r)] = num_panels_;
    num_panels_ += shape_.num_groups * num_panels;
    for (int64_t g = 0; g < shape_.num_groups; ++g) {
        for (int64_t p = 0; p < num_panels; ++p) spans_.push_back({r, g, p});
        plan_rows(r, g, 0, num_full * shape_.repeat());
        plan_rows(r, g, num_full * shape_.repeat(), request.num_queries * shape_.repeat());
    }
}

// Items of (query, head) rows of one kind.
void AttentionPlan::plan_rows(int64_t r, int64_t group, int64_t begin, int64_t end) {
    const AttentionRequest& request = requests_[size_t(r)];
    for (; begin < end; begin += kBlockRows) {
        const int64_t stop = std::min(end, begin + kBlockRows);
        const int64_t query = request.query((stop - 1) / shape_.repeat());
        const int64_t keys = request.last_key(request.query_start + query) - first_key_[size_t(r)];
        const bool is_observed = request.is_observed(query);
        const int64_t columns = num_column_floats_ - column_offset_[size_t(r)];
        const int64_t part = is_observed ? columns / std::max<int64_t>(1, request.num_keys) : -1;
        num_column_floats_ += is_observed ? request.num_keys : 0;
        items_.push_back({r, group, begin, stop, part, keys * 8});
    }
}

PackedKeys AttentionPlan::packed(int64_t r, int64_t group, uint8_t* panels) const {
    const int64_t first = first_key_[size_t(r)];
    const int64_t count = (requests_[size_t(r)].num_keys - first + 31) / 32;
    uint8_t* base = panels + (panel_offset_[size_t(r)] + group * count) * 2 * packed_panel_bytes(shape_);
    return {base, base + count * packed_panel_bytes(shape_), first, count};
}

void AttentionPlan::pack(const AttentionRun& run, uint8_t* panels) {
    at::parallel_for(0, int64_t(spans_.size()), 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const PanelSpan& s = spans_[size_t(i)];
            pack_panel(shape_, requests_[size_t(s.request)], s.group, run.kv, packed(s.request, s.group, panels),
                       s.panel);
        }
    });
}

void AttentionPlan::bring_up_means(const AttentionRun& run) const {
    const int64_t groups = shape_.num_groups;
    std::vector<const AttentionRequest*> sparse;
    for (const AttentionRequest& request : requests_)
        if (request.sparse && run.means.num_valid[request.row] < request.sparse->num_blocks()) sparse.push_back(&request);
    at::parallel_for(0, int64_t(sparse.size()) * groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) add_means(shape_, *sparse[size_t(i / groups)], run, i % groups);
    });
    for (const AttentionRequest* request : sparse) run.means.num_valid[request->row] = request->sparse->num_blocks();
}

void AttentionPlan::run(const AttentionRun& run) {
    if (items_.empty()) return;
    WorkSpace& space = work_space();
    const bool observed = run.received != nullptr;
    float* parts = at_least(space.parts, num_parts_ * part_floats(shape_, observed));
    float* columns = at_least(space.columns, observed ? num_column_floats_ : 0);
    uint8_t* panels = at_least(space.panels, num_panels_ * 2 * packed_panel_bytes(shape_) + 64);
    panels += 64 - reinterpret_cast<uintptr_t>(panels) % 64;
    if (observed) std::fill_n(columns, num_column_floats_, 0.0f);
    for (size_t r = 0; r < requests_.size(); ++r) open_items_[r] = num_request_items_[r];
    if (num_panels_) pack(run, panels);
    bring_up_means(run);
    std::atomic<size_t> next{0};
    const size_t claim = items_per_claim();
    const auto work = [&](int64_t, int64_t) {
        for (size_t first = next.fetch_add(claim); first < items_.size(); first = next.fetch_add(claim))
            for (size_t i = first; i < std::min(first + claim, items_.size()); ++i)
                run_item(run, items_[i], parts, columns, panels);
    };
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), int64_t(items_.size()));
    int64_t cost = 0;
    for (const auto& item : items_) cost += item.cost;
    if (cost < 256) {
        work(0, 1);
    } else {
        at::parallel_for(0, threads, 1, work);
    }
}

// Neighbouring ranges of a request are best read by one thread, which has asked for the next one's entries already.
size_t AttentionPlan::items_per_claim() const {
    if (num_panels_) return 1;
    return size_t(std::clamp<int64_t>(int64_t(items_.size()) / (4 * at::get_num_threads()), 1, 4));
}

void AttentionPlan::run_item(const AttentionRun& run, const AttentionItem& item, float* parts, float* columns,
                             uint8_t* panels) {
    const AttentionRequest& request = requests_[size_t(item.request)];
    const bool observed = run.received && request.num_observed;
    float* sums = observed && item.part >= 0 && !decodes_in_parts(request)
                      ? columns + column_offset_[size_t(item.request)] + item.part * request.num_keys
                      : nullptr;
    if (decodes_in_parts(request)) {
        decode_item(shape_, request, item, run, part_at(shape_, parts, item.part, run.received, observed));
    } else if (request.num_queries == 1) {
        sparse_decode_item(shape_, request, item.group, run, sums);
    } else {
        prefill_item(shape_, request, item, run, packed(item.request, item.group, panels), sums);
    }
    if (--open_items_[size_t(item.request)] > 0) return;
    if (decodes_in_parts(request)) {
        finish_decode(run, item.request, parts);
    } else if (observed) {
        finish_columns(run, item.request, columns);
    }
}

void AttentionPlan::finish_decode(const AttentionRun& run, int64_t r, float* parts) {
    const AttentionRequest& request = requests_[size_t(r)];
    const bool observed = run.received && request.num_observed;
    const int64_t first = first_key_[size_t(r)], last = std::max(first, request.last_key(request.query_start));
    const int64_t count = num_request_items_[size_t(r)];
    static thread_local std::vector<DecodePart> ranges;
    static thread_local std::vector<int64_t> counts;
    static thread_local std::vector<float> scratch;
    ranges.clear();
    counts.clear();
    at_least(scratch, count + shape_.num_heads * (2 + kSplitChunks));
    for (int64_t i = 0; i < count; ++i) {
        ranges.push_back(part_at(shape_, parts, first_part_[size_t(r)] + i, run.received, observed));
        counts.push_back(std::min(kSplitKeys, last - first - i * kSplitKeys));
    }
    const int64_t at = request.query_rows[0] * shape_.num_heads * shape_.head_dim * (shape_.is_bf16 ? 2 : 4);
    merge_parts(shape_, ranges.data(), count, counts.data(), scratch.data(), static_cast<uint8_t*>(run.out) + at,
                observed ? run.received + request.received_offset + first : nullptr);
}

// Adds up the column sums of a prefill request's items, in their order.
void AttentionPlan::finish_columns(const AttentionRun& run, int64_t r, const float* columns) {
    const AttentionRequest& request = requests_[size_t(r)];
    const size_t end = size_t(r) + 1;
    const int64_t first = column_offset_[size_t(r)];
    const int64_t last = end < requests_.size() ? column_offset_[end] : num_column_floats_;
    float* received = run.received + request.received_offset;
    for (int64_t k = 0; k < request.num_keys; ++k) {
        float sum = 0;
        for (int64_t at = first; at < last; at += request.num_keys) sum += columns[at + k];
        received[k] += sum / float(shape_.num_heads);
    }
}

}  // namespace tr
