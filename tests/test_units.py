"""Bytes and seconds as people write them."""

import pytest

from lowtide.errors import InvalidBudgetError
from lowtide.units import Budget, counted, format_bytes, format_seconds, parse_budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        ("1", 1),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("6GB", 6 * 10**9),
        (" 1.5MiB ", 3 * 2**19),
        (".5KB", 500),
        ("2TiB", 2**41),
        (Budget(bytes=7), 7),
    ],
)
def test_sizes(text, expected):
    assert parse_budget(text).bytes == expected
    assert parse_budget(text).resolve(100) == expected


@pytest.mark.parametrize(("text", "expected"), [("50%", 50), ("100%", 100), ("12.5 %", 12)])
def test_shares(text, expected):
    assert parse_budget(text).resolve(100) == expected


def test_auto_must_be_replaced_first():
    assert parse_budget("Auto").is_auto
    with pytest.raises(InvalidBudgetError, match="auto"):
        parse_budget("auto").resolve(100)


@pytest.mark.parametrize(
    "budget",
    [
        0,
        -1,
        "0",
        "0%",
        "101%",
        "-5MB",
        "6 apples",
        "",
        "%",
        "GiB",
        "1e9",
        "nan",
        "inf",
        1.5,
        None,
        True,
        b"6GiB",
        ["6"],
    ],
)
def test_nonsense_is_refused(budget):
    with pytest.raises(InvalidBudgetError):
        parse_budget(budget)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_format_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (2, "2.00 s"), (0.0125, "12.50 ms"), (3e-6, "3.00 us"), (5e-9, "5 ns")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 block runs"), (1, "1 block run"), (3, "3 block runs")])
def test_counted(number, text):
    assert counted(number, "block run") == text


@pytest.mark.parametrize("text", ["50%", "1.50 GiB", "auto"])
def test_budgets_print_as_written(text):
    assert str(parse_budget(text)) == text
