"""Words of reports that depend on a number."""


def counted(number: float, noun: str) -> str:
    """``3 requests``, ``1 request``, ``1,200 requests``; ``noun`` takes an s."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"
