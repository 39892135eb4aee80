"""Maps of a pool: every byte is drawn once, in the shade of what it holds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import tagged_pools as pools
from tests.tagged_pools import FIVE, grow, pages, poisoned, take
from tests.test_alloc import SWA_FULL, kda_mla, swa_full
from ukv.layout import max_pages, static_layout
from ukv.memory_map import (
    MAP_ROWS,
    MAP_WIDTH,
    memory_map,
    plot_memory_map,
    sub_pool_uses,
)

ROOT = Path(__file__).parents[1]


def holed():
    # 15,872 bytes: slots of 768 from the left, pages of 512 from the right.
    state, _ = take(kda_mla(), state=4, latent=6)
    state = pools.free(state, pages("state", 2))
    return pools.free(state, pages("latent", 1, 2, 4))


def counts_of(text):
    """How often each sign stands in the map."""
    rows = [line.split("|")[1] for line in text.splitlines()[:MAP_ROWS]]
    assert {len(row) for row in rows} == {MAP_WIDTH}
    signs, counts = np.unique(list("".join(rows)), return_counts=True)
    return dict(zip(signs.tolist(), counts.tolist(), strict=True))


def test_uses_are_the_spans():
    state, latent = sub_pool_uses(holed())
    assert state.is_live.tolist() == [True, False, True, True]
    assert latent.is_live.tolist() == [True, True, False, True, False, False]
    assert (state.first_byte, latent.first_byte) == (0, 25 * 512)
    assert (state.live_bytes, state.hole_bytes) == (3 * 768, 768)
    assert (latent.live_bytes, latent.hole_bytes) == (3 * 512, 3 * 512)
    # The bytes beside the other's live pages.
    assert state.most_pages == (15_872 - 3 * 512) // 768
    assert latent.most_pages == (15_872 - 3 * 768) // 512
    assert latent.most_pages == max_pages(kda_mla().layout, "latent", {"state": 3})


def test_text_shows_each_slice_once():
    text = memory_map(holed())
    slices = MAP_WIDTH * MAP_ROWS
    found = counts_of(text)
    assert sum(found.values()) == slices
    # 288 slices of 55.1 bytes; a border may fall inside one.
    expected = {"A": 2_304, "a": 768, "B": 1_536, "b": 1_536, ".": 9_728}
    for sign, num_bytes in expected.items():
        assert found[sign] == pytest.approx(num_bytes / 15_872 * slices, abs=4)
    assert text.splitlines()[MAP_ROWS:] == [
        "A state    2.25 KiB live   0.75 KiB in holes (a)  3 of at most 18 pages",
        "B latent   1.50 KiB live   1.50 KiB in holes (b)  3 of at most 26 pages",
        ". free     9.50 KiB",
    ]


def test_text_of_an_empty_pool():
    text = memory_map(kda_mla())
    assert counts_of(text) == {".": MAP_WIDTH * MAP_ROWS}
    assert text.startswith(" 0.00 KiB |....")


def test_text_of_a_full_pool_has_no_dot():
    state, _ = take(swa_full(), full=14)
    assert set(counts_of(memory_map(state))) == {"A", "B"}


def test_text_of_a_static_pool():
    layout = static_layout(SWA_FULL, num_pages={"full": 7, "window": 8})
    state, _ = take(poisoned(layout), full=3)
    text = memory_map(state)
    # 8 pages of 256 with the null page, then 8 of 512; 3 of each are held.
    found = counts_of(text)
    slices = MAP_WIDTH * MAP_ROWS
    assert found["A"] == pytest.approx(slices / 3 * 3 / 8, abs=2)
    assert found["B"] == pytest.approx(slices * 2 / 3 * 3 / 8, abs=2)
    assert "set aside (a)" in text
    assert "3 of at most 7 pages" in text


def five():
    state, _ = grow(poisoned(FIVE), low=6, a=5, b=4, c=6, high=7)
    for name in FIVE.names:
        state = pools.free(state, pages(name, 2, 3))
    return state


@pytest.mark.parametrize(
    "make", [kda_mla, holed, swa_full, five], ids=["empty", "two", "swa", "five"]
)
def test_plot_is_saved_and_shows_every_sub_pool(make, tmp_path):
    state = make()
    path = tmp_path / "maps" / "map.png"
    figure = plot_memory_map(state, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    strip, occupancy = figure.axes
    labels = [label.get_text().split(":")[0] for label in strip.texts]
    assert labels == list(state.layout.names)
    assert [tick.get_text() for tick in occupancy.get_yticklabels()] == labels
    assert all("KiB live" in label.get_text() for label in strip.texts)
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == [
        *(f"{name}, {kind}" for name in labels for kind in ("live", "holes")),
        "free",
    ]
    # Live, hole and free shades are all distinct.
    shades = {patch.get_facecolor() for patch in legend.get_patches()}
    assert len(shades) == len(shown)


def test_pixels_are_the_pages():
    figure = plot_memory_map(holed())
    strip, occupancy = figure.axes
    (image,) = strip.images
    pixels = np.asarray(image.get_array())[0]
    (legend,) = figure.legends
    shade = {
        text.get_text(): patch.get_facecolor()[:3]
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    for byte, kind in [
        (100, "state, live"),
        (768 + 100, "state, holes"),
        (4 * 768 - 100, "state, live"),
        (8_000, "free"),
        (25 * 512 + 100, "latent, live"),
        (27 * 512 + 100, "latent, holes"),
        (15_800, "latent, holes"),
    ]:
        pixel = pixels[int(byte / 15_872 * len(pixels))]
        np.testing.assert_allclose(pixel, shade[kind], atol=1e-6)
    assert [label.get_text() for label in occupancy.texts] == [
        "3 of 18 slots of 0.75 KiB",
        "3 of 26 pages of 0.50 KiB",
    ]


def run_demo(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/pool_demo.py", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_demo_beats_two_fixed_halves(tmp_path):
    png, record = tmp_path / "map.png", tmp_path / "demo.json"
    done = run_demo("--pool-mib", "16", "--png", str(png), "--json", str(record))
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(record.read_text())
    assert png.read_bytes().startswith(b"\x89PNG")
    assert found["admitted"] > found["static_admitted"] > 0
    assert found["tokens"] > found["static_tokens"] > 0
    assert found["pages_moved"] > 0
    assert found["admitted_after_compaction"] > 0
    assert done.stdout.startswith("pool of 16,")


def test_demo_explains_itself():
    done = run_demo("--help")
    for option in ("--pool-mib", "--seed", "--png", "--json"):
        assert option in done.stdout
