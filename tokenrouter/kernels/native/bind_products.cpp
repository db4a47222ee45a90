// Python's view of products: packed weights, one product, one of two paths, and the fused ones that prepare their own rows.
#include <array>
#include <cstring>
#include <optional>

#include "native/bindings.h"
#include "native/checks.h"
#include "native/gemm.h"
#include "native/rows.h"
#include "native/weights.h"

namespace tr {
namespace {

// ---- rows of a product ------------------------------------------------------------------------------------------------

// Where a product finds its rows.
struct Rows {
    const void* data;
    int64_t stride;  // bytes
    int64_t count;
    at::ScalarType type;  // bf16 or float, or char with
    const void* scale;    // one per row, of
    bool scale_is_bf16;

    bool int8() const { return type == at::kChar; }
};

struct Out {
    void* data;
    int64_t stride;  // elements
    bool is_bf16, accumulate;
};

GemmJob job_of(const Rows& rows, const Weights& w, const Out& out) {
    Gemm g{};
    g.a = rows.data;
    g.a_stride = rows.stride;
    g.a_is_bf16 = rows.type == at::kBFloat16;
    g.m = rows.count;
    g.n = w.n;
    g.k = w.k;
    g.k_tiles = w.k_tiles;
    g.gated = w.gated;
    g.w = w.data.data_ptr();
    g.out = out.data;
    g.out_stride = out.stride;
    g.out_is_bf16 = out.is_bf16;
    g.accumulate = out.accumulate;
    g.bias = w.bias.defined() ? w.bias.data_ptr<float>() : nullptr;
    g.channel_scale = w.scale.defined() ? w.scale.data_ptr<float>() : nullptr;
    g.row_scale = rows.scale;
    g.row_scale_is_bf16 = rows.scale_is_bf16;
    g.channel_sum = w.int8 ? w.channel_sum.data_ptr<int32_t>() : nullptr;
    return {g, rows.int8() ? GemmKind::int8 : w.int8 ? GemmKind::int8_weight : GemmKind::bf16};
}

Out checked_out(const Tensor& out, int64_t num_rows, const Weights& w, bool accumulate) {
    check_float(out, "out");
    check_rows(out, "out");
    check_shape(out, {num_rows, w.n}, "out");
    check_overlap_free(out, w.n, "out");
    return {out.data_ptr(), out.stride(0), is_bf16(out), accumulate};
}

// Rows of any kind that `w` can multiply.
void check_operand(const Tensor& x, const Weights& w) {
    const bool int8 = x.scalar_type() == at::kChar;
    if (!int8) check_float(x, "rows");
    TORCH_CHECK_VALUE(x.device().is_cpu() && (int8 || w.int8 || is_bf16(x)),
                      "bfloat16 weights need bfloat16 rows on the CPU, got ", x.scalar_type());
    TORCH_CHECK_VALUE(!int8 || w.int8, "int8 rows need int8 weights");
    check_rows(x, "rows");
    check_shape(x, {x.size(0), w.k}, "rows");
}

// What a product reads: whole tiles of k, but where it reads the rows' own values (int8_weight). A copy only where K is no
// multiple of a tile; `keep` holds it.
Rows checked_rows(const Tensor& x, const std::optional<Tensor>& scale, const Weights& w, Tensor& keep) {
    check_operand(x, w);
    const bool int8 = x.scalar_type() == at::kChar;
    TORCH_CHECK_VALUE(int8 == scale.has_value(), "int8 rows come with scales, bfloat16 ones without");
    keep = x;
    const int64_t width = w.k_tiles * kTileBytes / x.element_size();
    if (int8 == w.int8 && w.k != width) {
        keep = at::zeros({x.size(0), width}, x.options());
        keep.narrow(1, 0, w.k).copy_(x);
    }
    Rows rows{keep.data_ptr(), keep.stride(0) * keep.element_size(), x.size(0), x.scalar_type(), nullptr, false};
    if (scale) {
        check_float(*scale, "scale");
        check_shape(*scale, {x.size(0), 1}, "scale");
        check_contiguous(*scale, "scale");
        rows.scale = scale->data_ptr();
        rows.scale_is_bf16 = is_bf16(*scale);
    }
    return rows;
}

// ---- products ---------------------------------------------------------------------------------------------------------

void matmul(const Tensor& x, const std::optional<Tensor>& scale, const Weights& w, const Tensor& out,
            bool accumulate) {
    Tensor keep;
    const Rows rows = checked_rows(x, scale, w, keep);
    const GemmJob job = job_of(rows, w, checked_out(out, rows.count, w, accumulate));
    gemm(&job, 1);
}

// Rows of the first path, then rows of the second, into one `out`.
void routed_matmul(const Tensor& first, const Weights& first_weights, const Tensor& second, const Tensor& second_scale,
                   const Weights& second_weights, const Tensor& out, bool accumulate) {
    TORCH_CHECK_VALUE(first.dim() == 2 && second.dim() == 2 && out.dim() == 2 &&
                          out.size(0) == first.size(0) + second.size(0),
                      "out must have a row for each of ", first.sizes(), " and ", second.sizes(), ", got ",
                      out.sizes());
    Tensor keep[2];
    const Rows rows[2] = {checked_rows(first, std::nullopt, first_weights, keep[0]),
                          checked_rows(second, second_scale, second_weights, keep[1])};
    const Tensor outs[2] = {out.narrow(0, 0, first.size(0)), out.narrow(0, first.size(0), second.size(0))};
    const GemmJob jobs[2] = {
        job_of(rows[0], first_weights, checked_out(outs[0], rows[0].count, first_weights, accumulate)),
        job_of(rows[1], second_weights, checked_out(outs[1], rows[1].count, second_weights, accumulate))};
    TORCH_CHECK_VALUE(first_weights.n == second_weights.n && first_weights.gated == second_weights.gated,
                      "both paths must have the same outputs");
    gemm(jobs, 2);
}

// ---- products that prepare their rows ---------------------------------------------------------------------------------

// Work space of one thread's calls: grows to the largest call.
class Scratch {
  public:
    enum Use { kRows, kScales, kGated, kNumUses };

    uint8_t* get(Use use, int64_t bytes) {
        Tensor& held = held_[use];
        if (!held.defined() || held.numel() < bytes) held = at::empty({bytes}, at::kByte);
        return held.data_ptr<uint8_t>();
    }

  private:
    std::array<Tensor, kNumUses> held_;
};

Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
}

// Rows of `w.k` values of the model's dtype.
struct Plain {
    const void* data;
    int64_t stride;  // elements
    int64_t count;
    bool is_bf16;

    int64_t item() const { return is_bf16 ? 2 : 4; }
    at::ScalarType type() const { return is_bf16 ? at::kBFloat16 : at::kFloat; }
};

// Zeros from `used` to `stride` bytes of each row.
void clear_tails(uint8_t* rows, int64_t count, int64_t stride, int64_t used) {
    for (int64_t i = 0; used < stride && i < count; ++i) std::memset(rows + i * stride + used, 0, size_t(stride - used));
}

// A norm's weight, or nothing to norm by.
struct Norm {
    const void* weight = nullptr;
    float eps = 0;
};

Norm checked_norm(const std::optional<Tensor>& weight, double eps, const Tensor& x) {
    if (!weight) return {};
    check_dtype(*weight, x.scalar_type(), "norm");
    check_shape(*weight, {x.size(1)}, "norm");
    check_contiguous(*weight, "norm");
    return {weight->data_ptr(), float(eps)};
}

// What a product by `w` reads of `x`, normed and quantised as asked, in scratch.
Rows prepare(const Plain& x, const Norm& norm, bool int8_rows, const Weights& w) {
    const bool whole = int8_rows || !w.int8;  // int8_weight splits the rows by itself
    if (!norm.weight && !int8_rows && (!whole || w.k * x.item() % kTileBytes == 0))
        return {x.data, x.stride * x.item(), x.count, x.type(), nullptr, false};
    const int64_t item = int8_rows ? 1 : x.item(), used = w.k * item;
    const int64_t stride = whole ? w.k_tiles * kTileBytes : used;
    uint8_t* to = scratch().get(Scratch::kRows, x.count * stride);
    QuantizedOut quantized{};
    if (int8_rows)
        quantized = {reinterpret_cast<int8_t*>(to), stride, scratch().get(Scratch::kScales, x.count * x.item())};
    if (norm.weight) {
        NormArgs a{};
        a.x = x.data;
        a.x_rows = {1, x.stride, 0};
        a.width = w.k;
        a.num_rows = x.count;
        a.eps = norm.eps;
        a.weight = norm.weight;
        a.out = to;
        a.out_rows = {1, stride / item, 0};
        a.quantized = quantized;
        rms_norm(a, x.is_bf16, int8_rows);
    } else if (int8_rows) {
        quantize_rows(x.data, x.stride, quantized, x.count, w.k, x.is_bf16);
    } else {
        for (int64_t i = 0; i < x.count; ++i)
            std::memcpy(to + i * stride, static_cast<const uint8_t*>(x.data) + i * x.stride * item, size_t(used));
    }
    clear_tails(to, x.count, stride, used);
    return {to, stride, x.count, int8_rows ? at::kChar : x.type(), quantized.scale, x.is_bf16};
}

Plain checked_plain(const Tensor& x, const Weights& w, bool int8_rows) {
    check_float(x, "rows");
    TORCH_CHECK_VALUE(!int8_rows || w.int8, "int8 rows need int8 weights");
    check_operand(x, w);
    return {x.data_ptr(), x.stride(0), x.size(0), is_bf16(x)};
}

void project(const Tensor& x, const std::optional<Tensor>& norm, double eps, const Weights& w, bool int8_rows,
             const Tensor& out, bool accumulate) {
    const Plain plain = checked_plain(x, w, int8_rows);
    const Out to = checked_out(out, plain.count, w, accumulate);
    const GemmJob job = job_of(prepare(plain, checked_norm(norm, eps, x), int8_rows, w), w, to);
    gemm(&job, 1);
}

void mlp(const Tensor& x, const Tensor& norm, double eps, const Weights& gate_up, const Weights& down, bool int8_rows) {
    const Plain plain = checked_plain(x, gate_up, int8_rows);
    TORCH_CHECK_VALUE(gate_up.gated && gate_up.int8 == down.int8 && down.k == gate_up.n,
                      "down must take what gated weights of the same format give, ", gate_up.n, " features, got ",
                      down.k);
    const Out sum = checked_out(x, plain.count, down, true);
    const int64_t item = plain.item(), stride = (down.k * item + kTileBytes - 1) / kTileBytes * kTileBytes;
    uint8_t* gated = scratch().get(Scratch::kGated, plain.count * stride);
    const Rows normed = prepare(plain, checked_norm(norm, eps, x), int8_rows, gate_up);
    const GemmJob first = job_of(normed, gate_up, {gated, stride / item, plain.is_bf16, false});
    gemm(&first, 1);
    clear_tails(gated, plain.count, stride, down.k * item);
    Rows rows{gated, stride, plain.count, plain.type(), nullptr, false};
    if (int8_rows) rows = prepare({gated, stride / item, plain.count, plain.is_bf16}, {}, true, down);
    const GemmJob second = job_of(rows, down, sum);
    gemm(&second, 1);
}

}  // namespace

void bind_products(pybind11::module_& m) {
    pybind11::class_<Weights>(m, "Weights")
        .def(pybind11::init<const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, int64_t>())
        .def_readonly("data", &Weights::data)
        .def_readonly("n", &Weights::n)
        .def_readonly("k", &Weights::k);
    m.def("matmul", &matmul);
    m.def("routed_matmul", &routed_matmul);
    m.def("project", &project);
    m.def("mlp", &mlp);
}

}  // namespace tr
