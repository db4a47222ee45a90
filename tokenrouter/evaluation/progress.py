"""One progress bar per stage; plain log lines where the output is not a terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger(__name__)


class Advance(Protocol):
    """Says that units are done, and of what."""

    def __call__(self, what: str = "", count: int = 1) -> None:
        """Advance by ``count`` units; ``what`` names where they were done."""
        ...


class Tick(Protocol):
    """Advances a bar whose label is given already."""

    def __call__(self, *, count: int) -> None:
        """Advance by ``count`` units."""
        ...


@contextmanager
def progress(title: str, total: int, *, unit: str = "steps") -> Iterator[Advance]:
    """A tqdm bar on a terminal, otherwise one log line at the start and about ten on the way.

    Args:
        title: of the stage.
        total: units until the end.
        unit: what a unit is, in the plural.
    """
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    if quiet:
        log.info("%s: %s %s", title, f"{total:,}", unit)
    done = tenths = 0
    with tqdm(
        total=total,
        desc=title,
        unit=f" {unit}",
        disable=quiet,
        leave=False,
        dynamic_ncols=True,
    ) as bar:

        def advance(what: str = "", count: int = 1) -> None:
            nonlocal done, tenths
            done += count
            bar.set_postfix_str(what, refresh=False)
            bar.update(count)
            if quiet and 10 * done // max(total, 1) > tenths:
                tenths = 10 * done // max(total, 1)
                log.info("%s: %s/%s %s", title, f"{done:,}", f"{total:,}", what)

        yield advance
