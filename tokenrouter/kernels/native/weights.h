// Packed weights as a tensor that Python holds.
#pragma once

#include "native/checks.h"
#include "native/gemm.h"

namespace tr {

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
        k_tiles = num_k_tiles(k, item);
        const Tensor rows = weight.contiguous();
        data = at::empty({num_panels(n) * k_tiles * kTile}, at::kByte);
        pack_weights(rows.data_ptr(), n, k, item, data.data_ptr());
        if (scale_n) scale = padded(*scale_n, "scale");
        if (bias_n) bias = padded(*bias_n, "bias");
        if (int8) {
            channel_sum = at::zeros({num_panels(n) * kPanel}, at::kInt);
            channel_sum.narrow(0, 0, n).copy_(rows.sum(1, false, at::kInt));
        }
        if (!gated_outputs) return;
        TORCH_CHECK_VALUE(n % kPanel == 0 && (gated_outputs + 15) / 16 * kPanel == n, gated_outputs,
                          " gated outputs do not fit ", n, " channels");
        gated = true;
        n = gated_outputs;
    }

    Tensor padded(const Tensor& values, const char* name) const {
        check_shape(values, {n}, name);
        Tensor out = at::zeros({num_panels(n) * kPanel}, at::kFloat);
        out.narrow(0, 0, n).copy_(values);
        return out;
    }
};

}  // namespace tr
