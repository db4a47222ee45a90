"""One progress bar per stage; plain log lines where the output is not a terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger(__name__)


class Advance(Protocol):
    """Says that one more unit is done and what comes next."""

    def __call__(self, what: str = "") -> None:
        """Advance by one; ``what`` names the finished unit."""
        ...


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A tqdm bar on a terminal, otherwise one log line at the start and about ten on the way."""
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    if quiet:
        log.info("%s: %d steps", title, total)
    every, done = max(1, total // 10), 0
    with tqdm(total=total, desc=title, disable=quiet, leave=False, dynamic_ncols=True) as bar:

        def advance(what: str = "") -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(what, refresh=False)
            bar.update()
            if quiet and (done % every == 0 or done == total):
                log.info("%s: %d/%d %s", title, done, total, what)

        yield advance
