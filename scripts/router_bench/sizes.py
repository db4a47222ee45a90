"""How much is run."""

from dataclasses import dataclass

OF_KL = ("windows", "window_tokens", "shares", "seeds", "draws", "logit_passages")
"""Those of ``Sizes`` that a text's KL depends on; the others are of what is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the windows that KL is measured on, and of what is timed.

    Attributes:
        windows: of each text.
        window_tokens: of each window, as far as the text is long enough.
        shares: of high tokens.
        seeds: of the random router, each with the window's first token low and high.
        draws: of the oracle's label.
        logit_passages: held-out windows on which routers that look at logits get their thresholds.
        calls: of a router per turn.
        turns: that count, of everything that is timed.
        context: tokens of the prompts behind which requests decode.
        decode_batch: requests that decode together where throughput is timed.
        decode_steps: of a turn.
        chunk_tokens: of the prompt whose prefill is timed.
        prompt_lengths: of the requests that are served.
        output_max: tokens that a request generates at most.
    """

    windows: int = 6
    window_tokens: int = 2048
    shares: tuple[float, ...] = (0.05, 0.1, 0.2)
    seeds: int = 3
    draws: int = 3
    logit_passages: int = 6
    calls: int = 200
    turns: int = 5
    context: int = 512
    decode_batch: int = 32
    decode_steps: int = 24
    chunk_tokens: int = 1024
    prompt_lengths: tuple[int, ...] = (20, 30, 50, 80, 120, 200, 500, 1000) * 2
    output_max: int = 128


QUICK = Sizes(
    windows=2,
    window_tokens=64,
    shares=(0.05, 0.2),
    seeds=2,
    draws=1,
    logit_passages=2,
    calls=5,
    turns=1,
    context=16,
    decode_steps=2,
    chunk_tokens=64,
    prompt_lengths=(20, 50),
    output_max=8,
)
