// Python's view of a layer's products that prepare their own rows: a linear, and all that follows attention.
#include <optional>

#include "native/bindings.h"
#include "native/operands.h"
#include "native/scratch.h"

namespace tr {
namespace {

void multiply(const Plain& x, const Norm& norm, bool int8_rows, const Weights& w, const Out& out) {
    const GemmJob job = job_of(prepare(x, norm, int8_rows, w), w, out);
    gemm(&job, 1);
}

void project(const Tensor& x, const std::optional<Tensor>& norm, double eps, const Weights& w, bool int8_rows,
             const Tensor& out, bool accumulate) {
    const Plain plain = checked_plain(x, w, int8_rows);
    const Out to = checked_out(out, plain.count, w, accumulate);
    multiply(plain, checked_norm(norm, eps, x), int8_rows, w, to);
}

// Adds the MLP of the normed rows to `sum`, which is where they lie.
void add_mlp(const Plain& x, const Norm& norm, const Weights& gate_up, const Weights& down, bool int8_rows,
             const Out& sum) {
    uint8_t* gated = scratch().get(Scratch::kGated, x.count * down.k * x.item());
    multiply(x, norm, int8_rows, gate_up, {gated, down.k, x.is_bf16, false});
    multiply({gated, down.k, x.count, x.is_bf16}, {}, int8_rows, down, sum);
}

// All token-wise operators between one layer's attention and the next one's. Python keeps the weights alive.
class LayerTail {
  public:
    LayerTail(const Weights& out, const Tensor& norm, double eps, const Weights& gate_up, const Weights& down,
              const std::optional<Tensor>& next_norm, double next_eps, const Weights* next, bool int8_rows)
        : out_(out), gate_up_(gate_up), down_(down), next_(next), norm_(norm), next_norm_(next_norm), eps_(eps),
          next_eps_(next_eps), int8_rows_(int8_rows) {
        TORCH_CHECK_VALUE(gate_up.gated && gate_up.int8 == down.int8 && gate_up.int4 == down.int4 && down.k == gate_up.n,
                          "down must take what gated weights of the same format give, ", gate_up.n,
                          " features, got ", down.k);
        TORCH_CHECK_VALUE(out.n == gate_up.k && (!next || next->k == gate_up.k),
                          "the layer's weights are of different hidden sizes");
    }

    // Everything is checked before anything is written.
    void run(const Tensor& heads, const Tensor& hidden, const std::optional<Tensor>& qkv) const {
        const Plain from = checked_plain(heads, out_, int8_rows_), x = checked_plain(hidden, gate_up_, int8_rows_);
        check_dtype(heads, hidden.scalar_type(), "heads");
        const Out sum = checked_out(hidden, from.count, out_, true);
        checked_out(hidden, from.count, down_, true);
        const Norm norm = checked_norm(norm_, eps_, hidden);
        TORCH_CHECK_VALUE(!qkv || next_, "there is no next layer to project for");
        Norm next_norm;
        Out to{};
        if (qkv) {
            check_dtype(*qkv, hidden.scalar_type(), "qkv");
            next_norm = checked_norm(next_norm_, next_eps_, hidden);
            to = checked_out(*qkv, from.count, *next_, false);
        }
        multiply(from, {}, int8_rows_, out_, sum);
        add_mlp(x, norm, gate_up_, down_, int8_rows_, sum);
        if (qkv) multiply(x, next_norm, int8_rows_, *next_, to);
    }

  private:
    const Weights &out_, &gate_up_, &down_, *next_;
    Tensor norm_;
    std::optional<Tensor> next_norm_;
    double eps_, next_eps_;
    bool int8_rows_;
};

}  // namespace

void bind_layers(pybind11::module_& m) {
    m.def("project", &project);
    using pybind11::keep_alive;
    pybind11::class_<LayerTail>(m, "LayerTail")
        .def(pybind11::init<const Weights&, const Tensor&, double, const Weights&, const Weights&,
                            const std::optional<Tensor>&, double, const Weights*, bool>(),
             keep_alive<1, 2>(), keep_alive<1, 5>(), keep_alive<1, 6>(), keep_alive<1, 9>())
        .def("__call__", &LayerTail::run);
}

}  // namespace tr
