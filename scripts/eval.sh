#!/usr/bin/env bash
# Makes .venv ready and runs scripts/pool_demo.py with the given arguments.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  printf 'usage: bash scripts/eval.sh [arguments of scripts/pool_demo.py]\n'
  printf 'Makes .venv ready (CUDA 12 packages only if there is an NVIDIA GPU),\n'
  printf 'prints a memory map of a pool and saves it as a PNG.\n'
  exit 0
fi

here="${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}."
# shellcheck source=scripts/_environment.sh
source "$here/_environment.sh"
prepare_environment eval

exec "$ukv_python" "$ukv_root/scripts/pool_demo.py" "$@"
