# shellcheck shell=bash
# Sourced by the other scripts. Defines
#
#   ukv_root, ukv_python     the repository, and the Python of its .venv
#   find_python              prints a Python >= 3.12, or explains and fails
#   prepare_environment KIND makes .venv hold requirements/KIND.lock and, with an
#                            NVIDIA GPU, cuda12.lock; KIND is eval or test
#
# Messages go to stderr. Until a Python is found only bash built-ins are used.
set -euo pipefail

ukv_root="${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}."
ukv_root="$(CDPATH='' cd -- "$ukv_root/.." && pwd -P)"
ukv_python="$ukv_root/.venv/bin/python"

say() { printf '%s\n' "$*" >&2; }

# Debian ships a python3 without ensurepip, from which no venv can be made.
can_make_venv() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
    </dev/null >/dev/null 2>&1
}

find_python() {
  local candidate uv
  local data="${XDG_DATA_HOME:-${HOME:-}/.local/share}"
  # A pyenv shim exists for versions that are not selected and then fails, so
  # each candidate is run. 3.12 comes first: the lock files were made for it.
  for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python3 \
    "$data"/uv/python/cpython-3.*/bin/python3; do
    if can_make_venv "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  for uv in uv "${HOME:-}/.local/bin/uv"; do
    if "$uv" --version >/dev/null 2>&1; then
      say "No Python >= 3.12 found; asking uv for one."
      "$uv" python install 3.12 >&2 || continue
      candidate="$("$uv" python find --system --no-project 3.12)" || continue
      if can_make_venv "$candidate"; then
        printf '%s\n' "$candidate"
        return
      fi
    fi
  done
  say "ukv needs Python 3.12 or newer with the venv module, and found none."
  say "Three ways out:"
  say "  1. the system's packages, e.g.  apt install python3.12 python3.12-venv"
  say "  2. pyenv:  pyenv install 3.12"
  say "  3. uv:     uv python install 3.12"
  say "Then run the same command again."
  return 1
}

venv_works() {
  "$ukv_python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' \
    >/dev/null 2>&1
}

create_venv() {
  local python
  python="$(find_python)" || return
  say "Creating .venv with $("$python" --version)."
  "$python" -m venv --clear "$ukv_root/.venv" || return
  # The pip that a Python brings can be too old to know today's wheel tags.
  "$ukv_python" -m pip install -qq --upgrade pip ||
    say "pip could not be upgraded; going on with the one at hand."
}

# What an up-to-date .venv was made from; the root is in it because the
# installed package points there.
describe_environment() {
  "$ukv_python" --version && cksum "$@" "$ukv_root/pyproject.toml"
}

# install_locks STAMP LOCK...
install_locks() {
  local stamp="$1" wanted lock
  shift
  venv_works || create_venv || return
  wanted="$(describe_environment "$@")" || return
  if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    return
  fi
  for lock in "$@"; do
    say "Installing ${lock#"$ukv_root/"} (minutes the first time)."
    # A lock names every package, so there is nothing to resolve.
    "$ukv_python" -m pip install -qq --no-deps --requirement "$lock" || return
  done
  "$ukv_python" -m pip install -qq --no-deps --editable "$ukv_root" || return
  printf '%s\n' "$wanted" >"$stamp"
}

prepare_environment() {
  local stamp="$ukv_root/.venv/ukv-$1.stamp"
  local locks=("$ukv_root/requirements/$1.lock")
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
  if nvidia-smi -L >/dev/null 2>&1; then
    locks+=("$ukv_root/requirements/cuda12.lock")
  else
    export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
  fi
  # Two scripts started at once must not install into one .venv together.
  (
    if command -v flock >/dev/null; then
      flock 9
    fi
    install_locks "$stamp" "${locks[@]}" 9<&-
  ) 9<"$ukv_root" || {
    say "The Python environment could not be made ready."
    exit 1
  }
}
