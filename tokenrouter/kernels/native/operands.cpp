// See operands.h.
#include "native/operands.h"

#include <cstring>

#include "native/rows.h"
#include "native/scratch.h"

namespace tr {
namespace {

// Zeros from `used` to `stride` bytes of each row.
void clear_tails(uint8_t* rows, int64_t count, int64_t stride, int64_t used) {
    for (int64_t i = 0; used < stride && i < count; ++i) std::memset(rows + i * stride + used, 0, size_t(stride - used));
}

}  // namespace

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
    g.int4 = w.int4;
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

void check_operand(const Tensor& x, const Weights& w) {
    const bool int8 = x.scalar_type() == at::kChar;
    if (!int8) check_float(x, "rows");
    TORCH_CHECK_VALUE(x.device().is_cpu() && (int8 || w.int8 || is_bf16(x)),
                      "bfloat16 weights need bfloat16 rows on the CPU, got ", x.scalar_type());
    TORCH_CHECK_VALUE(!int8 || w.int8, "int8 rows need int8 weights");
    check_rows(x, "rows");
    check_shape(x, {x.size(0), w.k}, "rows");
}

Norm checked_norm(const std::optional<Tensor>& weight, double eps, const Tensor& x) {
    if (!weight) return {};
    check_dtype(*weight, x.scalar_type(), "norm");
    check_shape(*weight, {x.size(1)}, "norm");
    check_contiguous(*weight, "norm");
    return {weight->data_ptr(), float(eps)};
}

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

}  // namespace tr
