// Python's view of the learned router's score.
#include <algorithm>
#include <optional>

#include "native/bindings.h"
#include "native/checks.h"
#include "router_mlp/native.h"

namespace tr {
namespace {

void check_index(int64_t value, int64_t size, const char* name) {
    TORCH_CHECK_INDEX(value >= 0 && value < size, name, " ", value, " is outside of 0 to ", size - 1);
}

void check_table(const Tensor& t, at::ScalarType dtype, at::IntArrayRef shape, const char* name) {
    check_dtype(t, dtype, name);
    check_shape(t, shape, name);
    check_contiguous(t, name);
}

// The rows of features, and of ids that have one of their own.
void take_bins(RouterArgs& a, const Tensor& edges, const Tensor& starts, const Tensor& lasts, const Tensor& id_rows,
               int64_t num_rows) {
    check_table(edges, at::kFloat, {a.num_features, edges.size(1)}, "edges");
    check_table(starts, at::kLong, {a.num_features}, "starts");
    check_table(lasts, at::kLong, {a.num_features}, "lasts");
    TORCH_CHECK_VALUE(id_rows.dim() == 1 && id_rows.numel(), "id_rows must be [known ids + 1], got shape ", id_rows.sizes());
    check_table(id_rows, at::kLong, {id_rows.numel()}, "id_rows");
    a.edges = edges.data_ptr<float>();
    a.num_edges = edges.size(1);
    a.starts = starts.data_ptr<int64_t>();
    a.lasts = lasts.data_ptr<int64_t>();
    for (int64_t f = 0; f < a.num_features; ++f) {
        check_index(a.lasts[f], num_rows, "bin");
        check_index(a.starts[f], num_rows - a.lasts[f], "first row");
    }
    a.id_rows = id_rows.data_ptr<int64_t>();
    a.num_ids = id_rows.numel();
}

void take_vocabulary(RouterArgs& a, int64_t vocab_row, int64_t previous_column, int64_t num_rows) {
    const int64_t size = num_rows - vocab_row;
    TORCH_CHECK_VALUE(vocab_row >= 0 && size >= 2 && size % 2 == 0, "vocab_row ", vocab_row,
                      " must leave as many rows for ids as for those before, and has ", num_rows, " rows");
    TORCH_CHECK_VALUE(previous_column >= 0 && previous_column < a.num_features, "previous_column ", previous_column,
                      " must be one of ", a.num_features, " features");
    a.vocab_row = vocab_row;
    a.vocab_size = size / 2 - 1;
    a.previous_column = previous_column;
}

void check_tokens(const RouterArgs& a, int64_t num_phases, int64_t num_rows) {
    for (int64_t t = 0; t < a.num_tokens; ++t) {
        const int64_t id = a.ids[t * a.id_stride];
        TORCH_CHECK_INDEX(id >= 0, "id ", id, " is negative");
        check_index(a.id_rows[std::min(id, a.num_ids - 1)], num_rows, "row");
        check_index(a.phases[t * a.phase_stride], num_phases, "phase");
    }
}

Tensor score_of(const Tensor& values, const Tensor& ids, const Tensor& phases, const Tensor& edges, const Tensor& starts,
                const Tensor& lasts, const Tensor& id_rows, const Tensor& table, const Tensor& head,
                std::optional<int64_t> vocab_row, int64_t previous_column) {
    check_dtype(values, at::kFloat, "values");
    TORCH_CHECK_VALUE(edges.dim() == 2, "edges must be [features, edges], got shape ", edges.sizes());
    TORCH_CHECK_VALUE(values.dim() == 2 && values.size(1) == edges.size(0), "values must have shape [tokens, ",
                      edges.size(0), "], got ", values.sizes());
    RouterArgs a{};
    a.values = values.data_ptr<float>();
    a.token_stride = values.stride(0);
    a.feature_stride = values.stride(1);
    a.num_tokens = values.size(0);
    a.num_features = values.size(1);
    check_dtype(ids, at::kLong, "ids");
    check_shape(ids, {a.num_tokens}, "ids");
    check_dtype(phases, at::kLong, "phases");
    check_shape(phases, {a.num_tokens}, "phases");
    a.ids = ids.data_ptr<int64_t>();
    a.id_stride = ids.stride(0);
    a.phases = phases.data_ptr<int64_t>();
    a.phase_stride = phases.stride(0);
    TORCH_CHECK_VALUE(head.dim() == 2 && head.size(0), "head must be [phases, hidden], got shape ", head.sizes());
    check_table(head, at::kFloat, head.sizes(), "head");
    a.hidden = head.size(1);
    TORCH_CHECK_VALUE(table.dim() == 2, "table must be [rows, columns], got shape ", table.sizes());
    a.num_columns = a.hidden + head.size(0);
    check_table(table, at::kFloat, {table.size(0), a.num_columns}, "table");
    a.table = table.data_ptr<float>();
    a.head = head.data_ptr<float>();
    a.previous_column = -1;
    take_bins(a, edges, starts, lasts, id_rows, table.size(0));
    if (vocab_row) take_vocabulary(a, *vocab_row, previous_column, table.size(0));
    check_tokens(a, head.size(0), table.size(0));
    Tensor scores = at::empty({a.num_tokens}, at::kFloat);
    a.scores = scores.data_ptr<float>();
    router_mlp(a);
    return scores;
}

}  // namespace

void bind_router(pybind11::module_& m) { m.def("router_mlp", &score_of); }

}  // namespace tr
