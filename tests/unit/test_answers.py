"""The last number of a text."""

from __future__ import annotations

from decimal import Decimal

import pytest

from specdiff.bench.answers import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("so \\boxed{42} of 50", "42"),
        (" $18.00 every day.", "18"),
        ("70,000 dollars", "70000"),
        ("-5", "-5"),
        ("it is $-5.", "-5"),
        ("16-3", "3"),
        ("(2)-7", "7"),
        ("1, 2, and 3, in that order", "3"),
        ("12,34", "34"),
        ("3.5%", "3.5"),
        ("no number", None),
        ("#### none, but 4", "4"),
        ("", None),
    ],
)
def test_final_number(text, number):
    found = final_number(text)
    assert found == (None if number is None else Decimal(number))
