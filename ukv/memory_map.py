"""Pictures of a pool: where each sub-pool lies, which pages live, what is free.

They read the pool's tables from the device, so they are for people, not for a
serving loop.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ukv.layout import SubPoolLayout, max_pages
from ukv.pool import HI, LO, PoolState

MAP_WIDTH = 72
MAP_ROWS = 4
STRIP_SLICES = 2400

# Hues that stay apart for colour-blind readers; a hole is its sub-pool's hue, paler.
COLOURS = ("#2f6db3", "#dd8427", "#3a9a6b", "#b0487c", "#7763b5", "#8b7a2b")
FREE_COLOUR = "#ecece6"
TEXT_COLOUR = "#333333"
HOLE_STRENGTH = 0.35
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubPoolUse:
    """The span of one sub-pool as it is now.

    Attributes:
      sub: The sub-pool.
      is_live: bool, for each page of the span whether it is bound.
      first_byte: Where the span starts, counted over all buffers of the pool.
      most_pages: Pages it could have beside the live pages of the others.
    """

    sub: SubPoolLayout
    is_live: np.ndarray
    first_byte: int
    most_pages: int

    @property
    def live_pages(self) -> int:
        """Bound pages."""
        return int(np.count_nonzero(self.is_live))

    @property
    def live_bytes(self) -> int:
        """Bytes of the bound pages."""
        return self.live_pages * self.sub.page_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes of the span, holes included."""
        return len(self.is_live) * self.sub.page_bytes

    @property
    def hole_bytes(self) -> int:
        """Bytes of the pages in the span that are not bound."""
        return self.span_bytes - self.live_bytes

    def bytes_before(self, edges: np.ndarray, *, live: bool) -> np.ndarray:
        """Return the live, or the hole, bytes of the span before each edge."""
        counted = self.is_live if live else ~self.is_live
        ends = np.arange(len(counted) + 1) * self.sub.page_bytes + self.first_byte
        totals = np.concatenate([[0], np.cumsum(counted)]) * self.sub.page_bytes
        return np.interp(edges, ends, totals)


def sub_pool_uses(state: PoolState) -> list[SubPoolUse]:
    """Return the span of every sub-pool, in their order. Reads the device.

    A static pool's sub-pools are shown one after the other; all their pages are their
    span, for nobody else can have them.
    """
    layout = state.layout
    counters, tables = jax.device_get((state.counters, state.tables))
    found, own_base = [], 0
    for sub, table, counts in zip(layout.sub_pools, tables, counters, strict=True):
        if layout.is_unified:
            lo, hi = int(counts[LO]), int(counts[HI])
            first = sub.base_bytes + lo * sub.page_bytes
        else:
            lo, hi, first = 0, sub.num_pages, own_base
            own_base += sub.num_pages * sub.page_bytes
        is_bound = table.p2v > 0 if sub.is_translating else table.refcounts > 0
        found.append((sub, np.asarray(is_bound[lo:hi]), first))
    live = {sub.name: int(is_live.sum()) for sub, is_live, _ in found}
    return [
        SubPoolUse(
            sub=sub,
            is_live=is_live,
            first_byte=first,
            most_pages=max_pages(layout, sub.name, live),
        )
        for sub, is_live, first in found
    ]


def _slice_shares(
    uses: Sequence[SubPoolUse], pool_bytes: int, num_slices: int
) -> np.ndarray:
    """Return how each slice of the pool divides: live, hole of each use, then free.

    ``[2 * len(uses) + 1, num_slices]``; each column sums to 1.
    """
    edges = np.linspace(0, pool_bytes, num_slices + 1)
    rows = [
        np.diff(use.bytes_before(edges, live=live)) / np.diff(edges)
        for use in uses
        for live in (True, False)
    ]
    used = np.sum(rows, axis=0)
    return np.stack([*rows, np.clip(1 - used, 0, 1)])


def _size(num_bytes: int, pool_bytes: int) -> str:
    """Return a size in MiB, in KiB if the pool is smaller than 1 MiB."""
    if pool_bytes < MIB:
        return f"{num_bytes / 1024:,.2f} KiB"
    digits = 1 if pool_bytes >= 1024 * MIB else 2
    return f"{num_bytes / MIB:,.{digits}f} MiB"


def memory_map(state: PoolState) -> str:
    """Return a map of the pool as text, one character for an equal slice of bytes.

    A slice shows what fills most of it: the sub-pool's letter if live pages do, the
    small letter if holes do (in a static pool: pages set aside for the sub-pool), a
    dot if it is free. Reads the device.

    Args:
      state: The pool.
    """
    uses, total = sub_pool_uses(state), state.layout.pool_bytes
    shares = _slice_shares(uses, total, MAP_WIDTH * MAP_ROWS)
    letters = [chr(ord("A") + i) for i in range(len(uses))]
    signs = [sign for letter in letters for sign in (letter, letter.lower())]
    text = "".join([*signs, "."][kind] for kind in shares.argmax(axis=0))
    margin = len(_size(total, total))
    lines = [
        f"{_size(total * row // MAP_ROWS, total):>{margin}} |"
        f"{text[row * MAP_WIDTH : (row + 1) * MAP_WIDTH]}|"
        for row in range(MAP_ROWS)
    ]
    free = total - sum(use.span_bytes for use in uses)
    empty = "in holes" if state.layout.is_unified else "set aside"
    width = max(len("free"), *(len(use.sub.name) for use in uses))
    for letter, use in zip(letters, uses, strict=True):
        live, holes = _size(use.live_bytes, total), _size(use.hole_bytes, total)
        lines.append(
            f"{letter} {use.sub.name:<{width}}  {live:>{margin}} live"
            f"  {holes:>{margin}} {empty} ({letter.lower()})"
            f"  {use.live_pages:,} of at most {use.most_pages:,} pages"
        )
    lines.append(f". {'free':<{width}}  {_size(free, total):>{margin}}")
    return "\n".join(lines)


def _paler(colour: str) -> tuple[float, float, float]:
    red, green, blue = (1 - HOLE_STRENGTH * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def _draw_strip(axes: Axes, uses: Sequence[SubPoolUse], pool_bytes: int) -> None:
    """Draw the buffer and, below it, a bracket and a label for each span."""
    colours = [COLOURS[use.sub.index % len(COLOURS)] for use in uses]
    palette = [shade for c in colours for shade in (to_rgb(c), _paler(c))]
    shares = _slice_shares(uses, pool_bytes, STRIP_SLICES)
    pixels = shares.T @ np.asarray([*palette, to_rgb(FREE_COLOUR)])
    unit, name = (MIB, "MiB") if pool_bytes >= MIB else (1024, "KiB")
    total = pool_bytes / unit
    axes.imshow(
        np.clip(pixels, 0, 1)[None],
        extent=(0, total, 0, 1),
        aspect="auto",
        interpolation="antialiased",
    )
    for lane, (use, colour) in enumerate(zip(uses, colours, strict=True)):
        start = use.first_byte / unit
        end = start + use.span_bytes / unit
        height = -0.38 - 0.5 * lane
        axes.plot([start, end], [height, height], color=colour, linewidth=2.5)
        axes.plot([start, start], [height, 0], color=colour, linewidth=0.7)
        axes.plot([end, end], [height, 0], color=colour, linewidth=0.7)
        middle = (start + end) / 2
        side = "left" if middle < total / 3 else "center"
        side = "right" if middle > total * 2 / 3 else side
        at = {"left": start, "center": middle, "right": end}[side]
        label = f"{use.sub.name}: {_size(use.live_bytes, pool_bytes)} live"
        if use.hole_bytes:
            label += f", {_size(use.hole_bytes, pool_bytes)} in holes"
        axes.text(
            at,
            height - 0.06,
            label,
            ha=side,
            va="top",
            color=TEXT_COLOUR,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_xlim(0, total)
    axes.set_ylim(-0.38 - 0.5 * len(uses), 1)
    axes.set_yticks([])
    axes.xaxis.tick_top()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g} {name}")
    axes.tick_params(axis="x", colors=TEXT_COLOUR, labelsize=9)
    for side in ("left", "right", "bottom", "top"):
        axes.spines[side].set_visible(False)


def _draw_occupancy(axes: Axes, uses: Sequence[SubPoolUse]) -> None:
    """Draw, for each sub-pool, its pages as a share of the most it could have."""
    for lane, use in enumerate(uses):
        colour = COLOURS[use.sub.index % len(COLOURS)]
        most = max(use.most_pages, 1)
        live, holes = use.live_pages, len(use.is_live) - use.live_pages
        axes.barh(lane, 1, color=FREE_COLOUR, height=0.62)
        axes.barh(lane, live / most, color=colour, height=0.62)
        axes.barh(
            lane,
            min(holes / most, 1 - live / most),
            left=live / most,
            color=_paler(colour),
            height=0.62,
        )
        kind = "pages" if use.sub.spec.grows else "slots"
        axes.text(
            1.01,
            lane,
            f"{live:,} of {use.most_pages:,} {kind} of "
            f"{_size(use.sub.page_bytes, use.sub.page_bytes)}",
            va="center",
            color=TEXT_COLOUR,
            fontsize=9,
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(len(uses) - 0.5, -0.5)
    axes.set_yticks(range(len(uses)), [use.sub.name for use in uses])
    axes.set_xticks(np.linspace(0, 1, 5), ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title(
        "pages held, of the most each could hold beside the others' live pages",
        loc="left",
        fontsize=10,
        color=TEXT_COLOUR,
    )
    axes.tick_params(colors=TEXT_COLOUR, labelsize=9, length=0)
    for side in ("left", "right", "bottom", "top"):
        axes.spines[side].set_visible(False)


def plot_memory_map(state: PoolState, path: str | Path | None = None) -> Figure:
    """Draw the pool: its bytes as one bar, and how full each sub-pool is.

    Reads the device. Where pages are narrower than a pixel, their colours mix.

    Args:
      state: The pool.
      path: Where to save a PNG; its folder is created. None saves nothing.
    """
    uses, total = sub_pool_uses(state), state.layout.pool_bytes
    lanes = len(uses)
    heights = [1.15 + 0.36 * lanes, 0.55 + 0.3 * lanes]
    figure = Figure(figsize=(11, sum(heights) + 1.0), layout="constrained")
    strip, occupancy = figure.subplots(2, 1, height_ratios=heights)
    _draw_strip(strip, uses, total)
    _draw_occupancy(occupancy, uses)
    free = total - sum(use.span_bytes for use in uses)
    kind = "one buffer" if state.layout.is_unified else "a buffer for each part"
    title = f"Pool of {_size(total, total)} in {kind}"
    figure.suptitle(
        f"{title}: {_size(free, total)} free between the spans",
        x=0.01,
        ha="left",
        fontsize=12,
        color=TEXT_COLOUR,
    )
    colours = [COLOURS[use.sub.index % len(COLOURS)] for use in uses]
    handles = [
        Patch(color=shade, label=f"{use.sub.name}, {kind}")
        for use, colour in zip(uses, colours, strict=True)
        for shade, kind in ((colour, "live"), (_paler(colour), "holes"))
    ]
    handles.append(Patch(color=FREE_COLOUR, label="free"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=9,
        labelcolor=TEXT_COLOUR,
    )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
