r"""Prints a benchmark record as a table for a page of the documentation.

A line of ``--against`` counts for every shape that has the values it names.

    python scripts/benchmark_table.py docs/benchmarks/kernels_h200.json \
        --against docs/benchmarks/peers_h200.json \
        --against docs/benchmarks/targets_h200.json --op mla_decode
"""

import argparse
import json
import pathlib

from scripts.kernel_benches import roofline
from scripts.kernel_benches.comparison import as_markdown, read_lines, rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=pathlib.Path, help="what was measured")
    parser.add_argument(
        "--against",
        type=pathlib.Path,
        action="append",
        default=[],
        help="a record of other libraries or of targets",
    )
    parser.add_argument("--op", action="append", default=[], help="only this op")
    parser.add_argument(
        "--with-target", action="store_true", help="only shapes that have a target"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw the roofline here")
    arguments = parser.parse_args()
    try:
        mine = read_lines(arguments.record)
        others = [line for path in arguments.against for line in read_lines(path)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    mine = [line for line in mine if not arguments.op or line.op in arguments.op]
    header, *body = rows(mine, others)
    if arguments.with_target:
        body = [row for row in body if row[-1]]
    print(as_markdown([header, *body]))
    if arguments.plot is not None:
        record = json.loads(arguments.record.read_text())
        roofline.draw(mine, record["ceilings"], record["device"], arguments.plot)


if __name__ == "__main__":
    main()
