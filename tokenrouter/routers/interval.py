"""Decides every few tokens of a request: the tokens between repeat the last decision.

Shape letters: T tokens in a step.
"""

from collections.abc import Sequence

from tokenrouter.routers.base import Router
from tokenrouter.routers.wrapper import WrapperRouter, select
from tokenrouter.types import RouteInput

MOST = 8


class IntervalRouter(WrapperRouter):
    """Asks the inner router about every ``every``-th token of a request, by position.

    A token whose position is a multiple of ``every`` decides; the ones up to the next multiple repeat
    its recorded route, be they in the same chunk or not, so that chunks and batch mates change nothing.
    The engine does that by ``decides_every``: features and router then see the deciding tokens alone,
    and a step without one does not ask at all. Where the last multiple lies in a phase that the inner
    router does not decide, a token decides for itself.

    ``route`` answers whatever it is asked about.

    Args:
        inner: the router that decides; None: ``RuleRouter()``.
        every: 1 (each token) to 8.

    Raises:
        ValueError: ``every`` is out of range; as ``WrapperRouter``.
    """

    name = "interval"

    def __init__(self, inner: Router | None = None, every: int = 4) -> None:
        if not 1 <= every <= MOST:
            raise ValueError(f"every={every} is outside 1 (each token decides) to {MOST}")
        super().__init__(inner)
        self.decides_every = every
        self.look_ahead = self.inner.look_ahead

    @property
    def own_options(self) -> dict[str, object]:
        """The interval."""
        return {"every": self.decides_every}

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """On the tokens that will decide: each stands for as many tokens, so a budget holds for all."""
        self.inner.calibrate([self._deciding(part) for part in inputs])

    def prepare(self, inputs: RouteInput) -> None:
        """The inner router hears of the tokens that will decide."""
        self.inner.prepare(self._deciding(inputs))

    def _deciding(self, inputs: RouteInput) -> RouteInput:
        return select(inputs, (inputs.positions_T % self.decides_every == 0).nonzero().flatten())
