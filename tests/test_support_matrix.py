"""The support matrix in the documentation is what the code dispatches by."""

from scripts.make_support_matrix import PAGE, support_page
from ukv.implementation import SUPPORT


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == support_page(), (
        "run python scripts/make_support_matrix.py"
    )


def test_every_line_of_the_table_is_on_the_page():
    page = support_page()
    for op, lines in SUPPORT.items():
        section = page.split(f"## `{op}`\n")[1].split("\n## ")[0]
        assert section.count("\n| `") == len(lines)
