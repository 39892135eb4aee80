#!/usr/bin/env bash
# One case of every kernel under compute-sanitizer, on a card.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  printf 'usage: bash scripts/sanitize_kernels.sh [--op OP ...]\n'
  printf 'Runs one random case of every kernel, each checked against its oracle,\n'
  printf 'under the memcheck tool of compute-sanitizer, which comes with CUDA.\n'
  printf 'PYTHON names the interpreter to use, .venv/bin/python if it is not set.\n'
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)

# An allocation for each array: in one large one, most stray accesses hit another array.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform
# What JAX asks the driver for on purpose and does not get is no error of a kernel.
exec "$sanitizer" --tool memcheck --report-api-errors no \
  --target-processes all --error-exitcode 9 "${PYTHON:-.venv/bin/python}" \
  -m tests.random_kernels --structures 1 --cases-of-each 1 "$@"
