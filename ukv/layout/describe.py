"""A table of a layout, for people."""

from ukv.layout.pool import PoolLayout


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.3f}"


def describe(layout: PoolLayout) -> str:
    """Return a table of the sub-pools: placement, pages, bytes.

    The column ``max pages`` says how many pages the sub-pool has if all others are
    empty; in a static pool, how many it has.
    """
    head = (
        "sub-pool",
        "placement",
        "layers",
        "page size",
        "page MiB",
        "bytes/token",
        "row bytes",
        "blocks/page",
        "max pages",
        "ids of",
    )
    rows: list[tuple[str, ...]] = [head]
    for sub in layout.sub_pools:
        per_token = sub.page_bytes / sub.page_size if sub.spec.grows else None
        rows.append(
            (
                sub.name,
                sub.placement.value,
                str(sub.spec.num_layers),
                str(sub.page_size) if sub.spec.grows else "slot",
                _mib(sub.page_bytes),
                f"{per_token:,.0f}" if per_token is not None else "-",
                f"{sub.row_bytes:,}",
                f"{sub.blocks_per_page:,}",
                f"{sub.num_pages:,}",
                layout.sub_pools[sub.owner].name,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    kind = "unified: one buffer" if layout.is_unified else "static: own buffers"
    title = (
        f"pool of {layout.pool_bytes:,} bytes ({_mib(layout.pool_bytes)} MiB), {kind}"
    )
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])
