"""Copies of whole pages inside the buffers: moves and copies on write."""

import importlib

import jax
from jaxtyping import Array, Int32

from pallas_kernels import page_copy
from ukv.errors import UnsupportedError
from ukv.ids import PhysicalPages, require_ids
from ukv.implementation import Implementation, OpCase, resolve
from ukv.layout import PoolLayout, SubPoolLayout


def _copy_in_rows(
    buffer: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    num_copies: jax.Array,
    base_rows: int,
    page_rows: int,
) -> jax.Array:
    def copy_one(i: jax.Array, rows: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(
            rows, base_rows + src[i] * page_rows, page_rows
        )
        return jax.lax.dynamic_update_slice_in_dim(
            rows, page, base_rows + dst[i] * page_rows, 0
        )

    return jax.lax.fori_loop(0, num_copies, copy_one, buffer)


def copy_pages(
    buffers: tuple[jax.Array, ...],
    layout: PoolLayout,
    sub: SubPoolLayout,
    src: PhysicalPages,
    dst: PhysicalPages,
    num_copies: Int32[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Copy the first ``num_copies`` pages of ``src`` over those of ``dst``.

    No page may be in both lists, and none twice in ``dst``. Nothing pool-sized is
    allocated.

    Args:
      buffers: The pool's buffers.
      layout: The pool's layout.
      sub: The sub-pool whose pages are copied.
      src: ``[max_copies]`` pages to read.
      dst: ``[max_copies]`` pages to overwrite.
      num_copies: How many of them count; 0 is allowed.
      implementation: None for the default device's best.

    Raises:
      IdSpaceError: ``src`` or ``dst`` are not physical pages of ``sub``.
      UnsupportedError: ``implementation`` cannot run on the default device.
    """
    case = OpCase(
        page_size=sub.page_size,
        storage_dtype="uint32",
        compute_dtype="uint32",
        widths=(sub.page_bytes // 4,),
    )
    chosen = resolve("copy_pages", implementation, case)
    src_ids = require_ids(src, PhysicalPages, owner=sub.name, argument="src").ids
    dst_ids = require_ids(dst, PhysicalPages, owner=sub.name, argument="dst").ids
    if layout.is_unified:
        row_bytes = 4 * layout.buffer_words[0]
        if chosen == "xla":
            copied = _copy_in_rows(
                buffers[0],
                src_ids,
                dst_ids,
                num_copies,
                sub.base_bytes // row_bytes,
                sub.page_bytes // row_bytes,
            )
        else:
            copied = _copy_with_kernel(
                buffers[0], src_ids, dst_ids, num_copies, sub, chosen
            )
        return (copied,)
    copied_buffers = list(buffers)
    for part in sub.spec.parts:
        for layer in range(sub.spec.num_layers):
            view = layout.part_view(sub.name, layer=layer, part=part.name)
            copied_buffers[view.buffer_index] = _copy_in_rows(
                copied_buffers[view.buffer_index],
                src_ids,
                dst_ids,
                num_copies,
                view.row_offset,
                view.page_size,
            )
    return tuple(copied_buffers)


def _copy_with_kernel(
    buffer: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    num_copies: jax.Array,
    sub: SubPoolLayout,
    implementation: Implementation,
) -> jax.Array:
    page_words, base_words = sub.page_bytes // 4, sub.base_bytes // 4
    if implementation == "mosaic_gpu":
        return page_copy.copy_pages(
            buffer, src, dst, num_copies, page_words=page_words, base_words=base_words
        )
    try:
        # Only this path needs Triton, which the CPU default does not install.
        kernels = importlib.import_module("pallas_kernels.page_copy_triton")
    except ImportError as error:
        raise UnsupportedError(
            "page copy: implementation 'triton' needs Triton, which is not "
            "installed; install ukv[cuda12], or choose 'mosaic_gpu' or 'xla'"
        ) from error
    return kernels.copy_pages(
        buffer, src, dst, num_copies, page_words=page_words, base_words=base_words
    )
