"""Words that depend on a number."""


def counted(number: float, noun: str) -> str:
    """``3 requests``, ``1 request``, ``1,200 requests``."""
    return f"{number:,.0f} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """``noun``, with an s where there is not one of it."""
    return noun if number == 1 else f"{noun}s"
