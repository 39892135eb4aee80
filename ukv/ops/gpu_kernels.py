"""From views of the pool to what the kernels take: arrays and plain numbers."""

import importlib
import math
import types

from pallas_kernels.paged_rows import PagedPart
from ukv.layout import PartView


def triton_kernels(module: str) -> types.ModuleType:
    """Return a module of ``pallas_kernels`` that imports Triton.

    Only ``implementation="triton"`` needs Triton, so it is imported then, after
    ``resolve`` has found that it is there.
    """
    return importlib.import_module(f"pallas_kernels.{module}")


def paged_part(view: PartView) -> PagedPart:
    """Return where one part of one layer lies: heads, or one row for all of them."""
    *heads, width = view.shape
    row_elements = view.row_bytes // view.dtype.itemsize
    return PagedPart(
        dtype=view.dtype,
        num_heads=math.prod(heads),
        width=width,
        page_size=view.page_size,
        block=view.block_offset,
        row_elements=row_elements,
        entry_elements=view.rows_per_entry * row_elements,
    )
