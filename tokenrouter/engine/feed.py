"""The requests of one call on their way into the engine, which takes them as its queue has room."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from tokenrouter.engine.admission import Prompt
from tokenrouter.outputs import RequestOutput
from tokenrouter.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")


def one_each(given: T | Sequence[T], count: int, name: str) -> list[T]:
    """``given`` for each of ``count`` prompts, or one after the other where it is a sequence.

    Raises:
        ValueError: another number of them than of prompts; ``name`` says what they are.
    """
    if not isinstance(given, Sequence):
        return [given] * count
    each = list(cast(Sequence[T], given))
    if len(each) != count:
        raise ValueError(f"{count} prompts but {len(each)} {name}: give one, or one per prompt")
    return each


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A request that the engine has not been given yet; ``add`` gives it, or raises ValueError."""

    request_id: str
    prompt: Prompt
    add: Callable[[], None]


class Feed:
    """Offers in their order.

    Args:
        offers: of one call.
        may_refuse: a refused request gets an output with its error, unless all are refused; else the error is raised.
    """

    def __init__(self, offers: Sequence[Offer], *, may_refuse: bool) -> None:
        self.request_ids = tuple(offer.request_id for offer in offers)
        self._offers = deque(offers)
        self._may_refuse = may_refuse
        self._was_taken = False
        self._first_error: ValueError | None = None

    def __len__(self) -> int:
        """Requests not offered yet."""
        return len(self._offers)

    def fill(self, scheduler: Scheduler) -> list[RequestOutput]:
        """Adds requests until ``scheduler``'s queue is full or none is left.

        Returns:
            Outputs of requests that were refused now.

        Raises:
            ValueError: the first refusal, when all are refused or none may be.
        """
        refused = []
        while self._offers and not scheduler.is_full:
            offer = self._offers.popleft()
            try:
                offer.add()
                self._was_taken = True
            except ValueError as error:
                if not self._may_refuse:
                    raise
                if len(self.request_ids) > 1:  # that of a lone one is raised below
                    log.warning("request %s refused: %s", offer.request_id, error)
                self._first_error = self._first_error or error
                refused.append(_refusal(offer, str(error)))
        if self._first_error and not self._was_taken and not self._offers:
            raise self._first_error
        return refused


def _refusal(offer: Offer, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=offer.request_id,
        prompt=offer.prompt if isinstance(offer.prompt, str) else None,
        prompt_token_ids=(),
        outputs=(),
        finished=True,
        error=error,
    )
