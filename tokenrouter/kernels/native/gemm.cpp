// See gemm.h. Who works on which panels (threads), which rows a panel is applied to (blocks that stay in the first
// cache), and the epilogue.
#include "native/gemm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>

#include "int4_matmul/native.h"
#include "native/rows.h"
#include "native/scratch.h"

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
        f32x16 low = unfused<V>(as_float<V>(sums) * scale0 * by);
        f32x16 high = unfused<V>(as_float<V>(sums + kLanes) * scale1 * by);
        if (g.bias) {
            low += bias0;
            high += bias1;
        }
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

// ---- rows in int8 -----------------------------------------------------------------------------------------------------

// Activations + 128: the unsigned bytes that VNNI asks for.
template <class V>
TR_INLINE void offset_body(const uint8_t* row, int64_t width, uint8_t* to) {
    for (int64_t k = 0; k < width; ++k) to[k] = row[k] ^ 0x80;
}

TR_EACH_ISA(offset_row, offset_body, (), (const uint8_t* row, int64_t width, uint8_t* to), (row, width, to))

constexpr float kSecondSteps = 254.0f;  // of the second row in one step of the first: half a step is 127 of them

// x ~ scale * (first + second / 254); zeros up to `width`. `flip` is 0x80 for unsigned bytes.
template <class V, typename T>
TR_INLINE void split_body(const T* x, int64_t k_size, int64_t width, uint8_t flip, uint8_t* first, uint8_t* second,
                          float* scale) {
    const float amax = largest_magnitude<V>(x, k_size);
    *scale = amax < 1e-30f ? 1e-30f : amax / 127.0f;
    const float inverse = 1.0f / *scale;
    for (int64_t k = 0; k < width; k += kLanes) {
        const int64_t count = k_size - k;
        const f32x16 v = (count >= kLanes ? load16<V>(x + k) : load_some<V>(x + k, count > 0 ? count : 0)) * inverse;
        const i32x16 coarse = round_to_int<V>(v);
        const i32x16 fine = round_to_int<V>((v - __builtin_convertvector(coarse, f32x16)) * kSecondSteps);
        const i8x16 low = __builtin_convertvector(coarse, i8x16) ^ int8_t(flip);
        const i8x16 high = __builtin_convertvector(fine, i8x16) ^ int8_t(flip);
        std::memcpy(first + k, &low, sizeof low);
        std::memcpy(second + k, &high, sizeof high);
    }
}

TR_EACH_ISA(split_bf16, split_body, (, bf16),
            (const bf16* x, int64_t k_size, int64_t width, uint8_t flip, uint8_t* first, uint8_t* second,
             float* scale),
            (x, k_size, width, flip, first, second, scale))
TR_EACH_ISA(split_float, split_body, (, float),
            (const float* x, int64_t k_size, int64_t width, uint8_t flip, uint8_t* first, uint8_t* second,
             float* scale),
            (x, k_size, width, flip, first, second, scale))

// Sums of the two rows of each row, scaled.
template <class V>
TR_INLINE void join_body(const int32_t* pairs, const float* scale, int64_t rows, float* sums) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t c = 0; c < kPanel; c += kLanes) {
            const int32_t* first = pairs + 2 * i * kPanel + c;
            const f32x16 fine = unfused<V>(as_float<V>(first + kPanel) * (1.0f / kSecondSteps));
            store16<V>(sums + i * kPanel + c, (as_float<V>(first) + fine) * scale[i]);
        }
}

TR_EACH_ISA(join, join_body, (), (const int32_t* pairs, const float* scale, int64_t rows, float* sums),
            (pairs, scale, rows, sums))

// ---- one product ------------------------------------------------------------------------------------------------------

// A product with the rows as its micro-kernel reads them.
class Job {
  public:
    Gemm g{};
    GemmKind kind{};

    Job() = default;

    // `number`: of this job in its call; each has work space of its own.
    Job(const GemmJob& job, int64_t number) : g(job.gemm), kind(job.kind) {
        const int64_t width = g.k_tiles * kTileBytes, grain = std::max<int64_t>(1, 65536 / width);
        const uint8_t flip = PanelKernels::wants_unsigned() ? 0x80 : 0;
        const Gemm from = g;
        const auto own = [&](int use, int64_t bytes) { return scratch().get(use + int(number), bytes); };
        if (kind == GemmKind::int8 && flip) {
            own_rows_ = own(Scratch::kFirstJobRows, g.m * width);
            at::parallel_for(0, g.m, grain, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) offset_row(row(from, i), width, own_rows_ + i * width);
            });
        } else if (kind == GemmKind::int8_weight) {
            own_rows_ = own(Scratch::kFirstJobRows, 2 * g.m * width);
            row_scale_ = reinterpret_cast<float*>(own(Scratch::kFirstJobScales, g.m * int64_t(sizeof(float))));
            at::parallel_for(0, g.m, grain, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) split(from, i, width, flip);
            });
        } else {
            return;
        }
        g.a = own_rows_;
        g.a_stride = width;
    }

    int64_t panel_bytes() const { return g.k_tiles * kTile; }

    // As many panels as `run` takes at once. Those of int4 are expanded first: one by one, in the first cache, where all rows
    // are one block.
    int64_t group() const { return g.int4 && g.m <= row_block() ? 1 : std::max<int64_t>(1, kGroupBytes / panel_bytes()); }

    // Panels begin .. end, for blocks of rows that stay in the first cache.
    void run(PanelKernels& kernels, int64_t begin, int64_t end) const {
        const uint8_t* panels = int8_panels(begin, end);
        for (int64_t m = 0; m < g.m; m += row_block())
            for (int64_t p = begin; p < end; ++p)
                apply(kernels, panels + (p - begin) * panel_bytes(), p, m, std::min(g.m, m + row_block()));
    }

  private:
    uint8_t* own_rows_ = nullptr;
    float* row_scale_ = nullptr;

    static const uint8_t* row(const Gemm& g, int64_t i) { return static_cast<const uint8_t*>(g.a) + i * g.a_stride; }

    int64_t row_block() const {
        const int64_t fit = kRowBlockBytes / (g.k_tiles * kTileBytes) / kMaxPanelRows * kMaxPanelRows;
        return std::max(fit, kMaxPanelRows);
    }

    // Panels begin .. end as micro-kernels read them.
    const uint8_t* int8_panels(int64_t begin, int64_t end) const {
        const uint8_t* w = static_cast<const uint8_t*>(g.w);
        if (!g.int4) return w + begin * panel_bytes();
        uint8_t* panels = scratch().get(Scratch::kPanels, (end - begin) * panel_bytes());
        for (int64_t p = begin; p < end; ++p)
            expand_int4(w + p * g.k_tiles * kInt4Tile, g.k_tiles, panels + (p - begin) * panel_bytes());
        return panels;
    }

    void split(const Gemm& from, int64_t i, int64_t width, uint8_t flip) {
        uint8_t *first = own_rows_ + 2 * i * width, *second = first + width;
        float* scale = row_scale_ + i;
        if (from.a_is_bf16) {
            split_bf16(reinterpret_cast<const bf16*>(row(from, i)), from.k, width, flip, first, second, scale);
        } else {
            split_float(reinterpret_cast<const float*>(row(from, i)), from.k, width, flip, first, second, scale);
        }
    }

    // Rows m0 .. m1 times panel p, which is `w`.
    void apply(PanelKernels& kernels, const uint8_t* w, int64_t p, int64_t m0, int64_t m1) const {
        alignas(64) int32_t exact[kMaxPanelRows * kPanel];
        alignas(64) float sums[kMaxPanelRows * kPanel];
        const int32_t* channel_sum = g.channel_sum ? g.channel_sum + p * kPanel : nullptr;
        const int64_t parts = kind == GemmKind::int8_weight ? 2 : 1, step = kMaxPanelRows / parts;
        for (int64_t m = m0; m < m1; m += step) {
            const int64_t rows = std::min(step, m1 - m);
            const PanelArgs args{row(g, parts * m), g.a_stride, parts * rows, w, g.k_tiles, channel_sum};
            if (kind == GemmKind::bf16) {
                kernels.bf16(args, sums);
            } else {
                kernels.int8(args, exact);
            }
            if (kind == GemmKind::int8) {
                g.out_is_bf16 ? finish_int_bf16(g, exact, m, rows, p) : finish_int_float(g, exact, m, rows, p);
                continue;
            }
            if (kind == GemmKind::int8_weight) join(exact, row_scale_ + m, rows, sums);
            g.out_is_bf16 ? finish_bf16(g, sums, m, rows, p) : finish_float(g, sums, m, rows, p);
        }
    }
};

}  // namespace

void gemm(const GemmJob* jobs, int64_t num_jobs) {
    std::array<Job, kMaxJobs> prepared;
    int64_t count = 0, rows = 0, panel_bytes = 1, group = kGroupBytes;
    TORCH_INTERNAL_ASSERT(num_jobs <= kMaxJobs);
    for (int64_t j = 0; j < num_jobs; ++j) {
        if (!jobs[j].gemm.m) continue;
        prepared[size_t(count)] = Job(jobs[j], j);
        rows += jobs[j].gemm.m;
        panel_bytes = std::max(panel_bytes, prepared[size_t(count)].panel_bytes());
        group = std::min(group, prepared[size_t(count++)].group());
    }
    if (!count) return;
    const int64_t panels = prepared[0].g.num_panels();
    const bool serial = panels * panel_bytes * ((rows + 7) / 8) < kSerialBytes;
    at::parallel_for(0, panels, serial ? std::max<int64_t>(panels, 1) : 1, [&](int64_t begin, int64_t end) {
        PanelKernels kernels;
        for (int64_t p = begin; p < end; p += group)
            for (int64_t j = 0; j < count; ++j) prepared[size_t(j)].run(kernels, p, std::min(end, p + group));
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
