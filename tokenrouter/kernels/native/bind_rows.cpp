// Python's view of the row-wise operators.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "native/bindings.h"
#include "native/checks.h"
#include "native/rows.h"

namespace tr {
namespace {

QuantizedOut quantized_out(const Tensor& q, const Tensor& scale, const Tensor& x, int64_t rows, int64_t width) {
    TORCH_CHECK_VALUE(width > 0, "x needs at least one feature, got shape ", x.sizes());
    check_dtype(q, at::kChar, "q");
    check_rows(q, "q");
    check_shape(q, {rows, width}, "q");
    check_overlap_free(q, width, "q");
    check_dtype(scale, x.scalar_type(), "scale");
    check_shape(scale, {rows, 1}, "scale");
    check_contiguous(scale, "scale");
    return {q.data_ptr<int8_t>(), q.stride(0), scale.data_ptr()};
}

// Two or three dimensions, the last one neighbouring.
RowLayout layout_of(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE((t.dim() == 2 || t.dim() == 3) && (t.stride(-1) == 1 || t.size(-1) <= 1), name,
                      " must have two or three dimensions and neighbouring features, got shape ", t.sizes(),
                      " strides ", t.strides());
    if (t.dim() == 2) return {1, t.stride(0), 0};
    return {std::max<int64_t>(t.size(1), 1), t.stride(0), t.stride(1)};
}

NormArgs norm_args(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
    check_float(x, "x");
    NormArgs a{};
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

void rms_norm_rows(const Tensor& x, const Tensor& weight, double eps, const Tensor& out,
                   const std::optional<Tensor>& residual) {
    NormArgs a = norm_args(x, weight, eps, residual);
    check_dtype(out, x.scalar_type(), "out");
    check_shape(out, x.sizes(), "out");
    a.out = out.data_ptr();
    a.out_rows = layout_of(out, "out");
    check_overlap_free(out, (out.dim() == 3 ? out.size(1) - 1 : 0) * a.out_rows.inner_stride + a.width, "out");
    TORCH_CHECK_VALUE(out.dim() == 2 || out.size(1) <= 1 || a.out_rows.inner_stride >= a.width,
                      "out has heads that overlap: stride ", a.out_rows.inner_stride, " for ", a.width, " features");
    rms_norm(a, is_bf16(x), false);
}

void rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps, const Tensor& q, const Tensor& scale,
                       const std::optional<Tensor>& residual) {
    NormArgs a = norm_args(x, weight, eps, residual);
    a.quantized = quantized_out(q, scale, x, a.num_rows, a.width);
    rms_norm(a, is_bf16(x), true);
}

SiluArgs silu_args(const Tensor& gate_up) {
    check_float(gate_up, "gate_up");
    check_rows(gate_up, "gate_up");
    TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up needs an even number of features, got ", gate_up.size(1));
    SiluArgs a{};
    a.gate_up = gate_up.data_ptr();
    a.stride = gate_up.stride(0);
    a.num_rows = gate_up.size(0);
    a.width = gate_up.size(1) / 2;
    return a;
}

void silu_mul_rows(const Tensor& gate_up, const Tensor& out) {
    SiluArgs a = silu_args(gate_up);
    check_dtype(out, gate_up.scalar_type(), "out");
    check_rows(out, "out");
    check_shape(out, {a.num_rows, a.width}, "out");
    check_overlap_free(out, a.width, "out");
    a.out = out.data_ptr();
    a.out_stride = out.stride(0);
    silu_mul(a, is_bf16(gate_up));
}

void quantize(const Tensor& x, const Tensor& q, const Tensor& scale) {
    check_float(x, "x");
    check_rows(x, "x");
    const QuantizedOut out = quantized_out(q, scale, x, x.size(0), x.size(1));
    quantize_rows(x.data_ptr(), x.stride(0), out, x.size(0), x.size(1), is_bf16(x));
}

std::tuple<Tensor, Tensor> row_max_of(const Tensor& x) {
    check_float(x, "x");
    check_rows(x, "x");
    TORCH_CHECK_VALUE(x.size(1) > 0, "x needs at least one feature, got shape ", x.sizes());
    Tensor values = at::empty({x.size(0)}, x.options()), ids = at::empty({x.size(0)}, at::kLong);
    row_max(x.data_ptr(), x.stride(0), x.size(0), x.size(1), is_bf16(x), values.data_ptr(), ids.data_ptr<int64_t>());
    return {values, ids};
}

void check_per_row(const Tensor& t, const Tensor& x, at::ScalarType dtype, const char* name) {
    check_dtype(t, dtype, name);
    check_shape(t, {x.size(0)}, name);
    check_contiguous(t, name);
}

DrawArgs draw_args(const Tensor& x, const Tensor& inverse_temperature, const Tensor& uniform, const Tensor& ids) {
    check_float(x, "x");
    check_rows(x, "x");
    TORCH_CHECK_VALUE(x.size(1) > 0, "x needs at least one feature, got shape ", x.sizes());
    check_per_row(inverse_temperature, x, at::kFloat, "inverse_temperature");
    check_per_row(uniform, x, at::kDouble, "uniform");
    const DrawArgs a{x.data_ptr(), x.stride(0), x.size(0), x.size(1), inverse_temperature.data_ptr<float>(),
                     uniform.data_ptr<double>(), ids.data_ptr<int64_t>()};
    for (int64_t i = 0; i < a.num_rows; ++i) {
        TORCH_CHECK_VALUE(std::isfinite(a.inverse_temperature[i]) && a.inverse_temperature[i] > 0,
                          "inverse_temperature must be finite and above 0, got ", a.inverse_temperature[i], " in row ", i);
        TORCH_CHECK_VALUE(a.uniform[i] >= 0 && a.uniform[i] < 1, "uniform must be in [0, 1), got ", a.uniform[i],
                          " in row ", i);
    }
    return a;
}

// -1 for each row; checks of `x` follow.
Tensor no_ids(const Tensor& x) { return at::full({x.dim() ? x.size(0) : 0}, -1, at::kLong); }

Tensor draw_from(const Tensor& x, const Tensor& inverse_temperature, const Tensor& uniform) {
    Tensor ids = no_ids(x);
    draw(draw_args(x, inverse_temperature, uniform, ids), is_bf16(x));
    return ids;
}

Tensor draw_cut_from(const Tensor& x, const Tensor& inverse_temperature, const Tensor& uniform, const Tensor& top_k,
                     const Tensor& top_p, const Tensor& min_p) {
    Tensor ids = no_ids(x);
    CutArgs a{draw_args(x, inverse_temperature, uniform, ids)};
    check_per_row(top_k, x, at::kLong, "top_k");
    check_per_row(top_p, x, at::kDouble, "top_p");
    check_per_row(min_p, x, at::kDouble, "min_p");
    a.top_k = top_k.data_ptr<int64_t>();
    a.top_p = top_p.data_ptr<double>();
    a.min_p = min_p.data_ptr<double>();
    for (int64_t i = 0; i < a.draw.num_rows; ++i) {
        TORCH_CHECK_VALUE(a.top_k[i] >= 0, "top_k must be at least 0 (0: all), got ", a.top_k[i], " in row ", i);
        TORCH_CHECK_VALUE(a.top_p[i] > 0 && a.top_p[i] <= 1, "top_p must be above 0 and at most 1, got ", a.top_p[i],
                          " in row ", i);
        TORCH_CHECK_VALUE(a.min_p[i] >= 0 && a.min_p[i] <= 1, "min_p must be in [0, 1], got ", a.min_p[i], " in row ",
                          i);
    }
    draw_cut(a, is_bf16(x));
    return ids;
}

}  // namespace

void bind_rows(pybind11::module_& m) {
    m.def("rms_norm", &rms_norm_rows);
    m.def("rms_norm_quantize", &rms_norm_quantize);
    m.def("silu_mul", &silu_mul_rows);
    m.def("quantize_rows", &quantize);
    m.def("row_max", &row_max_of);
    m.def("draw", &draw_from);
    m.def("draw_cut", &draw_cut_from);
}

}  // namespace tr
