// Python's view of products: packed weights, one product, one of two paths.
#include <optional>

#include "native/bindings.h"
#include "native/checks.h"
#include "native/operands.h"

namespace tr {
namespace {

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

}  // namespace

void bind_products(pybind11::module_& m) {
    pybind11::class_<Weights>(m, "Weights")
        .def(pybind11::init<const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, int64_t>())
        .def(pybind11::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t,
                            int64_t>())
        .def_readonly("data", &Weights::data)
        .def_readonly("n", &Weights::n)
        .def_readonly("k", &Weights::k);
    m.def("matmul", &matmul);
    m.def("routed_matmul", &routed_matmul);
}

}  // namespace tr
