"""The comparison as one page of HTML that needs nothing else."""

import html
import json
from collections.abc import Iterable

from scripts.evaluation.comparison import Comparison
from scripts.evaluation.plots import DRAWINGS
from scripts.evaluation.questions import Question
from scripts.evaluation.table import ROWS, verdict

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em;
       padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.wrong td { background: #fbeaea; } tr.differs td { background: #fff2c8; }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .8em; }
svg { max-width: 100%; height: auto; }
.verdict { font-size: 1.15em; font-weight: 600; }
"""


def _rows(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def _summary(comparison: Comparison) -> str:
    heads = "".join(f"<th>{result.kind}</th>" for result in comparison.results)
    rows = (
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(
            f'<td class="number">{html.escape(write(result))}</td>'
            for result in comparison.results
        )
        + "</tr>"
        for name, write in ROWS
    )
    return f"<table><tr><th></th>{heads}</tr>\n{_rows(rows)}\n</table>"


def _question_row(comparison: Comparison, question: Question) -> str:
    answers = [result.answers[question.index] for result in comparison.results]
    is_same = len({answer.text for answer in answers}) == 1
    kind = "differs" if not is_same else ""
    if not kind and not all(answer.is_correct for answer in answers):
        kind = "wrong"
    cells = []
    for answer in answers:
        title = html.escape(answer.error or answer.text.strip(), quote=True)
        found = html.escape(answer.found or answer.finish)
        cells.append(f'<td class="number" title="{title}">{found}</td>')
    return (
        f'<tr class="{kind}"><td class="number">{question.index}</td>'
        f"<td>{html.escape(question.text)}</td>"
        f'<td class="number">{html.escape(question.number)}</td>'
        f"{''.join(cells)}</tr>"
    )


def _questions(comparison: Comparison) -> str:
    heads = "".join(f"<th>{result.kind}</th>" for result in comparison.results)
    rows = (_question_row(comparison, question) for question in comparison.questions)
    return (
        "<p>Hover over an answer for its text. Wrong answers are red, answers on which "
        "the pools differ yellow.</p>"
        f"<table><tr><th></th><th>question</th><th>right</th>{heads}</tr>\n"
        f"{_rows(rows)}\n</table>"
    )


def render_page(comparison: Comparison) -> str:
    """Return the page as text."""
    drawings = "\n".join(
        f"<h2>{html.escape(heading)}</h2>\n{draw(comparison)}"
        for heading, draw in DRAWINGS
    )
    facts = json.dumps(
        {**comparison.settings, **comparison.facts}, indent=1, ensure_ascii=False
    )
    title = f"{comparison.settings['model']} on {comparison.settings['data']}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="verdict">{html.escape(verdict(comparison))}</p>
{_summary(comparison)}
{drawings}
<h2>Question by question</h2>
{_questions(comparison)}
<h2>Settings</h2>
<pre>{html.escape(facts)}</pre>
</body>
</html>
"""
