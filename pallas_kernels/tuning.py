"""Kernel configurations that were measured to be best on a card.

One file for each device kind in `pallas_kernels/tuned/`, written by
`scripts/tune_kernels.py` and by nothing else: nothing is tuned while a model runs.

    {"device": "NVIDIA H200", "entries": [
        {"op": "mla_decode", "implementation": "triton",
         "key": {"heads": 32, "head_dim": 576, "page_size": 64, "dtype": "bfloat16"},
         "batch": 64, "config": {...}, "evidence": {"us": ..., "default_us": ...}}]}
"""

import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

TUNED = pathlib.Path(__file__).parent / "tuned"

ASKED_FOR = frozenset(
    {("gqa_decode", "triton"), ("mla_decode", "mosaic_gpu"), ("mla_decode", "triton")}
)
"""Ops and implementations whose kernels call `tuned_config`; others have a default."""


def tuned_path(device_kind: str) -> pathlib.Path:
    """Return the file of a device kind, such as ``NVIDIA H200``."""
    return TUNED / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) + ".json")


@functools.cache
def _entries(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return json.loads(path.read_text())["entries"]


def tuned_config(
    op: str,
    implementation: str,
    *,
    key: Mapping[str, Any],
    batch: int,
    device_kind: str | None = None,
) -> dict[str, Any] | None:
    """Return the fields of the best configuration, or None where none was measured.

    Of the entries whose key is equal the one of the nearest batch, by ratio, counts.

    Args:
      op: Name of the op.
      implementation: Name of the implementation.
      key: Numbers that change the kernel itself, such as ``heads`` and ``page_size``.
      batch: Rows of the call, at least 1.
      device_kind: None for the default device's.
    """
    kind = jax.devices()[0].device_kind if device_kind is None else device_kind
    matches = [
        entry
        for entry in _entries(tuned_path(kind))
        if entry["op"] == op
        and entry["implementation"] == implementation
        and entry["key"] == dict(key)
    ]
    if not matches:
        return None

    def distance(entry: Mapping[str, Any]) -> float:
        return max(entry["batch"] / batch, batch / entry["batch"])

    return dict(min(matches, key=distance)["config"])
