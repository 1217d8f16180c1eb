"""Checks of single option values, so that a wrong one is refused by name when the options are made, not mid-run."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import TypeVar

from specdiff.errors import InputError

T = TypeVar("T")


def real(name: str, value: object, holds: Callable[[float], bool], *, expected: str, remedy: str) -> float:
    """Return ``value`` as a float; refuse anything that is no number (booleans and NaN included) or fails ``holds``.

    Raises:
        InputError: naming the option.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError.of(name, expected=expected, got=value, remedy=remedy)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if math.isnan(number) or not holds(number):
        raise InputError.of(name, expected=expected, got=value, remedy=remedy)
    return number


def integer(name: str, value: object, low: int, *, remedy: str, expected: str | None = None) -> int:
    """Return ``value`` as an int; refuse booleans, floats and whatever is below ``low``.

    Raises:
        InputError: naming the option.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < low:
        raise InputError.of(name, expected=expected or f"an integer >= {low}", got=value, remedy=remedy)
    return int(value)


def flag(name: str, value: object, *, remedy: str) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        InputError: naming the option.
    """
    if not isinstance(value, bool):
        raise InputError.of(name, expected="True or False", got=value, remedy=remedy)
    return value


def one_of(name: str, value: object, choices: Mapping[str, T], *, remedy: str) -> T:
    """Return what a registry holds under ``value``.

    Raises:
        InputError: it holds nothing of that name; the message lists all names.
    """
    if not isinstance(value, str) or value not in choices:
        raise InputError.of(name, expected="one of " + ", ".join(choices), got=value, remedy=remedy)
    return choices[value]


def optional(name: str, value: object, kind: type, *, remedy: str) -> None:
    """Refuse anything but None and a ``kind``.

    Raises:
        InputError: naming the option.
    """
    if value is not None and not isinstance(value, kind):
        raise InputError.of(name, expected=f"a {kind.__name__} or None", got=value, remedy=remedy)


def callable_or_none(name: str, value: object, *, remedy: str) -> None:
    """Refuse anything but None and what can be called.

    Raises:
        InputError: naming the option.
    """
    if value is not None and not callable(value):
        raise InputError.of(name, expected="a function or None", got=value, remedy=remedy)


def sequence(name: str, value: object, *, expected: str, remedy: str) -> tuple[object, ...]:
    """Return the items of any iterable but a string, bytes or mapping, as a tuple.

    Raises:
        InputError: naming the option.
    """
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        return tuple(value)  # type: ignore[arg-type]
    except TypeError as error:  # also what has __iter__ but cannot, such as a tensor without dimensions
        raise InputError.of(name, expected=expected, got=value, remedy=remedy) from error


def token_ids(name: str, value: object, *, remedy: str) -> tuple[int, ...]:
    """Return a sequence of token ids (integers >= 0) as a tuple.

    Raises:
        InputError: naming the option.
    """
    items = sequence(name, value, expected="a sequence of token ids", remedy=remedy)
    return tuple(integer(name, item, 0, expected="token ids (integers >= 0)", remedy=remedy) for item in items)
