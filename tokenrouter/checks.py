"""One wording for options that are refused, wherever they are."""

from collections.abc import Callable

MOST = 2**53
"""The largest count: sums of many such fit 64 bits."""
LEAST_SIZE, MOST_SIZE = 1e-9, 1e9
"""Of a scale, rate or time: products and quotients of several keep their digits."""


def check_integer(name: str, value: object) -> None:
    """Refuse what is no integer.

    Args:
        name: of the option, for messages.
        value: a bool, a float (a whole one, NaN), a text or None is none.

    Raises:
        ValueError: ``value`` is no integer.
    """
    if not _is_integer(value):
        raise ValueError(f"{name} must be an integer, got {value!r}")


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no count, as ``check_integer``, or one out of range.

    Args:
        name: of the option, for messages.
        value: to check.
        least: allowed.

    Raises:
        ValueError: ``value`` is no integer, below ``least``, or over ``MOST``, which fits no tensor.
    """
    if not _is_integer(value):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > MOST:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most {MOST}, got {value}")


def check_number(
    name: str, value: object, is_allowed: Callable[[float], bool], allowed: str
) -> None:
    """Refuse what is no number in a range.

    Args:
        name: of the option, for messages.
        value: a bool, a text or None is no number; NaN is in no range.
        is_allowed: whether a number is in the range.
        allowed: the range in words, behind "a number".

    Raises:
        ValueError: ``value`` is no number, or out of the range.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not is_allowed(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}={value!r} must be a number {allowed}")


def check_size(name: str, value: object) -> None:
    """Refuse what is no positive number of a usable size: a scale, a rate, a time.

    Args:
        name: of the option, for messages.
        value: to check, as in ``check_number``.

    Raises:
        ValueError: ``value`` is no number of ``LEAST_SIZE`` to ``MOST_SIZE``.
    """
    check_number(
        name,
        value,
        lambda x: LEAST_SIZE <= x <= MOST_SIZE,
        f"above 0, of {LEAST_SIZE:g} to {MOST_SIZE:g}",
    )


def check_text(name: str, value: object) -> None:
    """Refuse what is no text; raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False; raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
