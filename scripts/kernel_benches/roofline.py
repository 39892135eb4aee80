"""Draws measured cases under the roofline of the card."""

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np

from scripts.kernel_benches.comparison import Line

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(
    lines: Sequence[Line],
    ceilings: Mapping[str, float],
    title: str,
    path: pathlib.Path,
) -> None:
    """Draw attained TFLOP/s over FLOP per byte, with both ceilings.

    Args:
      lines: Measured cases; those that move bytes only are left out.
      ceilings: ``read_gbps`` and ``matmul_tflops`` of the same run.
      title: Above the plot.
      path: Image to write; its ending chooses the format.
    """
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    points = [
        (line, 1e3 * line.tflops / line.gbps)
        for line in lines
        if line.tflops and line.gbps
    ]
    low = min([intensity for _, intensity in points], default=0.1) / 2
    high = max([intensity for _, intensity in points], default=1e3) * 2
    x = np.geomspace(low, max(high, 1e3), 200)
    roof = np.minimum(x * ceilings["read_gbps"] / 1e3, ceilings["matmul_tflops"])
    axes.plot(x, roof, color="black", linewidth=1, label="read and matmul ceilings")
    groups = sorted({(line.op, line.name) for line, _ in points})
    markers = dict(zip(sorted({name for _, name in groups}), "osD^v", strict=False))
    colors = dict(
        zip(sorted({op for op, _ in groups}), plt.cm.tab20.colors, strict=False)
    )
    for op, name in groups:
        mine = [
            (intensity, line.tflops)
            for line, intensity in points
            if (line.op, line.name) == (op, name)
        ]
        axes.scatter(
            *zip(*mine, strict=True),
            s=24,
            color=colors[op],
            marker=markers[name],
            label=f"{op}, {name}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte",
        ylabel="TFLOP/s",
        title=title,
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)
