"""One wording for options that are refused, wherever they are."""

from collections.abc import Callable


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
    """Refuse what is no count, as ``check_integer``, or too small a one.

    Args:
        name: of the option, for messages.
        value: to check.
        least: allowed.

    Raises:
        ValueError: ``value`` is no integer, or below ``least``.
    """
    if not _is_integer(value):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {least}, got {value}")


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


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False; raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
