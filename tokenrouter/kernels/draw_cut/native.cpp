// A random index among the likeliest of each row, without sorting it. Values are counted, and their weights added up, by
// buckets of their distance to the largest; the bucket that holds a wanted count or mass is collected and divided further by
// the bits of its values, until what is left is equal.
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "draw/weights.h"
#include "native/rows.h"
#include "native/scratch.h"

namespace tr {
namespace {

constexpr int64_t kPerUnit = 32;             // buckets
constexpr int64_t kBuckets = 88 * kPerUnit;  // weights are 0 from 87.3 below the largest value on
constexpr int kDigitBits = 8;
constexpr int64_t kDigits = 1 << kDigitBits;
constexpr uint32_t kAllLanes = (1u << kLanes) - 1;
constexpr int64_t kSegment = 4 * kLanes;  // values of which the largest is kept

typedef double Tally __attribute__((vector_size(16)));
constexpr int kMass = 0, kCount = 1;  // parts of a tally

struct Member {
    uint32_t key;  // ascends as values descend
    float weight;
    int64_t id;
};

// A value, and the tally of the row up to it in descending order.
struct Place {
    Tally up_to;
    uint32_t key;
    int64_t id;

    bool comes_before(const Place& other) const { return key < other.key || (key == other.key && id < other.id); }
};

// Of one thread.
struct Memory {
    Tally* buckets;   // [kBuckets + 1]: the last one takes what no cut can reach
    Tally* digits;    // [kDigits]
    Member* members;  // [width]
    float* tops;      // [segments]
};

int64_t num_segments(int64_t width) { return (width + kSegment - 1) / kSegment; }

Memory memory_for(int64_t width) {
    const int64_t num_tallies = kBuckets + 1 + kDigits;
    const int64_t tally_bytes = num_tallies * int64_t(sizeof(Tally)), member_bytes = width * int64_t(sizeof(Member));
    const int64_t top_bytes = num_segments(width) * int64_t(sizeof(float));
    uint8_t* memory = scratch().get(Scratch::kCut, tally_bytes + member_bytes + top_bytes);
    Tally* tallies = reinterpret_cast<Tally*>(memory);
    return {tallies, tallies + kBuckets + 1, reinterpret_cast<Member*>(memory + tally_bytes),
            reinterpret_cast<float*>(memory + tally_bytes + member_bytes)};
}

// Zeros of both signs are equal.
TR_INLINE uint32_t key_of(float x) {
    const uint32_t u = bits_of(x + 0.0f);
    return u & 0x80000000u ? u : u ^ 0x7fffffffu;
}

// The first tally that takes a part of the sum beyond `limit`, where none does the last one with something in it; `before`
// becomes the sum of those before it.
int64_t first_beyond(const Tally* tallies, int64_t count, int part, double limit, Tally* before) {
    int64_t found = 0;
    Tally sum = *before;
    for (int64_t i = 0; i < count && !(sum[part] > limit); ++i) {
        if (tallies[i][kCount] == 0) continue;
        found = i;
        *before = sum;
        sum += tallies[i];
    }
    return found;
}

// The first of `count` > 0 members whose tally is beyond `limit`, where none is the last one. Members come in the order of
// their ids; they are moved.
Place first_member_beyond(const Memory& memory, int64_t count, int part, double limit, Tally before) {
    Member* members = memory.members;
    for (;;) {
        uint32_t first = members[0].key, last = first;
        for (int64_t i = 1; i < count; ++i) {
            first = std::min(first, members[i].key);
            last = std::max(last, members[i].key);
        }
        if (first == last) break;
        const int shift = std::max(0, int(std::bit_width(last - first)) - kDigitBits);
        const auto digit_of = [&](const Member& member) { return int64_t((member.key - first) >> shift); };
        std::fill_n(memory.digits, kDigits, Tally{});
        for (int64_t i = 0; i < count; ++i) memory.digits[digit_of(members[i])] += Tally{double(members[i].weight), 1};
        const int64_t digit = first_beyond(memory.digits, kDigits, part, limit, &before);
        int64_t num_left = 0;
        for (int64_t i = 0; i < count; ++i)
            if (digit_of(members[i]) == digit) members[num_left++] = members[i];
        count = num_left;
    }
    int64_t i = 0;
    for (; i < count; ++i) {
        before += Tally{double(members[i].weight), 1};
        if (before[part] > limit) break;
    }
    const Member& member = members[std::min(i, count - 1)];
    return {before, member.key, member.id};
}

// One bit per lane.
template <class V>
TR_INLINE uint32_t lanes_equal(i32x16 v, int32_t wanted) {
    uint32_t lanes = 0;
#if TR_X86
    if constexpr (V::is_avx512) {
        __asm__("vpcmpeqd %2, %1, %%k1\n\tkmovw %%k1, %0" : "=r"(lanes) : "v"(v), "v"(i32x16{} + wanted) : "k1");
        return lanes;
    }
#endif
    int32_t values[kLanes];
    std::memcpy(values, &v, sizeof v);
    for (int64_t i = 0; i < kLanes; ++i) lanes |= uint32_t(values[i] == wanted) << i;
    return lanes;
}

template <typename T>
struct Row {
    const T* x;
    int64_t width;
    Scale scale;
    float least;  // scaled values below it are left out
    float floor;  // no cut reaches those below it

    // 16 scaled values from k on; those behind the row are -inf.
    template <class V>
    TR_INLINE f32x16 scaled(int64_t k) const {
        if (width - k >= kLanes) return scale.scaled(load16<V>(x + k));
        return scale.scaled(load_rest<V>(x + k, width - k));
    }

    // NaN counts as below the floor.
    template <class V>
    TR_INLINE i32x16 buckets_of(f32x16 scaled) const {
        const f32x16 none = splat(-float(kBuckets));
        return round_to_int<V>(-max16<V>(select_less<V>(scaled, splat(floor), none, scaled * float(kPerUnit)), none));
    }
};

// Fills the buckets; returns the sum of all weights.
template <class V, typename T>
TR_INLINE double fill_buckets(const Row<T>& row, Tally* buckets) {
    std::fill_n(buckets, kBuckets + 1, Tally{});
    Sum sum;
    for (int64_t k = 0; k < row.width; k += kLanes) {
        const f32x16 scaled = row.template scaled<V>(k);
        const f32x16 w = select_less<V>(scaled, splat(row.least), f32x16{}, exp16<V>(scaled));
        sum.add(w);
        const i32x16 places = row.template buckets_of<V>(scaled);
        uint32_t lanes = kAllLanes & ~lanes_equal<V>(places, kBuckets);
        if (!lanes) continue;
        float weights[kLanes];
        int32_t buckets_of_lanes[kLanes];
        store16<V>(weights, w);
        std::memcpy(buckets_of_lanes, &places, sizeof places);
        for (; lanes; lanes &= lanes - 1) {
            const int64_t lane = std::countr_zero(lanes);
            buckets[buckets_of_lanes[lane]] += Tally{double(weights[lane]), 1};
        }
    }
    return sum.total();
}

// The members of a bucket in the order of their ids; returns how many.
template <class V, typename T>
TR_INLINE int64_t collect(const Row<T>& row, int64_t bucket, Member* members) {
    int64_t count = 0;
    for (int64_t k = 0; k < row.width; k += kLanes) {
        const f32x16 scaled = row.template scaled<V>(k);
        uint32_t lanes = lanes_equal<V>(row.template buckets_of<V>(scaled), int32_t(bucket));
        if (!lanes) continue;
        float weights[kLanes];
        store16<V>(weights, exp16<V>(scaled));
        for (; lanes; lanes &= lanes - 1) {
            const int64_t lane = std::countr_zero(lanes);
            members[count++] = {key_of(to_float(row.x[k + lane])), weights[lane], k + lane};
        }
    }
    return count;
}

template <class V, typename T>
TR_INLINE Place first_place_beyond(const Row<T>& row, const Memory& memory, int part, double limit) {
    Tally before = {};
    const int64_t bucket = first_beyond(memory.buckets, kBuckets, part, limit, &before);
    return first_member_beyond(memory, collect<V>(row, bucket, memory.members), part, limit, before);
}

// The largest number below x > 0.
TR_INLINE double below(double x) { return std::nextafter(x, 0.0); }

// A row, and what its cut can reach. Of the largest values of segments the top_k first are top_k values of the row: the cut keeps
// none below them. Weights below (1 - top_p) / width are together less than what top_p leaves out.
template <class V, typename T>
TR_INLINE Row<T> row_of(const CutArgs& a, int64_t i, float* tops) {
    const T* x = static_cast<const T*>(a.draw.x) + i * a.draw.stride;
    const int64_t width = a.draw.width, count = num_segments(width), top_k = a.top_k[i];
    for (int64_t s = 0; s < count; ++s) tops[s] = top_of<V>(x + s * kSegment, std::min(kSegment, width - s * kSegment));
    const Scale scale{*std::max_element(tops, tops + count), a.draw.inverse_temperature[i]};
    const float least = float(std::log(a.min_p[i]));
    float reach = -87.3f;
    if (top_k > 0 && top_k <= count) {
        std::nth_element(tops, tops + top_k - 1, tops + count, std::greater<float>());
        reach = (tops[top_k - 1] - scale.top) * scale.inverse_temperature;
    } else if (a.top_p[i] < 1 && (top_k == 0 || top_k >= width)) {
        reach = float(std::log((1 - a.top_p[i]) / double(width)) - 0.001);
    }
    return {x, width, scale, least, std::max({least, reach, -87.3f})};
}

template <class V, typename T>
TR_INLINE int64_t index_of(const CutArgs& a, int64_t i, const Memory& memory) {
    const Row<T> row = row_of<V, T>(a, i, memory.tops);
    const double total = fill_buckets<V>(row, memory.buckets);
    if (!(total <= std::numeric_limits<double>::max())) return -1;
    Place end{{total, double(row.width)}, std::numeric_limits<uint32_t>::max(), row.width};
    if (a.top_k[i] > 0 && a.top_k[i] < row.width)
        end = first_place_beyond<V>(row, memory, kCount, double(a.top_k[i] - 1));
    if (a.top_p[i] < 1) {
        const Place last = first_place_beyond<V>(row, memory, kMass, below(a.top_p[i] * end.up_to[kMass]));
        if (last.comes_before(end)) end = last;
    }
    const double kept = end.up_to[kMass];
    const Place drawn = first_place_beyond<V>(row, memory, kMass, std::min(a.draw.uniform[i] * kept, below(kept)));
    return end.comes_before(drawn) ? end.id : drawn.id;
}

template <class V, typename T>
TR_INLINE void body(const CutArgs& a, int64_t begin, int64_t end) {
    const Memory memory = memory_for(a.draw.width);
    for (int64_t i = begin; i < end; ++i) a.draw.ids[i] = index_of<V, T>(a, i, memory);
}

TR_EACH_ISA(cut_bf16, body, (, bf16), (const CutArgs& a, int64_t begin, int64_t end), (a, begin, end))
TR_EACH_ISA(cut_float, body, (, float), (const CutArgs& a, int64_t begin, int64_t end), (a, begin, end))

}  // namespace

void draw_cut(const CutArgs& a, bool is_bf16) {
    at::parallel_for(0, a.draw.num_rows, 1, [&](int64_t begin, int64_t end) {
        is_bf16 ? cut_bf16(a, begin, end) : cut_float(a, begin, end);
    });
}

}  // namespace tr
