"""Words that depend on a number, and text as it can be written."""


def counted(number: float, noun: str) -> str:
    """``3 requests``, ``1 request``, ``1,200 requests``."""
    return f"{number:,.0f} {plural(number, noun)}"


def writable(text: str) -> str:
    """``text`` with ``?`` for what UTF-8 cannot hold: halves of a pair, as in names of files and in damaged JSON."""
    return text.encode("utf-8", "replace").decode()


def plural(number: float, noun: str) -> str:
    """``noun``, with an s where there is not one of it."""
    return noun if number == 1 else f"{noun}s"
