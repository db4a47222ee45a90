"""Token ids that are fed one by one behind a prompt, and the logits that come of it."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tokenrouter import LLM, SamplingParams
from tokenrouter.engine import LLMEngine

Sink = Callable[[int, int, Tensor], None]
"""Gets the index of what is read, the position of the first row, and logits ``[T, V]``."""


def force(
    llm: LLM, index: int, ids: Sequence[int], prompt_len: int, sink: Sink, *, wants_all: bool
) -> None:
    """Queues a prompt and what follows it; with ``wants_all`` the prompt's own rows are handed over, too."""
    llm.engine.add_request(
        str(index),
        ids[:prompt_len],
        SamplingParams(temperature=0.0, detokenize=False),
        forced_ids=ids[prompt_len:],
        logits_sink=partial(sink, index),
        wants_all_logits=wants_all,
        stream=False,
    )


def finish(engine: LLMEngine) -> None:
    """Steps until nothing is left to do."""
    while engine.has_unfinished():
        engine.step()
