// What products are made of: rows, outputs and norms, checked and prepared for packed weights.
#pragma once

#include <optional>

#include "native/checks.h"
#include "native/gemm.h"
#include "native/weights.h"

namespace tr {

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

// Rows of the model's dtype.
struct Plain {
    const void* data;
    int64_t stride;  // elements
    int64_t count;
    bool is_bf16;

    int64_t item() const { return is_bf16 ? 2 : 4; }
    at::ScalarType type() const { return is_bf16 ? at::kBFloat16 : at::kFloat; }
};

// A norm's weight, or nothing to norm by.
struct Norm {
    const void* weight = nullptr;
    float eps = 0;
};

GemmJob job_of(const Rows& rows, const Weights& w, const Out& out);

Out checked_out(const Tensor& out, int64_t num_rows, const Weights& w, bool accumulate);

// Rows of any kind that `w` can multiply.
void check_operand(const Tensor& x, const Weights& w);

Plain checked_plain(const Tensor& x, const Weights& w, bool int8_rows);

Norm checked_norm(const std::optional<Tensor>& weight, double eps, const Tensor& x);

// What a product by `w` reads of `x`, normed and quantised as asked, in scratch.
Rows prepare(const Plain& x, const Norm& norm, bool int8_rows, const Weights& w);

}  // namespace tr
