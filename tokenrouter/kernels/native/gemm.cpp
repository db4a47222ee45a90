// See gemm.h. Who works on which panels (threads), which rows a panel is applied to (blocks that stay in the first
// cache), and the epilogue.
#include "native/gemm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "native/simd.h"

namespace tr {
namespace {

constexpr int64_t kRowBlockBytes = 32 << 10;  // of activations: stay in the first cache while panels pass
constexpr int64_t kGroupBytes = 1 << 20;      // of weights: stay in the second cache while rows pass
constexpr int64_t kSerialBytes = 16 << 10;    // of weights: less is not worth waking threads

TR_INLINE float row_scale(const Gemm& g, int64_t row) {
    if (!g.row_scale) return 1.0f;
    return g.row_scale_is_bf16 ? to_float(static_cast<const bf16*>(g.row_scale)[row])
                               : static_cast<const float*>(g.row_scale)[row];
}

template <class V>
TR_INLINE f32x16 as_float(const float* sums) { return load16<V>(sums); }

template <class V>
TR_INLINE f32x16 as_float(const int32_t* sums) {
    i32x16 v;
    std::memcpy(&v, sums, sizeof v);
    return __builtin_convertvector(v, f32x16);
}

template <class V, typename Out>
TR_INLINE void put(Out* out, f32x16 v, int64_t count, bool accumulate) {
    if (count >= kLanes) {
        store16<V>(out, accumulate ? load16<V>(out) + v : v);
    } else if (count > 0) {
        store_some<V>(out, accumulate ? load_some<V>(out, count) + v : v, count);
    }
}

// Scales, bias, gate, residual: `sums` is [rows, 32] of one panel, rows m0 .. m0 + rows.
template <class V, typename Sum, typename Out>
TR_INLINE void finish_body(const Gemm& g, const Sum* sums, int64_t m0, int64_t rows, int64_t panel) {
    const int64_t n0 = panel * kPanel, width = g.gated ? kLanes : kPanel, count = g.n - panel * width;
    const f32x16 one = splat(1.0f), zero = {};
    const f32x16 scale0 = g.channel_scale ? load16<V>(g.channel_scale + n0) : one;
    const f32x16 scale1 = g.channel_scale ? load16<V>(g.channel_scale + n0 + kLanes) : one;
    const f32x16 bias0 = g.bias ? load16<V>(g.bias + n0) : zero;
    const f32x16 bias1 = g.bias ? load16<V>(g.bias + n0 + kLanes) : zero;
    for (int64_t i = 0; i < rows; ++i, sums += kPanel) {
        Out* out = static_cast<Out*>(g.out) + (m0 + i) * g.out_stride + panel * width;
        const float by = row_scale(g, m0 + i);
        const f32x16 low = unfused<V>(as_float<V>(sums) * scale0 * by) + bias0;
        const f32x16 high = unfused<V>(as_float<V>(sums + kLanes) * scale1 * by) + bias1;
        if (g.gated) {
            const f32x16 gate = sizeof(Out) == sizeof(bf16) ? silu_for_bf16<V>(low) : silu<V>(low);
            put<V>(out, gate * high, count, g.accumulate);
        } else {
            put<V>(out, low, count, g.accumulate);
            put<V>(out + kLanes, high, count - kLanes, g.accumulate);
        }
    }
}

#define TR_FINISH(name, Sum, Out)                                                                  \
    TR_EACH_ISA(name, finish_body, (, Sum, Out),                                                   \
                (const Gemm& g, const Sum* sums, int64_t m0, int64_t rows, int64_t panel),         \
                (g, sums, m0, rows, panel))

TR_FINISH(finish_int_bf16, int32_t, bf16)
TR_FINISH(finish_int_float, int32_t, float)
TR_FINISH(finish_bf16, float, bf16)
TR_FINISH(finish_float, float, float)

// One product with what its micro-kernel needs beside it.
class Job {
  public:
    Gemm g;
    GemmKind kind;

    explicit Job(const GemmJob& job) : g(job.gemm), kind(job.kind) {
        if (kind == GemmKind::int8 && PanelKernels::wants_unsigned()) offset_rows();
    }

    int64_t panel_bytes() const { return g.k_tiles * kTile; }

    const uint8_t* panel(int64_t p) const { return static_cast<const uint8_t*>(g.w) + p * panel_bytes(); }

    int64_t block_rows() const {
        const int64_t rows = kRowBlockBytes / (g.k_tiles * kTileBytes) / kMaxPanelRows * kMaxPanelRows;
        return std::max<int64_t>(rows, kMaxPanelRows);
    }

    // Rows m0 .. m1 times panel p, whose weights (widened where they have to be) are `w`.
    void apply(PanelKernels& kernels, int64_t p, const uint8_t* w, int64_t k_tiles, int64_t m0, int64_t m1) const {
        alignas(64) int32_t exact[kMaxPanelRows * kPanel];
        float* sums = reinterpret_cast<float*>(exact);
        for (int64_t m = m0; m < m1; m += kMaxPanelRows) {
            const int64_t rows = std::min(kMaxPanelRows, m1 - m);
            const PanelArgs args{static_cast<const uint8_t*>(g.a) + m * g.a_stride, g.a_stride, rows, w, k_tiles,
                                 g.channel_sum + (g.channel_sum ? p * kPanel : 0)};
            if (kind == GemmKind::int8) {
                kernels.int8(args, exact);
                g.out_is_bf16 ? finish_int_bf16(g, exact, m, rows, p) : finish_int_float(g, exact, m, rows, p);
            } else {
                kernels.bf16(args, sums);
                g.out_is_bf16 ? finish_bf16(g, sums, m, rows, p) : finish_float(g, sums, m, rows, p);
            }
        }
    }

  private:
    std::vector<uint8_t> unsigned_rows_;

    void offset_rows() {
        const int64_t width = g.k_tiles * kTileBytes;
        unsigned_rows_.resize(size_t(g.m * width));
        const Gemm from = g;
        at::parallel_for(0, g.m, std::max<int64_t>(1, 65536 / width), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const uint8_t* row = static_cast<const uint8_t*>(from.a) + i * from.a_stride;
                uint8_t* to = unsigned_rows_.data() + i * width;
                for (int64_t k = 0; k < width; ++k) to[k] = row[k] ^ 0x80;
            }
        });
        g.a = unsigned_rows_.data();
        g.a_stride = width;
    }
};

void run_job(const Job& job, PanelKernels& kernels, int64_t begin, int64_t end) {
    static thread_local std::vector<uint8_t> widened;
    const int64_t k_tiles = job.g.k_tiles;
    if (job.kind == GemmKind::int8_weight) {
        widened.resize(size_t(2 * job.panel_bytes()));
        for (int64_t p = begin; p < end; ++p) {
            widen_panel(job.panel(p), k_tiles, widened.data());
            job.apply(kernels, p, widened.data(), 2 * k_tiles, 0, job.g.m);
        }
        return;
    }
    const int64_t block = job.block_rows();
    for (int64_t m = 0; m < job.g.m; m += block)
        for (int64_t p = begin; p < end; ++p)
            job.apply(kernels, p, job.panel(p), k_tiles, m, std::min(job.g.m, m + block));
}

}  // namespace

void gemm(const GemmJob* jobs, int64_t num_jobs) {
    std::vector<Job> prepared;
    prepared.reserve(size_t(num_jobs));
    int64_t rows = 0, panel_bytes = 1;
    for (int64_t j = 0; j < num_jobs; ++j) {
        if (!jobs[j].gemm.m) continue;
        prepared.emplace_back(jobs[j]);
        rows += jobs[j].gemm.m;
        panel_bytes = std::max(panel_bytes, prepared.back().panel_bytes());
    }
    if (prepared.empty()) return;
    const int64_t panels = prepared[0].g.num_panels();
    const int64_t group = std::max<int64_t>(1, kGroupBytes / panel_bytes);
    const bool serial = panels * panel_bytes * ((rows + 7) / 8) < kSerialBytes;
    at::parallel_for(0, panels, serial ? std::max<int64_t>(panels, 1) : 1, [&](int64_t begin, int64_t end) {
        PanelKernels kernels;
        for (int64_t p = begin; p < end; p += group)
            for (const Job& job : prepared) run_job(job, kernels, p, std::min(end, p + group));
    });
}

void pack_weights(const void* w, int64_t n, int64_t k, int64_t item, void* packed) {
    const int64_t k_tiles = num_k_tiles(k, item), row_bytes = k * item;
    at::parallel_for(0, num_panels(n), 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            uint8_t* panel = static_cast<uint8_t*>(packed) + p * k_tiles * kTile;
            std::memset(panel, 0, size_t(k_tiles * kTile));
            for (int64_t c = 0; c < kPanel && p * kPanel + c < n; ++c) {
                const uint8_t* row = static_cast<const uint8_t*>(w) + (p * kPanel + c) * row_bytes;
                uint8_t* column = panel + (c / 16) * 1024 + (c % 16) * 4;
                for (int64_t b = 0; b < row_bytes; b += 4)
                    std::memcpy(column + b / 64 * kTile + b % 64 / 4 * 64, row + b,
                                size_t(std::min<int64_t>(4, row_bytes - b)));
            }
        }
    });
}

}  // namespace tr
