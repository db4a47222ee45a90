// Python's view of the native operators: every shape, dtype, stride and slot is checked here, before memory is touched.
#include <torch/extension.h>

#include <string>

#include "attention/native.h"
#include "native/gemm.h"
#include "native/isa.h"
#include "native/rows.h"

namespace {

using at::Tensor;

const char* const kIsaNames[] = {"plain", "avx2", "avx512", "amx"};

std::string isa_name() { return kIsaNames[int(tr::isa())]; }

std::string limit_isa(const std::string& name) {
    for (int level = 0; level < 4; ++level)
        if (name == kIsaNames[level]) return kIsaNames[int(tr::limit_isa(tr::Isa(level)))];
    TORCH_CHECK_VALUE(false, "unknown instruction set '", name, "'; choose one of: plain, avx2, avx512, amx");
}

bool is_bf16(const Tensor& t) { return t.scalar_type() == at::kBFloat16; }

void check_float(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.device().is_cpu(), name, " must be on the CPU, got ", t.device().str());
    TORCH_CHECK_VALUE(is_bf16(t) || t.scalar_type() == at::kFloat, name, " must be bfloat16 or float32, got ",
                      t.scalar_type());
}

void check_dtype(const Tensor& t, at::ScalarType dtype, const char* name) {
    TORCH_CHECK_VALUE(t.device().is_cpu(), name, " must be on the CPU, got ", t.device().str());
    TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, " must be ", dtype, ", got ", t.scalar_type());
}

void check_shape(const Tensor& t, at::IntArrayRef shape, const char* name) {
    TORCH_CHECK_VALUE(t.sizes() == shape, name, " must have shape ", shape, ", got ", t.sizes());
}

// [rows, width] with neighbouring features; rows may be strided.
void check_rows(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) <= 1), name,
                      " must be [rows, features] with neighbouring features, got shape ", t.sizes(), " strides ",
                      t.strides());
}

void check_contiguous(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous, got strides ", t.strides());
}

void check_overlap_free(const Tensor& out, int64_t width, const char* name) {
    TORCH_CHECK_VALUE(out.size(0) <= 1 || out.stride(0) >= width, name, " has rows that overlap: stride ",
                      out.stride(0), " for ", width, " features");
}

void check_slots(const int64_t* slots, int64_t count, int64_t num_slots) {
    for (int64_t i = 0; i < count; ++i)
        TORCH_CHECK_INDEX(slots[i] >= 0 && slots[i] < num_slots, "slot ", slots[i], " is outside the arena's ",
                          num_slots, " slots");
}

tr::QuantizedOut quantized_out(const Tensor& q, const Tensor& scale, const Tensor& x, int64_t rows, int64_t width) {
    check_dtype(q, at::kChar, "q");
    check_rows(q, "q");
    check_shape(q, {rows, width}, "q");
    check_overlap_free(q, width, "q");
    check_dtype(scale, x.scalar_type(), "scale");
    check_shape(scale, {rows, 1}, "scale");
    check_contiguous(scale, "scale");
    return {q.data_ptr<int8_t>(), q.stride(0), scale.data_ptr()};
}

// ---- rows -------------------------------------------------------------------------------------------------------------

// Two or three dimensions, the last one neighbouring.
tr::RowLayout layout_of(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE((t.dim() == 2 || t.dim() == 3) && (t.stride(-1) == 1 || t.size(-1) <= 1), name,
                      " must have two or three dimensions and neighbouring features, got shape ", t.sizes(),
                      " strides ", t.strides());
    if (t.dim() == 2) return {1, t.stride(0), 0};
    return {std::max<int64_t>(t.size(1), 1), t.stride(0), t.stride(1)};
}

tr::NormArgs norm_args(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
    check_float(x, "x");
    tr::NormArgs a{};
    a.x = x.data_ptr();
    a.x_rows = layout_of(x, "x");
    a.width = x.size(-1);
    a.num_rows = a.width ? x.numel() / a.width : 0;
    a.eps = float(eps);
    check_dtype(weight, x.scalar_type(), "weight");
    check_shape(weight, {a.width}, "weight");
    check_contiguous(weight, "weight");
    a.weight = weight.data_ptr();
    if (residual) {
        check_dtype(*residual, x.scalar_type(), "residual");
        check_rows(*residual, "residual");
        check_shape(*residual, {a.num_rows, a.width}, "residual");
        check_overlap_free(*residual, a.width, "residual");
        a.residual = residual->data_ptr();
        a.residual_stride = residual->stride(0);
    }
    return a;
}

void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out,
              const std::optional<Tensor>& residual) {
    tr::NormArgs a = norm_args(x, weight, eps, residual);
    check_dtype(out, x.scalar_type(), "out");
    check_shape(out, x.sizes(), "out");
    a.out = out.data_ptr();
    a.out_rows = layout_of(out, "out");
    check_overlap_free(out, (out.dim() == 3 ? out.size(1) - 1 : 0) * a.out_rows.inner_stride + a.width, "out");
    TORCH_CHECK_VALUE(out.dim() == 2 || out.size(1) <= 1 || a.out_rows.inner_stride >= a.width,
                      "out has heads that overlap: stride ", a.out_rows.inner_stride, " for ", a.width, " features");
    tr::rms_norm(a, is_bf16(x), false);
}

void rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps, const Tensor& q, const Tensor& scale,
                       const std::optional<Tensor>& residual) {
    tr::NormArgs a = norm_args(x, weight, eps, residual);
    a.quantized = quantized_out(q, scale, x, a.num_rows, a.width);
    tr::rms_norm(a, is_bf16(x), true);
}

tr::SiluArgs silu_args(const Tensor& gate_up) {
    check_float(gate_up, "gate_up");
    check_rows(gate_up, "gate_up");
    TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up needs an even number of features, got ", gate_up.size(1));
    tr::SiluArgs a{};
    a.gate_up = gate_up.data_ptr();
    a.stride = gate_up.stride(0);
    a.num_rows = gate_up.size(0);
    a.width = gate_up.size(1) / 2;
    return a;
}

void silu_mul(const Tensor& gate_up, const Tensor& out) {
    tr::SiluArgs a = silu_args(gate_up);
    check_dtype(out, gate_up.scalar_type(), "out");
    check_rows(out, "out");
    check_shape(out, {a.num_rows, a.width}, "out");
    check_overlap_free(out, a.width, "out");
    a.out = out.data_ptr();
    a.out_stride = out.stride(0);
    tr::silu_mul(a, is_bf16(gate_up));
}

void quantize_rows(const Tensor& x, const Tensor& q, const Tensor& scale) {
    check_float(x, "x");
    check_rows(x, "x");
    const tr::QuantizedOut out = quantized_out(q, scale, x, x.size(0), x.size(1));
    tr::quantize_rows(x.data_ptr(), x.stride(0), out, x.size(0), x.size(1), is_bf16(x));
}

void rope_store_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& kv,
                   const Tensor& q_out, const std::optional<Tensor>& kv_scale) {
    check_float(qkv, "qkv");
    check_rows(qkv, "qkv");
    TORCH_CHECK_VALUE(kv.dim() == 3 && kv.size(1) % 2 == 0, "kv must be [slots, 2 x key heads, head size], got ",
                      kv.sizes());
    TORCH_CHECK_VALUE(q_out.dim() == 3, "q_out must be [tokens, heads, head size], got ", q_out.sizes());
    const int64_t tokens = qkv.size(0), dim = kv.size(2);
    check_dtype(kv, kv_scale ? at::kChar : qkv.scalar_type(), "kv");
    check_contiguous(kv, "kv");
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
    if (kv_scale) {
        check_dtype(*kv_scale, at::kFloat, "kv_scale");
        check_shape(*kv_scale, {kv.size(0), kv.size(1)}, "kv_scale");
        check_contiguous(*kv_scale, "kv_scale");
    }
    check_slots(slots.data_ptr<int64_t>(), tokens, kv.size(0));
    tr::rope_store_kv({qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), slots.data_ptr<int64_t>(),
                       q_out.data_ptr(), kv.data_ptr(), kv_scale ? kv_scale->data_ptr<float>() : nullptr, tokens,
                       q_out.size(1), kv.size(1) / 2, dim},
                      is_bf16(qkv));
}

// ---- products ---------------------------------------------------------------------------------------------------------

// Weights in panels, with what the epilogue needs, padded to whole panels.
struct Weights {
    Tensor data;  // uint8 [panels * k_tiles * 2048], 64-byte aligned
    Tensor scale, bias, channel_sum;
    int64_t n = 0, k = 0, k_tiles = 0;  // n: outputs of a product
    bool int8 = false, gated = false;

    // weight: bf16 [N, K], or int8 [N, K] with float scales [N]; bias: float [N]. gated_outputs > 0: blocks of 16 gate
    // and 16 up channels, of which so many are no padding.
    Weights(const Tensor& weight, const std::optional<Tensor>& scale_n, const std::optional<Tensor>& bias_n,
            int64_t gated_outputs) {
        TORCH_CHECK_VALUE(weight.device().is_cpu() && weight.dim() == 2, "weight must be [N, K] on the CPU, got ",
                          weight.sizes());
        int8 = weight.scalar_type() == at::kChar;
        TORCH_CHECK_VALUE(int8 || is_bf16(weight), "weight must be int8 or bfloat16, got ", weight.scalar_type());
        TORCH_CHECK_VALUE(int8 == scale_n.has_value(), "int8 weights come with scales, bfloat16 ones without");
        n = weight.size(0);
        k = weight.size(1);
        TORCH_CHECK_VALUE(k > 0, "weight must have at least one input, got shape ", weight.sizes());
        const int64_t item = int8 ? 1 : 2;
        k_tiles = tr::num_k_tiles(k, item);
        const Tensor rows = weight.contiguous();
        data = at::empty({tr::num_panels(n) * k_tiles * tr::kTile}, at::kByte);
        tr::pack_weights(rows.data_ptr(), n, k, item, data.data_ptr());
        if (scale_n) scale = padded(*scale_n, "scale");
        if (bias_n) bias = padded(*bias_n, "bias");
        if (int8) {
            channel_sum = at::zeros({tr::num_panels(n) * tr::kPanel}, at::kInt);
            channel_sum.narrow(0, 0, n).copy_(rows.sum(1, false, at::kInt));
        }
        if (!gated_outputs) return;
        TORCH_CHECK_VALUE(n % tr::kPanel == 0 && (gated_outputs + 15) / 16 * tr::kPanel == n, gated_outputs,
                          " gated outputs do not fit ", n, " channels");
        gated = true;
        n = gated_outputs;
    }

    Tensor padded(const Tensor& values, const char* name) const {
        check_shape(values, {n}, name);
        Tensor out = at::zeros({tr::num_panels(n) * tr::kPanel}, at::kFloat);
        out.narrow(0, 0, n).copy_(values);
        return out;
    }
};

// Rows that the micro-kernels may read: whole tiles of k. A copy only where K is no multiple of a tile.
Tensor whole_tiles(const Tensor& x, const Weights& w) {
    const int64_t width = w.k_tiles * tr::kTileBytes / x.element_size();
    if (x.size(1) == width) return x;
    Tensor copy = at::zeros({x.size(0), width}, x.options());
    copy.narrow(1, 0, x.size(1)).copy_(x);
    return copy;
}

struct Rows {
    Tensor x;                     // bf16, or int8 with
    std::optional<Tensor> scale;  // [rows, 1]
};

// What `job` reads and writes outlives it: `keep` holds the copies.
tr::GemmJob job_of(const Rows& rows, const Weights& w, const Tensor& out, bool accumulate, std::vector<Tensor>& keep) {
    const Tensor& x = rows.x;
    const bool int8 = x.scalar_type() == at::kChar;
    if (!int8) check_float(x, "rows");
    TORCH_CHECK_VALUE(x.device().is_cpu() && (int8 || w.int8 || is_bf16(x)),
                      "bfloat16 weights need bfloat16 rows on the CPU, got ", x.scalar_type());
    TORCH_CHECK_VALUE(!int8 || w.int8, "int8 rows need int8 weights");
    TORCH_CHECK_VALUE(int8 == rows.scale.has_value(), "int8 rows come with scales, bfloat16 ones without");
    check_rows(x, "rows");
    check_shape(x, {x.size(0), w.k}, "rows");
    check_float(out, "out");
    check_rows(out, "out");
    check_shape(out, {x.size(0), w.n}, "out");
    check_overlap_free(out, w.n, "out");
    const auto kind = int8 ? tr::GemmKind::int8 : w.int8 ? tr::GemmKind::int8_weight : tr::GemmKind::bf16;
    keep.push_back(kind == tr::GemmKind::int8_weight ? x : whole_tiles(x, w));
    const Tensor& a = keep.back();
    tr::Gemm g{};
    g.a = a.data_ptr();
    g.a_stride = a.stride(0) * a.element_size();
    g.m = x.size(0);
    g.n = w.n;
    g.k = w.k;
    g.a_is_bf16 = is_bf16(x);
    g.k_tiles = w.k_tiles;
    g.gated = w.gated;
    g.w = w.data.data_ptr();
    g.out = out.data_ptr();
    g.out_stride = out.stride(0);
    g.out_is_bf16 = is_bf16(out);
    g.accumulate = accumulate;
    g.bias = w.bias.defined() ? w.bias.data_ptr<float>() : nullptr;
    g.channel_scale = w.scale.defined() ? w.scale.data_ptr<float>() : nullptr;
    if (rows.scale) {
        check_float(*rows.scale, "scale");
        check_shape(*rows.scale, {x.size(0), 1}, "scale");
        check_contiguous(*rows.scale, "scale");
        g.row_scale = rows.scale->data_ptr();
        g.row_scale_is_bf16 = is_bf16(*rows.scale);
    }
    g.channel_sum = w.int8 ? w.channel_sum.data_ptr<int32_t>() : nullptr;
    return {g, kind};
}

void matmul(const Tensor& x, const std::optional<Tensor>& scale, const Weights& w, const Tensor& out,
            bool accumulate) {
    std::vector<Tensor> keep;
    const tr::GemmJob job = job_of({x, scale}, w, out, accumulate, keep);
    tr::gemm(&job, 1);
}

// Rows of the first path, then rows of the second, into one `out`.
void routed_matmul(const Tensor& first, const Weights& first_weights, const Tensor& second, const Tensor& second_scale,
                   const Weights& second_weights, const Tensor& out, bool accumulate) {
    TORCH_CHECK_VALUE(first.dim() == 2 && second.dim() == 2 && out.dim() == 2 &&
                          out.size(0) == first.size(0) + second.size(0),
                      "out must have a row for each of ", first.sizes(), " and ", second.sizes(), ", got ",
                      out.sizes());
    std::vector<Tensor> keep;
    keep.reserve(2);
    const tr::GemmJob jobs[2] = {
        job_of({first, std::nullopt}, first_weights, out.narrow(0, 0, first.size(0)), accumulate, keep),
        job_of({second, second_scale}, second_weights, out.narrow(0, first.size(0), second.size(0)), accumulate, keep)};
    TORCH_CHECK_VALUE(first_weights.n == second_weights.n && first_weights.gated == second_weights.gated,
                      "both paths must have the same outputs");
    tr::gemm(jobs, 2);
}

// ---- attention --------------------------------------------------------------------------------------------------------

// A plan and the tensors that it points into.
class Plan {
  public:
    Plan(const Tensor& query_rows, const Tensor& num_queries, const Tensor& query_start, const Tensor& row,
         const Tensor& num_keys, const Tensor& slots, const std::optional<Tensor>& positions, int64_t num_slots,
         int64_t num_heads, int64_t num_groups, int64_t head_dim, double scale, int64_t window, bool bf16,
         int64_t observe_queries)
        : query_rows_(query_rows), slots_(slots), positions_(positions), num_slots_(num_slots) {
        TORCH_CHECK_VALUE(num_groups > 0 && num_heads > 0 && num_heads % num_groups == 0 && head_dim > 0,
                          num_heads, " query heads of size ", head_dim, " cannot share ", num_groups, " key heads");
        TORCH_CHECK_VALUE(scale > 0, "the softmax scale must be positive, got ", scale);
        TORCH_CHECK_VALUE(window >= 0 && observe_queries >= 0, "window and observe_queries must not be negative");
        const int64_t count = num_queries.numel();
        for (const auto& [t, name] : {std::pair{&query_rows, "query_rows"}, std::pair{&num_queries, "num_queries"},
                                      std::pair{&query_start, "query_start"}, std::pair{&row, "row"},
                                      std::pair{&num_keys, "num_keys"}, std::pair{&slots, "slots"}}) {
            check_dtype(*t, at::kLong, name);
            check_contiguous(*t, name);
            if (t != &query_rows && t != &slots) check_shape(*t, {count}, name);
        }
        TORCH_CHECK_VALUE(slots.dim() == 2, "slots must be [rows, entries], got ", slots.sizes());
        if (positions) {
            check_dtype(*positions, at::kLong, "positions");
            check_shape(*positions, slots.sizes(), "positions");
            check_contiguous(*positions, "positions");
        }
        num_tokens_ = query_rows.numel();
        check_rows_partition();
        std::vector<tr::AttentionRequest> requests;
        int64_t at = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t queries = num_queries.data_ptr<int64_t>()[i], keys = num_keys.data_ptr<int64_t>()[i];
            const int64_t r = row.data_ptr<int64_t>()[i], start = query_start.data_ptr<int64_t>()[i];
            TORCH_CHECK_INDEX(r >= 0 && r < slots.size(0), "row ", r, " is outside the slot table");
            TORCH_CHECK_INDEX(keys >= 0 && keys <= slots.size(1), keys, " keys are more than the slot table holds");
            TORCH_CHECK_VALUE(queries >= 1 && queries <= num_tokens_ - at && start >= 0, "request ", i, " has ",
                              queries, " queries from position ", start, "; ", num_tokens_ - at, " rows are left");
            const int64_t* first_slot = slots.data_ptr<int64_t>() + r * slots.size(1);
            check_slots(first_slot, keys, num_slots);
            requests.push_back({query_rows.data_ptr<int64_t>() + at, queries, start, first_slot,
                                positions ? positions->data_ptr<int64_t>() + r * slots.size(1) : nullptr, keys, 0});
            at += queries;
        }
        TORCH_CHECK_VALUE(at == num_tokens_, "requests have ", at, " queries, there are ", num_tokens_, " rows");
        shape_ = {num_heads, num_groups, head_dim, float(scale), window, bf16};
        plan_ = std::make_unique<tr::AttentionPlan>(shape_, std::move(requests), observe_queries);
    }

    void run(const Tensor& q, const Tensor& kv, const Tensor& out, const std::optional<Tensor>& received) {
        const auto dtype = shape_.is_bf16 ? at::kBFloat16 : at::kFloat;
        const int64_t heads = shape_.num_heads, dim = shape_.head_dim;
        check_dtype(q, dtype, "q");
        check_shape(q, {num_tokens_, heads, dim}, "q");
        TORCH_CHECK_VALUE(q.numel() == 0 || (q.stride(2) == 1 && q.stride(1) == dim),
                          "q must have neighbouring heads, got strides ", q.strides());
        check_dtype(kv, dtype, "kv");
        check_shape(kv, {num_slots_, 2 * shape_.num_groups, dim}, "kv");
        check_contiguous(kv, "kv");
        check_dtype(out, dtype, "out");
        check_shape(out, {num_tokens_, heads * dim}, "out");
        check_contiguous(out, "out");
        if (received) {
            check_dtype(*received, at::kFloat, "received");
            check_shape(*received, {plan_->received_size()}, "received");
            check_contiguous(*received, "received");
        }
        plan_->run({q.data_ptr(), q.stride(0), kv.data_ptr(), out.data_ptr(),
                    received ? received->data_ptr<float>() : nullptr});
    }

    int64_t received_size() const { return plan_->received_size(); }

  private:
    Tensor query_rows_, slots_;
    std::optional<Tensor> positions_;
    int64_t num_slots_, num_tokens_ = 0;
    tr::AttentionShape shape_{};
    std::unique_ptr<tr::AttentionPlan> plan_;

    // Every row is written once.
    void check_rows_partition() const {
        std::vector<bool> seen(static_cast<size_t>(num_tokens_));
        for (int64_t i = 0; i < num_tokens_; ++i) {
            const int64_t row = query_rows_.data_ptr<int64_t>()[i];
            TORCH_CHECK_INDEX(row >= 0 && row < num_tokens_, "query row ", row, " is outside the ", num_tokens_,
                              " tokens");
            TORCH_CHECK_VALUE(!seen[size_t(row)], "query row ", row, " belongs to two queries");
            seen[size_t(row)] = true;
        }
    }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    namespace py = pybind11;
    m.def("isa", &isa_name);
    m.def("limit_isa", &limit_isa);
    m.def("rms_norm", &rms_norm);
    m.def("rms_norm_quantize", &rms_norm_quantize);
    m.def("silu_mul", &silu_mul);
    m.def("quantize_rows", &quantize_rows);
    m.def("rope_store_kv", &rope_store_kv);
    m.def("matmul", &matmul);
    m.def("routed_matmul", &routed_matmul);
    py::class_<Weights>(m, "Weights")
        .def(py::init<const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, int64_t>())
        .def_readonly("data", &Weights::data)
        .def_readonly("n", &Weights::n)
        .def_readonly("k", &Weights::k);
    py::class_<Plan>(m, "AttentionPlan")
        .def(py::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const std::optional<Tensor>&, int64_t, int64_t, int64_t, int64_t, double, int64_t, bool,
                      int64_t>())
        .def("run", &Plan::run)
        .def_property_readonly("received_size", &Plan::received_size);
}
