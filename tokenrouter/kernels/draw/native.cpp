// A random index of each row, by one uniform number: inverse transform sampling. Weights are summed up by blocks, whatever the
// number of threads, then the block that holds the number is looked through.
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "draw/weights.h"
#include "native/rows.h"
#include "native/scratch.h"

namespace tr {
namespace {

constexpr int64_t kBlock = 32 * kLanes;    // values whose weights are summed up as one
constexpr int64_t kSegment = 8 * kBlock;   // values of one piece of work

enum class Phase { tops, sums, ids };

// What a call shares out: per row its segments' largest values, then its blocks' sums of weights.
struct DrawWork {
    const DrawArgs& args;
    int64_t num_segments, num_blocks;  // of a row
    double* sums;                      // [rows, blocks]
    float* tops;                       // [rows, segments]
};

template <class V, typename T>
TR_INLINE double sum_of(const T* x, int64_t count, Scale scale) {
    Sum sum;
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) sum.add(scale.weights<V>(load16<V>(x + k)));
    if (k < count) sum.add(scale.weights<V>(load_rest<V>(x + k, count - k)));
    return sum.total();
}

// The first index whose weight, with those before it, exceeds `uniform` of the sum; of those with a weight the last one where
// sums round to less; -1 where the weights have no sum.
template <class V, typename T>
TR_INLINE int64_t index_of(const T* x, int64_t width, Scale scale, const double* sums, int64_t num_blocks,
                           double uniform) {
    double total = 0;
    for (int64_t b = 0; b < num_blocks; ++b) total += sums[b];
    if (!(total <= std::numeric_limits<double>::max())) return -1;
    const double target = uniform * total;
    double before = 0, seen = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < num_blocks && before <= target; before += sums[b++]) {
        if (sums[b] == 0) continue;
        block = b;
        seen = before;
    }
    int64_t chosen = -1;
    const int64_t end = std::min(width, (block + 1) * kBlock);
    for (int64_t k = block * kBlock; k < end; k += kLanes) {
        const bool whole = end - k >= kLanes;
        float weights[kLanes];
        store16<V>(weights, scale.weights<V>(whole ? load16<V>(x + k) : load_rest<V>(x + k, end - k)));
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (weights[lane] == 0) continue;
            chosen = k + lane;
            seen += double(weights[lane]);
            if (seen > target) return chosen;
        }
    }
    return chosen;
}

// Pieces [begin, end) of a phase: segments of all rows, or rows.
template <class V, typename T>
TR_INLINE void body(const DrawWork& work, Phase phase, int64_t begin, int64_t end) {
    const DrawArgs& a = work.args;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t row = phase == Phase::ids ? i : i / work.num_segments;
        const T* x = static_cast<const T*>(a.x) + row * a.stride;
        const int64_t first = i % work.num_segments * kSegment, last = std::min(a.width, first + kSegment);
        if (phase == Phase::tops) {
            work.tops[i] = top_of<V>(x + first, last - first);
            continue;
        }
        const float* tops = work.tops + row * work.num_segments;
        const Scale scale{*std::max_element(tops, tops + work.num_segments), a.inverse_temperature[row]};
        double* sums = work.sums + row * work.num_blocks;
        if (phase == Phase::sums) {
            for (int64_t k = first; k < last; k += kBlock)
                sums[k / kBlock] = sum_of<V>(x + k, std::min(kBlock, last - k), scale);
        } else {
            a.ids[row] = index_of<V>(x, a.width, scale, sums, work.num_blocks, a.uniform[row]);
        }
    }
}

TR_EACH_ISA(draw_bf16, body, (, bf16), (const DrawWork& work, Phase phase, int64_t begin, int64_t end),
            (work, phase, begin, end))
TR_EACH_ISA(draw_float, body, (, float), (const DrawWork& work, Phase phase, int64_t begin, int64_t end),
            (work, phase, begin, end))

}  // namespace

void draw(const DrawArgs& a, bool is_bf16) {
    const int64_t num_segments = (a.width + kSegment - 1) / kSegment, num_blocks = (a.width + kBlock - 1) / kBlock;
    const int64_t sum_bytes = a.num_rows * num_blocks * int64_t(sizeof(double));
    const int64_t top_bytes = a.num_rows * num_segments * int64_t(sizeof(float));
    uint8_t* memory = scratch().get(Scratch::kDraw, sum_bytes + top_bytes);
    const DrawWork work{a, num_segments, num_blocks, reinterpret_cast<double*>(memory),
                        reinterpret_cast<float*>(memory + sum_bytes)};
    const auto share = [&](Phase phase, int64_t count, int64_t grain) {
        at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
            is_bf16 ? draw_bf16(work, phase, begin, end) : draw_float(work, phase, begin, end);
        });
    };
    share(Phase::tops, a.num_rows * num_segments, 8);
    share(Phase::sums, a.num_rows * num_segments, 2);
    share(Phase::ids, a.num_rows, 8);
}

}  // namespace tr
