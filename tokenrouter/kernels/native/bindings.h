// The parts of Python's view of the native operators, one file each.
#pragma once

#include <torch/extension.h>

namespace tr {

void bind_rows(pybind11::module_& m);
void bind_router(pybind11::module_& m);
void bind_products(pybind11::module_& m);
void bind_layers(pybind11::module_& m);
void bind_attention(pybind11::module_& m);

}  // namespace tr
