// The requests of a forward, as Python gives them, and copies of their indices.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "native/bindings.h"
#include "native/checks.h"

namespace tr {

constexpr int64_t kMaxPosition = int64_t(1) << 60;  // sums of positions and counts stay below 2^63

// The requests of a forward, as Python gives them.
struct Batch {
    const Tensor &query_rows, &num_queries, &query_start, &row, &num_keys, &slots;
    const std::optional<Tensor>&positions, &num_observed;

    int64_t size() const { return num_queries.numel(); }

    int64_t keys(int64_t i) const { return num_keys.data_ptr<int64_t>()[i]; }

    const int64_t* row_of(const Tensor& table, int64_t i) const {
        return table.data_ptr<int64_t>() + row.data_ptr<int64_t>()[i] * table.size(1);
    }

    void check() const {
        for (const auto& [t, name] : {std::pair{&query_rows, "query_rows"}, std::pair{&num_queries, "num_queries"},
                                      std::pair{&query_start, "query_start"}, std::pair{&row, "row"},
                                      std::pair{&num_keys, "num_keys"}, std::pair{&slots, "slots"}}) {
            check_dtype(*t, at::kLong, name);
            check_contiguous(*t, name);
            if (t != &query_rows && t != &slots) check_shape(*t, {size()}, name);
        }
        if (num_observed) {
            check_dtype(*num_observed, at::kLong, "num_observed");
            check_contiguous(*num_observed, "num_observed");
            check_shape(*num_observed, {size()}, "num_observed");
        }
        TORCH_CHECK_VALUE(slots.dim() == 2, "slots must be [rows, entries], got ", slots.sizes());
        if (positions) {
            check_dtype(*positions, at::kLong, "positions");
            check_shape(*positions, slots.sizes(), "positions");
            check_contiguous(*positions, "positions");
        }
        for (int64_t i = 0; i < size(); ++i) {
            const int64_t r = row.data_ptr<int64_t>()[i];
            TORCH_CHECK_INDEX(r >= 0 && r < slots.size(0), "row ", r, " is outside the slot table");
            TORCH_CHECK_INDEX(keys(i) >= 0 && keys(i) <= slots.size(1), keys(i),
                              " keys are more than the slot table holds");
        }
    }
};

// Indices that a plan has copied: what becomes of the caller's tensors has no effect on its runs. The memory goes from one
// plan of a thread to the next.
class Indices {
  public:
    explicit Indices(int64_t size) : held_(std::move(spare())) {
        if (int64_t(held_.size()) < size) held_.resize(size_t(size));
    }

    ~Indices() {
        if (held_.size() > spare().size()) spare() = std::move(held_);
    }

    Indices(const Indices&) = delete;
    Indices& operator=(const Indices&) = delete;

    const int64_t* copy(const int64_t* from, int64_t count) {
        int64_t* to = held_.data() + used_;
        std::copy_n(from, count, to);
        used_ += count;
        return to;
    }

  private:
    std::vector<int64_t> held_;
    int64_t used_ = 0;

    static std::vector<int64_t>& spare() {
        static thread_local std::vector<int64_t> of_thread;
        return of_thread;
    }
};

}  // namespace tr
