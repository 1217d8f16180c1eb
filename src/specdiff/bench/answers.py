"""The number a text ends with: the judge of GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")  # no minus of a subtraction


def final_number(text: str) -> Decimal | None:
    r"""The last number of a text; the one behind ``####`` or in ``\boxed{}`` where the text marks it so.

    Thousands commas are left out, currency and units around it do not count, and 18.00 equals 18.

    Returns:
        the number, None where there is none.
    """
    for marked in (re.findall(r"####\s*([^\n]*)", text), re.findall(r"\\boxed\{([^{}]*)\}", text)):
        found = _NUMBER.findall(marked[-1]) if marked else []
        if found:
            return _decimal(found[0])
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
