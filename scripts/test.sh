#!/usr/bin/env bash
# Makes .venv ready and runs pytest with the given arguments, else all tests.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  printf 'usage: bash scripts/test.sh [arguments of pytest]\n'
  printf 'Makes .venv ready and runs the tests: all of them on two processes,\n'
  printf 'or what the arguments select. Without an NVIDIA GPU, JAX runs on the\n'
  printf 'CPU and tests marked gpu are skipped.\n'
  exit 0
fi

here="${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}."
# shellcheck source=scripts/_environment.sh
source "$here/_environment.sh"
prepare_environment test

if (($# == 0)); then
  set -- -n 2 -q --dist worksteal
fi
# Paths in the arguments and in pyproject.toml are relative to the repository.
cd "$ukv_root"
exec "$ukv_python" -m pytest "$@"
