#!/usr/bin/env bash
# Writes requirements/{eval,test,cuda12}.lock from pyproject.toml.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  printf 'usage: bash scripts/lock.sh\n'
  printf 'Writes requirements/{eval,test,cuda12}.lock from pyproject.toml:\n'
  printf 'exact versions for Python 3.12 and newer, on every platform.\n'
  exit 0
fi

here="${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}."
# shellcheck source=scripts/_environment.sh
source "$here/_environment.sh"
python="$(find_python)"
cd "$ukv_root"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check uv

# Versions that were run together on a GPU.
printf '%s\n' jax==0.11.2 jax-triton==0.3.1 triton==3.6.0 >"$work/pins.txt"

compile() {
  "$work/venv/bin/uv" pip compile pyproject.toml --quiet --universal \
    --python-version 3.12 --no-annotate --no-header "$@"
}

# One resolution of everything bounds the three files, so that they agree.
compile --extra cuda12 --extra eval --extra lm-eval --extra test --group weights \
  --constraint "$work/pins.txt" --output-file "$work/all.txt"

write_lock() {
  local name="$1" lock="$ukv_root/requirements/$1.lock"
  shift
  compile "$@" --constraint "$work/all.txt" --output-file "$work/$name.lock"
  printf '# Written by scripts/lock.sh from pyproject.toml. Do not edit.\n' >"$lock"
  cat "$work/$name.lock" >>"$lock"
}
write_lock eval --extra eval --group weights
write_lock test --extra eval --extra lm-eval --extra test --group weights
write_lock cuda12 --extra eval --extra cuda12
