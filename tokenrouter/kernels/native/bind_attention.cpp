// Python's view of RoPE with the KV write, and of attention: a plan, made once per forward and run once per layer.
#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/native.h"
#include "native/attention_batch.h"
#include "native/bindings.h"
#include "native/checks.h"
#include "native/rows.h"

namespace tr {
namespace {

// One layer's entries; `int8` and `scales` come together.
KvMemory kv_memory(const Tensor& kv, const std::optional<Tensor>& int8, const std::optional<Tensor>& scales,
                   at::ScalarType dtype) {
    check_dtype(kv, dtype, "kv");
    TORCH_CHECK_VALUE(kv.dim() == 3 && kv.size(1) % 2 == 0, "kv must be [slots, 2 x key heads, head size], got ",
                      kv.sizes());
    check_contiguous(kv, "kv");
    TORCH_CHECK_VALUE(int8.has_value() == scales.has_value(), "int8 entries come with scales, and scales with entries");
    if (!int8) return {kv.data_ptr(), kv.size(0), nullptr, nullptr};
    check_dtype(*int8, at::kChar, "int8 entries");
    TORCH_CHECK_VALUE(int8->dim() == 3, "int8 entries must be [slots, 2 x key heads, head size], got ", int8->sizes());
    check_shape(*int8, {int8->size(0), kv.size(1), kv.size(2)}, "int8 entries");
    check_contiguous(*int8, "int8 entries");
    check_dtype(*scales, at::kFloat, "int8 scales");
    check_shape(*scales, {int8->size(0), kv.size(1)}, "int8 scales");
    check_contiguous(*scales, "int8 scales");
    return {kv.data_ptr(), kv.size(0), int8->data_ptr<int8_t>(), scales->data_ptr<float>()};
}

int64_t num_slots(const Tensor& kv, const std::optional<Tensor>& int8) { return kv.size(0) + (int8 ? int8->size(0) : 0); }

RopeArgs rope_args(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& kv,
                   const Tensor& q_out, const std::optional<Tensor>& int8, const std::optional<Tensor>& scales) {
    check_float(qkv, "qkv");
    check_rows(qkv, "qkv");
    const KvMemory memory = kv_memory(kv, int8, scales, qkv.scalar_type());
    TORCH_CHECK_VALUE(q_out.dim() == 3, "q_out must be [tokens, heads, head size], got ", q_out.sizes());
    const int64_t tokens = qkv.size(0), dim = kv.size(2);
    check_shape(q_out, {tokens, q_out.size(1), dim}, "q_out");
    check_shape(qkv, {tokens, (q_out.size(1) + kv.size(1)) * dim}, "qkv");
    TORCH_CHECK_VALUE(dim % 2 == 0, "the head size must be even, got ", dim);
    check_dtype(slots, at::kLong, "slots");
    check_shape(slots, {tokens}, "slots");
    for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
        check_dtype(*t, qkv.scalar_type(), name);
        check_shape(*t, {tokens, dim}, name);
        check_contiguous(*t, name);
    }
    check_dtype(q_out, qkv.scalar_type(), "q_out");
    check_contiguous(q_out, "q_out");
    check_contiguous(slots, "slots");
    check_slots(slots.data_ptr<int64_t>(), tokens, num_slots(kv, int8));
    return {qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), slots.data_ptr<int64_t>(), q_out.data_ptr(),
            memory, tokens, q_out.size(1), kv.size(1) / 2, dim};
}

void rope(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& kv,
          const Tensor& q_out, const std::optional<Tensor>& int8, const std::optional<Tensor>& scales) {
    rope_store_kv(rope_args(qkv, cos, sin, slots, kv, q_out, int8, scales), is_bf16(qkv));
}

// Sinks, window, block, top blocks, and per token of the forward whether it is sparse.
using SparseRows = std::tuple<int64_t, int64_t, int64_t, int64_t, Tensor>;

class Plan {
  public:
    Plan(const Tensor& query_rows, const Tensor& num_queries, const Tensor& query_start, const Tensor& row,
         const Tensor& num_keys, const Tensor& slots, const std::optional<Tensor>& positions, int64_t num_slots,
         int64_t num_int8, int64_t num_heads, int64_t num_groups, int64_t head_dim, double scale, int64_t window,
         bool bf16, const std::optional<Tensor>& num_observed, const std::optional<SparseRows>& sparse)
        : num_slots_(num_slots), num_int8_(num_int8),
          shape_{num_heads, num_groups, head_dim, float(scale), window, bf16, sparse_shape(sparse)} {
        TORCH_CHECK_VALUE(num_groups > 0 && num_heads > 0 && num_heads % num_groups == 0 && head_dim > 0,
                          num_heads, " query heads of size ", head_dim, " cannot share ", num_groups, " key heads");
        TORCH_CHECK_VALUE(scale > 0, "the softmax scale must be positive, got ", scale);
        TORCH_CHECK_VALUE(window >= 0, "window must not be negative");
        TORCH_CHECK_VALUE(!window || !sparse, "attention with a window of the model's own cannot be sparse");
        const Batch batch{query_rows, num_queries, query_start, row, num_keys, slots, positions, num_observed};
        batch.check();
        num_tokens_ = query_rows.numel();
        int64_t keys = 0;
        for (int64_t i = 0; i < batch.size(); ++i) keys += batch.keys(i);
        indices_ = std::make_unique<Indices>(num_tokens_ + keys * (positions ? 2 : 1));
        plan_ = std::make_unique<AttentionPlan>(shape_, requests_of(batch, sparse ? &std::get<4>(*sparse) : nullptr));
        num_rows_ = slots.size(0);
    }

    void run(const Tensor& q, const Tensor& kv, const Tensor& out, const std::optional<Tensor>& received,
             const std::optional<Tensor>& int8, const std::optional<Tensor>& scales,
             const std::optional<Tensor>& means, const std::optional<Tensor>& num_valid) {
        AttentionRun args = run_args(q, kv, out, received, int8, scales);
        args.means = block_means(means, num_valid);
        plan_->run(args);
    }

    AttentionRun run_args(const Tensor& q, const Tensor& kv, const Tensor& out, const std::optional<Tensor>& received,
                          const std::optional<Tensor>& int8, const std::optional<Tensor>& scales) const {
        const auto dtype = shape_.is_bf16 ? at::kBFloat16 : at::kFloat;
        const int64_t heads = shape_.num_heads, dim = shape_.head_dim;
        check_dtype(q, dtype, "q");
        check_shape(q, {num_tokens_, heads, dim}, "q");
        TORCH_CHECK_VALUE(q.numel() == 0 || (q.stride(2) == 1 && q.stride(1) == dim),
                          "q must have neighbouring heads, got strides ", q.strides());
        const KvMemory memory = kv_memory(kv, int8, scales, dtype);
        check_shape(kv, {kv.size(0), 2 * shape_.num_groups, dim}, "kv");
        const int64_t found = num_slots(kv, int8) - kv.size(0);
        TORCH_CHECK_VALUE(kv.size(0) == num_slots_ - num_int8_ && found == num_int8_,
                          "kv has another size than planned: the plan is for ", num_slots_ - num_int8_,
                          " full entries and ", num_int8_, " in int8, got ", kv.size(0), " and ", found);
        check_dtype(out, dtype, "out");
        check_shape(out, {num_tokens_, heads * dim}, "out");
        check_contiguous(out, "out");
        if (received) {
            check_dtype(*received, at::kFloat, "received");
            check_shape(*received, {plan_->received_size()}, "received");
            check_contiguous(*received, "received");
        }
        return {q.data_ptr(), q.stride(0), memory, out.data_ptr(),
                received ? received->data_ptr<float>() : nullptr, {}};
    }

    // rope_store_kv, then run; nothing is written before both are checked.
    void attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& kv,
                const Tensor& out, const std::optional<Tensor>& received, const std::optional<Tensor>& int8,
                const std::optional<Tensor>& scales, const std::optional<Tensor>& means,
                const std::optional<Tensor>& num_valid) {
        const auto dtype = shape_.is_bf16 ? at::kBFloat16 : at::kFloat;
        check_dtype(qkv, dtype, "qkv");
        check_shape(qkv, {num_tokens_, (shape_.num_heads + 2 * shape_.num_groups) * shape_.head_dim}, "qkv");
        if (!q_.defined()) q_ = at::empty({num_tokens_, shape_.num_heads, shape_.head_dim}, dtype);
        AttentionRun args = run_args(q_, kv, out, received, int8, scales);
        args.means = block_means(means, num_valid);
        rope_store_kv(rope_args(qkv, cos, sin, slots, kv, q_, int8, scales), shape_.is_bf16);
        plan_->run(args);
    }

    int64_t received_size() const { return plan_->received_size(); }

    int64_t num_blocks() const { return plan_->num_blocks(); }

  private:
    Tensor q_, means_, num_valid_;
    std::vector<uint8_t> is_sparse_;
    int64_t num_slots_, num_int8_, num_tokens_ = 0, num_rows_ = 0;
    AttentionShape shape_;
    std::unique_ptr<Indices> indices_;
    std::unique_ptr<AttentionPlan> plan_;

    static SparseShape sparse_shape(const std::optional<SparseRows>& sparse) {
        if (!sparse) return {};
        const auto& [sinks, window, block, top_blocks, is_sparse] = *sparse;
        TORCH_CHECK_VALUE(sinks >= 0 && window >= 1 && block >= 1 && top_blocks >= 0 &&
                              std::max({sinks, window, block, top_blocks}) <= kMaxPosition,
                          "sparse attention needs sinks >= 0, window >= 1, block >= 1 and top_blocks >= 0");
        return {sinks, window, block, top_blocks};
    }

    // The caller's, which must have room for the plan's blocks; or a run's own.
    BlockMeans block_means(const std::optional<Tensor>& means, const std::optional<Tensor>& num_valid) {
        TORCH_CHECK_VALUE(means.has_value() == num_valid.has_value(), "means come with num_valid, and num_valid with means");
        const int64_t groups = shape_.num_groups, dim = shape_.head_dim;
        if (!means && num_blocks()) {
            means_ = at::empty({num_rows_, groups, dim, num_blocks()}, at::kFloat);
            num_valid_ = at::zeros({num_rows_}, at::kLong);
        }
        const Tensor& values = means ? *means : means_;
        const Tensor& valid = means ? *num_valid : num_valid_;
        if (!num_blocks()) return {};
        check_dtype(values, at::kFloat, "means");
        TORCH_CHECK_VALUE(values.dim() == 4 && values.size(3) >= num_blocks(),
                          "means must be [rows, key heads, head size, at least ", num_blocks(), " blocks], got ",
                          values.sizes());
        check_shape(values, {num_rows_, groups, dim, values.size(3)}, "means");
        check_contiguous(values, "means");
        check_dtype(valid, at::kLong, "num_valid");
        check_shape(valid, {num_rows_}, "num_valid");
        check_contiguous(valid, "num_valid");
        return {values.data_ptr<float>(), values.size(3), valid.data_ptr<int64_t>()};
    }

    // Copies what the requests point to.
    std::vector<AttentionRequest> requests_of(const Batch& batch, const Tensor* is_sparse) {
        const int64_t* query_rows = indices_->copy(batch.query_rows.data_ptr<int64_t>(), num_tokens_);
        check_rows_partition(query_rows);
        if (is_sparse) {
            check_dtype(*is_sparse, at::kBool, "is_sparse");
            check_shape(*is_sparse, {num_tokens_}, "is_sparse");
            check_contiguous(*is_sparse, "is_sparse");
            for (int64_t i = 0; i < num_tokens_; ++i) is_sparse_.push_back(is_sparse->data_ptr<bool>()[query_rows[i]]);
        }
        std::vector<AttentionRequest> requests;
        int64_t at = 0;
        for (int64_t i = 0; i < batch.size(); ++i) {
            const int64_t queries = batch.num_queries.data_ptr<int64_t>()[i];
            const int64_t start = batch.query_start.data_ptr<int64_t>()[i], keys = batch.keys(i);
            TORCH_CHECK_VALUE(queries >= 1 && queries <= num_tokens_ - at && start >= 0 && start <= kMaxPosition,
                              "request ", i, " has ", queries, " queries from position ", start, "; ",
                              num_tokens_ - at, " rows are left");
            const int64_t observed = batch.num_observed ? batch.num_observed->data_ptr<int64_t>()[i] : 0;
            TORCH_CHECK_VALUE(observed >= 0, "num_observed must not be negative, got ", observed);
            const int64_t* slots = indices_->copy(batch.row_of(batch.slots, i), keys);
            check_slots(slots, keys, num_slots_);
            const int64_t* positions =
                batch.positions ? indices_->copy(batch.row_of(*batch.positions, i), keys) : nullptr;
            requests.push_back({query_rows + at, queries, start, slots, positions, keys, observed, 0,
                                batch.row.data_ptr<int64_t>()[i], is_sparse ? is_sparse_.data() + at : nullptr});
            at += queries;
        }
        TORCH_CHECK_VALUE(at == num_tokens_, "requests have ", at, " queries, there are ", num_tokens_, " rows");
        return requests;
    }

    // Every row is written once.
    void check_rows_partition(const int64_t* query_rows) const {
        std::vector<bool> seen(static_cast<size_t>(num_tokens_));
        for (int64_t i = 0; i < num_tokens_; ++i) {
            const int64_t row = query_rows[i];
            TORCH_CHECK_INDEX(row >= 0 && row < num_tokens_, "query row ", row, " is outside the ", num_tokens_,
                              " tokens");
            TORCH_CHECK_VALUE(!seen[size_t(row)], "query row ", row, " belongs to two queries");
            seen[size_t(row)] = true;
        }
    }
};

}  // namespace

void bind_attention(pybind11::module_& m) {
    m.def("rope_store_kv", &rope);
    pybind11::class_<Plan>(m, "AttentionPlan")
        .def(pybind11::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const std::optional<Tensor>&, int64_t, int64_t, int64_t, int64_t, int64_t, double, int64_t,
                            bool, const std::optional<Tensor>&, const std::optional<SparseRows>&>())
        .def("run", &Plan::run)
        .def("attend", &Plan::attend)
        .def_property_readonly("received_size", &Plan::received_size)
        .def_property_readonly("num_blocks", &Plan::num_blocks);
}

}  // namespace tr
