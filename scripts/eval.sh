#!/usr/bin/env bash
# Makes .venv ready and runs scripts/eval_gsm8k.py with the given arguments.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  printf 'usage: bash scripts/eval.sh [arguments of scripts/eval_gsm8k.py]\n'
  printf 'Makes .venv ready (CUDA 12 packages only if there is an NVIDIA GPU) and\n'
  printf 'evaluates a small Kimi-Linear on math word problems, on a unified pool and\n'
  printf 'on a static one of the same size: a table, one line of JSON, and a report\n'
  printf 'in out/eval_gsm8k.html. For the arguments, once .venv is there:\n'
  printf '  .venv/bin/python scripts/eval_gsm8k.py --help\n'
  exit 0
fi

here="${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}."
# shellcheck source=scripts/_environment.sh
source "$here/_environment.sh"
prepare_environment eval

exec "$ukv_python" "$ukv_root/scripts/eval_gsm8k.py" "$@"
