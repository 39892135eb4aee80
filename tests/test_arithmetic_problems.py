"""Word problems: their answers follow from the text, and no draw sees another's."""

import random
import re

import pytest

from scripts.arithmetic_problems.problem_set import (
    MAX_PROBLEMS,
    generate,
    price_block,
    problem_set,
    training_text,
    worked_block,
)
from scripts.arithmetic_problems.problems import (
    ITEMS,
    KINDS,
    MAX_NUMBER,
    draw_prices,
    draw_problem,
)
from scripts.arithmetic_problems.tokenizer import END, build_tokenizer

STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def prices_in(block):
    return {
        item: int(price) for item, price in re.findall(r"(\w+) (\d)(?:,|\.\n)", block)
    }


def answer_by_reading(question, prices):
    """Solve a question from its text alone, by other means than the generator's."""
    bought = [
        (int(count), item)
        for count, item in re.findall(r"(\d+) (\w+)", question)
        if item in ITEMS
    ]
    costs = [count * prices[item] for count, item in bought]
    money = [
        int(n) for n in re.findall(r"(\d+) (?:dollars|more\. (?:She|He))", question)
    ]
    again = re.search(r"(\d+) more(?: on|\. How)", question)
    if "sells" in question or "gets the money" in question:
        return costs[0] - costs[1]
    if money:
        return sum(money) - sum(costs)
    if again:
        ((count, item),) = bought
        return (count + int(again[1])) * prices[item]
    return sum(costs)


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_follow_from_the_question_and_the_price_list(split):
    rng = random.Random(split)
    for _ in range(2000):
        prices = draw_prices(rng)
        assert prices_in(price_block(prices)) == prices
        problem = draw_problem(rng, prices, split)
        assert problem.number == answer_by_reading(problem.question, prices)
        assert problem.answer.endswith(f"\n#### {problem.number}")
        steps = STEP.findall(problem.answer)
        assert len(steps) == len(problem.arithmetic) >= 2
        for left, sign, right, result in steps:
            assert OPERATIONS[sign](int(left), int(right)) == int(result)
            assert 0 <= int(result) <= MAX_NUMBER
        assert int(steps[-1][3]) == problem.number


def test_splits_share_no_problem():
    rng = random.Random(1)
    drawn = {
        split: {draw_problem(rng, draw_prices(rng), split) for _ in range(4000)}
        for split in ("train", "test")
    }
    texts, arithmetic = (
        {
            split: {part(problem) for problem in problems}
            for split, problems in drawn.items()
        }
        for part in (lambda p: p.question, lambda p: p.arithmetic)
    )
    # What is computed is disjoint; the same counts at other prices may be in both.
    assert arithmetic["train"].isdisjoint(arithmetic["test"])
    assert len(arithmetic["test"]) > 1000
    assert len(texts["test"]) > 3000


def test_training_text_has_no_test_problem():
    rng = random.Random(2)
    test = {
        problem.arithmetic
        for seed in range(20)
        for problem in problem_set(seed, 200).problems
    }
    for _ in range(2000):
        text = training_text(rng)
        for answer in re.findall(r"Answer: (.*)\n####", text):
            found = []
            for left, sign, right, _ in STEP.findall(answer):
                operands = [int(left), int(right)]
                operands = operands if sign == "-" else sorted(operands)
                found.append(f"{operands[0]}{sign}{operands[1]}")
            assert found
            assert tuple(sorted(found)) not in test


def test_every_kind_is_drawn_and_splits_keep_the_mix():
    rng = random.Random(3)
    for split in ("train", "test"):
        counts = {}
        for _ in range(3000):
            problem = draw_problem(rng, draw_prices(rng), split)
            signs = "".join(sorted(s[1] for s in STEP.findall(problem.answer)))
            counts[signs] = counts.get(signs, 0) + 1
        assert len(counts) == len(KINDS)
        assert min(counts.values()) > 300


def test_a_set_shares_its_prefix_and_repeats():
    first, again = problem_set(5, 50), problem_set(5, 50)
    assert first == again
    assert first != problem_set(6, 50)
    assert len({problem.question for problem in first.problems}) == 50
    assert all(problem.split == "test" for problem in first.problems)
    for problem in first.problems:
        assert first.prompt(problem).startswith(first.prefix)
        assert first.prompt(problem).endswith("\nAnswer:")
    assert problem_set(5, 20).problems == first.problems[:20]
    assert generate(5, 50) == [
        {"question": p.question, "answer": p.answer} for p in first.problems
    ]


@pytest.mark.parametrize("shots", [0, 1, 2, 3, 5])
def test_fewer_shots_are_the_last_ones(shots):
    many, few = problem_set(7, 3, shots=6), problem_set(7, 3, shots=shots)
    assert few.problems == many.problems
    assert few.prefix.count("Question:") == shots
    if shots % 2 == 0:
        assert many.prefix.endswith(few.prefix)
    blocks = few.prefix.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2].startswith("Prices in dollars:")


def test_stale_prices_would_show():
    """Earlier lists have most items of the last one, mostly at another price."""
    num_same = num_other = 0
    for seed in range(100):
        blocks = problem_set(seed, 0, shots=4).prefix.split("\n\n")
        lists = [prices_in(block + "\n\n") for block in blocks if "Prices" in block]
        for item, price in lists[-1].items():
            older = [prices[item] for prices in lists[:-1] if item in prices]
            if older:
                num_same += older[-1] == price
                num_other += older[-1] != price
    assert num_other > 5 * num_same
    assert num_other > 100 * 12 / 2


def test_counts_out_of_range_are_refused():
    with pytest.raises(ValueError, match="count="):
        problem_set(0, MAX_PROBLEMS + 1)
    with pytest.raises(ValueError, match="shots="):
        problem_set(0, 1, shots=-1)


def test_tokenizer_is_lossless_and_knows_the_words():
    tokenizer = build_tokenizer()
    drawn = problem_set(0, 20)
    for problem in drawn.problems:
        text = drawn.prefix + worked_block(problem)
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens.ids) == text
        # Digits alone, words whole, and one token for what ends a block.
        numbers = [t.strip("Ġ") for t in tokens.tokens if re.search(r"\d", t)]
        assert all(len(number) == 1 for number in numbers)
        assert tokens.ids[-1] == tokenizer.token_to_id(END)
        assert sum(t == END for t in tokens.tokens) == text.count("\n\n")
    for item in ITEMS:
        assert len(tokenizer.encode(f" {item}").ids) == 1
    odd = "Grüße \N{SNOWMAN}\t  1\n\n\n2"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_the_prompt_is_the_start_of_the_worked_text():
    tokenizer = build_tokenizer()
    drawn = problem_set(0, 20)
    for problem in drawn.problems:
        prompt = tokenizer.encode(drawn.prompt(problem)).ids
        whole = tokenizer.encode(drawn.prefix + worked_block(problem)).ids
        assert whole[: len(prompt)] == prompt
