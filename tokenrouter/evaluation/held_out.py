"""A budget where quality is measured: thresholds on held-out passages as forced scoring feeds them.

A passage as long as a request says little about a window of 2,048 tokens: a score that falls with
the position would send one token in a hundred high there, whatever the budget.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.features import (
    TokenTypeTable,
    needs_signals,
    sequence_batch,
)
from tokenrouter.routers import RequestLevelRouter, Router
from tokenrouter.types import Phase, RouteInput

NUM_PASSAGES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutWindows:
    """Where the thresholds for quality come from.

    Attributes:
        text_ids: token ids of the side of the text to calibrate on.
        window_tokens: length of the windows that quality is measured on.
        decode_tokens: last tokens of a window that forced decode feeds one by one; 0: no decode.
    """

    text_ids: Sequence[int]
    window_tokens: int
    decode_tokens: int

    def passages(self) -> list[list[int]]:
        """Up to 64 passages of the windows' length, spread evenly; they overlap in a short text.

        Raises:
            ValueError: the text is shorter than a window.
        """
        last = len(self.text_ids) - self.window_tokens
        if last < 0:
            raise ValueError(
                f"a budget needs a held-out passage of {self.window_tokens} tokens (evaluation."
                f"window_tokens), and the text's calibration side has {len(self.text_ids)}: use "
                "shorter windows or a longer text, or leave router.budget.high_frac null"
            )
        starts = sorted({round(i * last / (NUM_PASSAGES - 1)) for i in range(NUM_PASSAGES)})
        return [list(self.text_ids[s : s + self.window_tokens]) for s in starts]

    def calibrated(self, router: Router, token_types: TokenTypeTable) -> Router:
        """``router`` for quality: a copy with thresholds of its own, or itself where it needs none.

        A router with features that are known only while an engine runs is returned as it is: an LLM
        calibrates it on what it serves. Prefill: whole windows as prompts. Decode: the last
        ``decode_tokens`` after the rest of the window as the prompt. Of a router that decides per
        request, the inner router is calibrated.

        Args:
            router: not modified. To be given before it is calibrated on requests: a router that has
                thresholds keeps them.
            token_types: of the vocabulary.

        Raises:
            ValueError: the text is too short for a window, or holds too few tokens for the budget.
        """
        scored = {Phase.PREFILL, Phase.DECODE} if self.decode_tokens else {Phase.PREFILL}
        phases = scored & ({Phase.PREFILL} if router.level == "request" else router.phases)
        if not (_budgeted(router).needs_calibration and phases) or needs_signals(router.features):
            return router
        router = copy.deepcopy(router)
        target = _budgeted(router)
        extractor = target.extractor(token_types)
        inputs: list[RouteInput] = []
        for row, ids in enumerate(self.passages()):
            if Phase.PREFILL in phases:
                batch = sequence_batch(ids, row=row, token_types=token_types)
                inputs.append(extractor.extract(batch))
            if Phase.DECODE in phases:
                prompt_len = len(ids) - self.decode_tokens
                batch = sequence_batch(ids, prompt_len=prompt_len, row=row, token_types=token_types)
                is_decode_T = batch.phase_T == Phase.DECODE
                inputs.append(extractor.extract(batch.select(is_decode_T.nonzero().flatten())))
        target.calibrate(inputs)
        return router


def _budgeted(router: Router) -> Router:
    """The router whose thresholds are set on tokens."""
    return router.inner if isinstance(router, RequestLevelRouter) else router
