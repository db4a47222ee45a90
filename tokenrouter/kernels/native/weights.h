// Packed weights as a tensor that Python holds.
#pragma once

#include <vector>

#include "int4_matmul/native.h"
#include "native/checks.h"
#include "native/gemm.h"

namespace tr {

// Weights in panels, with what the epilogue needs, padded to whole panels.
struct Weights {
    Tensor data;  // uint8 [panels * k_tiles * 2048], 64-byte aligned; int4: kInt4Tile bytes a tile
    Tensor scale, bias, channel_sum;
    int64_t n = 0, k = 0, k_tiles = 0;  // n: outputs of a product
    bool int8 = false, int4 = false, gated = false;  // int4 is int8 once it is expanded

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
        if (int8) {
            channel_sum = at::zeros({num_panels(n) * kPanel}, at::kInt);
            channel_sum.narrow(0, 0, n).copy_(rows.sum(1, false, at::kInt));
        }
        finish(scale_n, bias_n, gated_outputs);
    }

    // Of 4 bits: codes uint8 [N, groups * 32] of which `inputs` are no padding, step uint8 and offset int8 [N, groups],
    // float scales [N]; the rest as above.
    Weights(const Tensor& codes, const Tensor& step, const Tensor& offset, const Tensor& scale_n,
            const std::optional<Tensor>& bias_n, int64_t inputs, int64_t gated_outputs)
        : k(inputs), int8(true), int4(true) {
        check_dtype(codes, at::kByte, "codes");
        TORCH_CHECK_VALUE(codes.dim() == 2 && k > 0 && codes.size(1) == (k + kInt4Group - 1) / kInt4Group * kInt4Group,
                          "codes must be whole groups of ", k, " inputs, got shape ", codes.sizes());
        n = codes.size(0);
        k_tiles = num_k_tiles(k, 1);
        const int64_t groups = codes.size(1) / kInt4Group;
        check_dtype(step, at::kByte, "step");
        check_dtype(offset, at::kChar, "offset");
        check_shape(step, {n, groups}, "step");
        check_shape(offset, {n, groups}, "offset");
        const Tensor own[3] = {codes.contiguous(), step.contiguous(), offset.contiguous()};
        data = at::empty({num_panels(n) * k_tiles * kInt4Tile}, at::kByte);
        const Int4Weights w{own[0].data_ptr<uint8_t>(), own[1].data_ptr<uint8_t>(), own[2].data_ptr<int8_t>(), n, groups};
        pack_int4(w, k_tiles, data.data_ptr<uint8_t>());
        sum_int4();
        finish(scale_n, bias_n, gated_outputs);
    }

  private:
    // Of what the panels become, padding included: it too meets rows that are offset.
    void sum_int4() {
        channel_sum = at::empty({num_panels(n) * kPanel}, at::kInt);
        std::vector<uint8_t> panel(size_t(k_tiles * kTile));
        for (int64_t p = 0; p < num_panels(n); ++p) {
            expand_int4(data.data_ptr<uint8_t>() + p * k_tiles * kInt4Tile, k_tiles, panel.data());
            sum_channels(panel.data(), k_tiles, channel_sum.data_ptr<int32_t>() + p * kPanel);
        }
    }

    void finish(const std::optional<Tensor>& scale_n, const std::optional<Tensor>& bias_n, int64_t gated_outputs) {
        if (scale_n) scale = padded(*scale_n, "scale");
        if (bias_n) bias = padded(*bias_n, "bias");
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
