"""Windowed models in small pools, and one request that grows there."""

from tests import tagged_pools as pools
from tests.tagged_pools import held, live, pages
from ukv.spec import AttentionSpec, SlidingWindowSpec


def tiny_window_specs(*, full_layers, window_layers, window_size, page_size):
    """Rows of 16 bytes: the layers and windows of big models in small pools."""
    shape = {"page_size": page_size, "num_kv_heads": 1, "head_dim": 8}
    return [
        AttentionSpec(name="full", num_layers=full_layers, **shape),
        SlidingWindowSpec(
            name="window",
            num_layers=window_layers,
            window_size=window_size,
            shares_ids="full",
            **shape,
        ),
    ]


def run_request(state, num_pages, *, chunk_pages, window_pages):
    """Grow one request chunk by chunk, sliding its window; return its peak as well."""
    ids, peak = [], 0
    while len(ids) < num_pages:
        behind = ids[: max(len(ids) - window_pages, 0)][-chunk_pages:]
        state = pools.free_window(
            state, "window", pages("full", *behind, length=chunk_pages)
        )
        count = min(chunk_pages, num_pages - len(ids))
        state, grant = pools.alloc(state, {"full": count}, max_pages=chunk_pages)
        assert bool(grant.granted), (len(ids), state.counters)
        ids += held(grant.pages["full"])
        peak = max(peak, live(state, "window"))
    return state, ids, peak
