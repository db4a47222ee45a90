#!/usr/bin/env bash
# The kernel tests on native operators built with AddressSanitizer and UndefinedBehaviorSanitizer:
#   bash scripts/asan_kernels.sh [arguments for pytest]
# Fails when a test does or when the sanitizers report anything; each kind of finding is printed once, with its number.
# Needs g++ with its sanitizer libraries and the .venv that scripts/test.sh makes. The build is kept in build/asan.
# Leaks are not looked for: Python and torch keep memory until they end.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
work=$root/build/asan
reports=$work/reports
flags="-fsanitize=address,undefined -fno-sanitize=vptr -fsanitize-recover=address,undefined"

say() { printf '[asan] %s\n' "$*"; }
die() {
    say "error: $*" >&2
    exit 1
}

# The runtime libraries that an instrumented program is linked with; python is not, so they are preloaded.
runtimes() {
    # shellcheck disable=SC2086
    g++ -x c++ - $flags -o "$work/probe" <<<"int main() {}" &&
        ldd "$work/probe" | awk '/lib(a|ub)san/ { print $3 }' | sort | paste -sd:
}

# The kernels' builder takes its compiler from CXX, by name: a path may hold spaces. It builds in TORCH_EXTENSIONS_DIR.
write_compiler() {
    cat >"$work/asan-g++" <<END
#!/usr/bin/env bash
unset LD_PRELOAD
exec $(command -v g++) "\$@" -O1 -g1 -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS $flags
END
    chmod +x "$work/asan-g++"
}

# The address sanitizer writes to its log; the other one to stderr, which pytest must not capture.
findings() {
    find "$reports" -type f -exec cat {} + |
        sed -nE 's/^SUMMARY: (AddressSanitizer.*)/\1/p; /runtime error:/p' |
        sed -E 's/0x[0-9a-f]+/0x../g; s/^[.]+//' | sort | uniq -c | sort -rn
}

command -v g++ >/dev/null || die "no g++ in PATH: install one, on Debian \`apt install g++\`"
[[ -x $python ]] || die "no $python: bash scripts/test.sh makes it"
rm -rf -- "$reports"
mkdir -p -- "$reports"
preload=$(runtimes) || die "g++ cannot link with $flags: install its sanitizer libraries"
write_compiler

cd -- "$root"
export CXX=asan-g++ PATH=$work:$PATH TORCH_EXTENSIONS_DIR=$work HF_HUB_OFFLINE=1 WANDB_MODE=offline
export LD_PRELOAD=$preload
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=0:log_path="'$reports/asan'"
export UBSAN_OPTIONS=print_stacktrace=1
say "building, the first time for a minute"
library=$("$python" -c 'from tokenrouter.kernels import select; print(select("native")._module.__file__)')
LD_PRELOAD='' grep -q __asan_report -- "$library" || die "$library is not instrumented"
say "running tests/kernels"
code=0
"$python" -m pytest -q -s -p no:faulthandler tests/kernels "$@" 2>&1 | tee "$reports/pytest" || code=$?

export LD_PRELOAD=
found=$(findings)
if [[ -n $found ]]; then
    say "findings (times seen, what and where); whole reports in $reports:"
    printf '%s\n' "$found"
    exit 1
fi
say "the sanitizers found nothing; pytest ended with $code"
exit "$code"
