"""Builds the native kernels ahead of their first use; never fails, since the reference path runs everywhere."""

from tokenrouter.kernels.native.build import NativeUnavailable, load

try:
    print(f"native kernels: ready, instruction set {load().isa()}")
except NativeUnavailable as error:
    print(f"native kernels: not built, the slower reference path will run: {error}")
