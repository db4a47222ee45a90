"""Compiles every kernel for sm_80 and sm_90, without a card, and says what it takes; exits with 1 if one is too big."""

import sys

from tokenrouter.kernels.triton.builds import SHARED_BYTES, all_builds, compile_for


def main() -> int:
    """Returns the exit code."""
    num_bad = 0
    for build in all_builds():
        for capability in SHARED_BYTES:
            report = compile_for(build, capability)
            num_bad += not report.fits
            print(
                f"sm_{capability} {'fits' if report.fits else 'DOES NOT FIT'}: {report.name}: "
                f"{report.shared_bytes:,} bytes shared, {report.registers} registers, {report.stack_bytes} bytes of "
                "stack",
                flush=True,
            )
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
