// What the bindings check of their tensors before memory is touched. Errors name the argument: ValueError, and IndexError for
// rows and slots.
#pragma once

#include <torch/extension.h>

namespace tr {

using at::Tensor;

inline bool is_bf16(const Tensor& t) { return t.scalar_type() == at::kBFloat16; }

inline void check_float(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.device().is_cpu(), name, " must be on the CPU, got ", t.device().str());
    TORCH_CHECK_VALUE(is_bf16(t) || t.scalar_type() == at::kFloat, name, " must be bfloat16 or float32, got ",
                      t.scalar_type());
}

inline void check_dtype(const Tensor& t, at::ScalarType dtype, const char* name) {
    TORCH_CHECK_VALUE(t.device().is_cpu(), name, " must be on the CPU, got ", t.device().str());
    TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, " must be ", dtype, ", got ", t.scalar_type());
}

inline void check_shape(const Tensor& t, at::IntArrayRef shape, const char* name) {
    TORCH_CHECK_VALUE(t.sizes() == shape, name, " must have shape ", shape, ", got ", t.sizes());
}

// [rows, width] with neighbouring features; rows may be strided.
inline void check_rows(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) <= 1), name,
                      " must be [rows, features] with neighbouring features, got shape ", t.sizes(), " strides ",
                      t.strides());
}

inline void check_contiguous(const Tensor& t, const char* name) {
    TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous, got strides ", t.strides());
}

inline void check_overlap_free(const Tensor& out, int64_t width, const char* name) {
    TORCH_CHECK_VALUE(out.size(0) <= 1 || out.stride(0) >= width, name, " has rows that overlap: stride ",
                      out.stride(0), " for ", width, " features");
}

inline void check_slots(const int64_t* slots, int64_t count, int64_t num_slots) {
    for (int64_t i = 0; i < count; ++i)
        TORCH_CHECK_INDEX(slots[i] >= 0 && slots[i] < num_slots, "slot ", slots[i], " is outside the arena's ",
                          num_slots, " slots");
}

}  // namespace tr
