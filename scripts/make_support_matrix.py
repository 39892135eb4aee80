"""Writes docs/support.md: which implementation of an op covers which case.

It is the table that `ukv.implementation.resolve` dispatches by, so what the page says
is what the code refuses.

    python scripts/make_support_matrix.py            # write the page
    python scripts/make_support_matrix.py --check    # exit 1 if it is out of date
"""

import argparse
import pathlib
import sys

from ukv.implementation import SUPPORT, Support

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "support.md"

HEAD = """\
# Which implementation runs what

Written by `python scripts/make_support_matrix.py` from `SUPPORT` in
`ukv/implementation.py`, the table that ops dispatch by. The lines of an op are in
order of preference: the first that covers a call runs it, but for one that says "on
request", which was not run on a card yet. `implementation=` of the op,
or of a model, asks for a certain one; a combination that its line does not
cover raises `UnsupportedError`, which names what works.

A cell that says "any" sets no limit. Widths are elements per head: of a key and of a
value; of a latent row and its latent part for MLA; of each part for a write.
"""

COLUMNS = (
    "implementation",
    "device",
    "page size",
    "dtype in the pool",
    "dtype of queries or values",
    "widths",
)


def _device(line: Support) -> str:
    names = "any" if line.platforms is None else ", ".join(line.platforms)
    if line.min_capability is None:
        return names
    first, last = line.min_capability / 10, line.max_capability
    if last is None:
        return f"{names}, compute capability {first} or newer"
    span = f"{first}" if 10 * first == last else f"{first} to {last / 10}"
    return f"{names}, compute capability {span}"


def _values(values: tuple | None) -> str:
    return "any" if values is None else ", ".join(map(str, values))


def _widths(line: Support) -> str:
    if line.max_width is None:
        return _values(line.widths)
    return f"up to {line.max_width}"


def support_page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for op, lines in SUPPORT.items():
        parts.append(f"\n## `{op}`\n")
        parts.append("| " + " | ".join(COLUMNS) + " |")
        parts.append("|---" * len(COLUMNS) + "|")
        for line in lines:
            cells = (
                f"`{line.implementation}`"
                + " on request" * (not line.by_default)
                + " without a window" * (not line.windows),
                _device(line),
                _values(line.page_sizes),
                _values(line.storage_dtypes),
                _values(line.compute_dtypes),
                _widths(line),
            )
            parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write or check the page, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=pathlib.Path, default=PAGE, help="page to write")
    arguments = parser.parse_args()
    page = support_page()
    if arguments.check:
        if not arguments.out.is_file() or arguments.out.read_text() != page:
            print(
                f"{arguments.out} is out of date; run scripts/make_support_matrix.py",
                file=sys.stderr,
            )
            return 1
        return 0
    arguments.out.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
