// Python's view of the native operators: the instruction set in use, and the parts in bind_*.cpp. Every shape, dtype, stride
// and slot is checked there, before memory is touched.
#include <string>

#include "native/bindings.h"
#include "native/isa.h"

namespace {

const char* const kIsaNames[] = {"plain", "avx2", "avx512", "amx"};

std::string isa_name() { return kIsaNames[int(tr::isa())]; }

std::string limit_isa(const std::string& name) {
    for (int level = 0; level < 4; ++level)
        if (name == kIsaNames[level]) return kIsaNames[int(tr::limit_isa(tr::Isa(level)))];
    TORCH_CHECK_VALUE(false, "unknown instruction set '", name, "'; choose one of: plain, avx2, avx512, amx");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("isa", &isa_name);
    m.def("limit_isa", &limit_isa);
    tr::bind_rows(m);
    tr::bind_router(m);
    tr::bind_products(m);
    tr::bind_layers(m);
    tr::bind_attention(m);
}
