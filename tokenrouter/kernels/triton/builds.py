"""Kernels compiled for a card without one: what a chip's limits are, and what each kernel takes of them.

``python -m tokenrouter.kernels.triton`` compiles every kernel in every configuration for sm_80 and sm_90, and says what
it takes: shared memory, registers, and bytes that did not fit into registers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

OPERATORS = ("int8_matmul", "quantize_rows")
"""Folders of ``kernels`` that have a ``triton.py``."""

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that a block may have, by compute capability (CUDA C++ programming guide, technical specifications)."""

MAX_REGISTERS = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One kernel in one configuration.

    Attributes:
        name: operator and what tells this build from its others.
        kernel: as decorated.
        signature: Triton's type of each argument that is not a constant.
        constants: the others.
        aligned: numbers that are multiples of 16, as all pointers are: strides and sizes of real models.
        config: warps, stages and block sizes; the last ones belong to the constants.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: Sequence[str] = ()
    config: triton.Config = field(default_factory=lambda: triton.Config({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a build takes of a chip: bytes of shared memory, registers of a thread, bytes of each thread's stack."""

    name: str
    capability: int
    shared_bytes: int
    registers: int
    stack_bytes: int

    @property
    def fits(self) -> bool:
        """Within the chip's limits, and nothing of a thread's lies outside of its registers."""
        return (
            self.shared_bytes <= SHARED_BYTES[self.capability]
            and self.registers <= MAX_REGISTERS
            and self.stack_bytes == 0
        )


def all_builds() -> Iterator[Build]:
    """Of every operator that is listed."""
    for operator in OPERATORS:
        yield from import_module(f"tokenrouter.kernels.{operator}.triton").builds()


def in_configs(build: Build) -> Iterator[Build]:
    """The build of an autotuned kernel in each of its configurations."""
    for config in build.kernel.early_config_prune(build.kernel.configs, {}, **build.constants):
        sizes = "x".join(str(value) for value in config.kwargs.values())
        name = f"{build.name} {sizes} warps={config.num_warps} stages={config.num_stages}"
        constants = {**build.constants, **config.kwargs}
        yield replace(build, name=name, constants=constants, config=config)


def compile_for(build: Build, capability: int) -> Report:
    """Compiles it; raises what Triton raises."""
    is_tuned = isinstance(build.kernel, triton.runtime.Autotuner)
    function = build.kernel.fn if is_tuned else build.kernel
    constants = {
        (function.arg_names.index(name),): value for name, value in build.constants.items()
    }
    signature = {name: build.signature.get(name, "constexpr") for name in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name in build.aligned
    }
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": build.config.num_warps, "num_stages": build.config.num_stages},
    )
    usage = _usage(compiled.asm["cubin"])
    return Report(
        name=build.name,
        capability=capability,
        shared_bytes=compiled.metadata.shared,
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """What the assembler says of its only function, by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    function = said[said.index("Function ") :]
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", function)}
