"""What a request must be before it may enter: every refusal names the value, the limit and what to do."""

from bisect import bisect_right
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from tokenrouter.kvcache import KVPool
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler.request import LogitsSink
from tokenrouter.wording import plural

Prompt = str | Sequence[int]
MORE_SLOTS = "kvcache.num_slots (in Python: EngineOptions.num_kv_slots)"


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt (text or ids) as a list of one, several as a list; ``encode_prompt`` checks each.

    Raises:
        ValueError: neither a prompt nor a sequence.
    """
    if isinstance(prompts, str | bytes):
        return [prompts]
    if not isinstance(prompts, Sequence) and not (isinstance(prompts, np.ndarray) and prompts.ndim):
        raise ValueError(
            f"prompts must be text, a list of token ids, or a list of such prompts, got {prompts!r} "
            f"({type(prompts).__name__})"
        )
    given: Any = prompts
    return [given] if len(given) > 0 and isinstance(given[0], Integral) else list(given)


def encode_prompt(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt, checked; raises ValueError for an empty prompt or ids outside the vocabulary."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids, not text")
        ids = list(tokenizer.encode(prompt))
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(
            f"a prompt must be text or a list of token ids, got {prompt!r} ({type(prompt).__name__})"
        )
    else:
        ids = list(prompt)
    if not ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    return _check_ids(ids, vocab_size, "a prompt must be text or a list of token ids")


def check_forced_ids(ids: Sequence[int] | None, vocab_size: int) -> list[int] | None:
    """Ids to feed instead of sampled ones, checked; raises ValueError for what is no id of the vocabulary."""
    return (
        None
        if ids is None
        else _check_ids(ids, vocab_size, "forced_ids must be a list of token ids")
    )


def _check_ids(ids: Sequence[int], vocab_size: int, expected: str) -> list[int]:
    """The ids as Python integers; ``expected`` begins the message about what is no integer."""
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)]:
        raise ValueError(f"{expected}, got {bad[0]!r} in it")
    found = [int(i) for i in ids]
    if found and not 0 <= min(found) <= max(found) < vocab_size:
        raise ValueError(
            f"token ids must lie in 0 .. {vocab_size - 1}, got {min(found)} .. {max(found)}"
        )
    return found


def longest_total(
    prompt_len: int,
    params: SamplingParams,
    max_model_len: int,
    pool: KVPool,
    num_forced: int | None,
) -> int:
    """The most tokens a request may have, prompt and output; the last one is never fed and needs no slot.

    Raises:
        ValueError: the prompt leaves no room for output, or the request could never fit the pool.
    """
    if num_forced is not None:
        total = prompt_len + num_forced
        if total > max_model_len:
            raise ValueError(
                f"{total} forced tokens exceed the model's length of {max_model_len}: shorten them"
            )
        if (needed := pool.slots_for(total)) > pool.num_slots:
            raise ValueError(
                f"{total} forced tokens exceed the pool: they need {needed} KV slots, and it has {pool.num_slots}: "
                f"shorten them, or raise {MORE_SLOTS}"
            )
        return total
    if prompt_len >= max_model_len:
        raise ValueError(
            f"the prompt has {prompt_len} tokens; the model's length is {max_model_len} and the output needs at least "
            "one: shorten the prompt"
        )
    if (needed := pool.slots_for(prompt_len)) > pool.num_slots:
        raise ValueError(
            f"the prompt alone needs up to {needed} KV slots ({prompt_len} tokens); the pool has {pool.num_slots}: "
            f"shorten it, or raise {MORE_SLOTS}"
        )
    if params.max_tokens is None:
        # As many as fit: slots_for never falls as tokens are added.
        tokens = range(max_model_len)
        total = bisect_right(tokens, pool.num_slots, lo=prompt_len, key=pool.slots_for)
    else:
        total = min(prompt_len + params.max_tokens, max_model_len)
    if (needed := pool.slots_for(total - 1)) > pool.num_slots:
        raise ValueError(
            f"the request needs up to {needed} KV slots ({prompt_len} prompt {plural(prompt_len, 'token')} and "
            f"{total - 1 - prompt_len} more); the pool has {pool.num_slots}: lower max_tokens or raise {MORE_SLOTS}"
        )
    return total


def check_sink(
    params: SamplingParams,
    logits_sink: LogitsSink | None,
    forced_ids: Sequence[int] | None,
    wants_all_logits: bool,
    logits_from: int = 0,
) -> None:
    """Raises ValueError for a sink that would get nothing, is missing, or takes what prompt_logprobs need."""
    if logits_from < 0 or (logits_from and not wants_all_logits):
        raise ValueError(
            f"logits_from={logits_from} must be a position of the prompt, and needs wants_all_logits=True"
        )
    if wants_all_logits and logits_sink is None:
        raise ValueError("wants_all_logits=True needs a logits_sink that takes the logits")
    if logits_sink is None:
        return
    if params.prompt_logprobs is not None:
        raise ValueError(
            f"prompt_logprobs={params.prompt_logprobs} cannot be combined with a logits_sink: ask for them in "
            "another request, or take them from the sink's logits (wants_all_logits=True)"
        )
    if forced_ids is None and not wants_all_logits:
        raise ValueError(
            "a logits_sink without forced_ids gets logits only with wants_all_logits=True: set it, give "
            "forced_ids (an empty list: the prompt alone), or leave the sink out"
        )


def check_priority(priority: int) -> None:
    """Raises ValueError for one that is no integer."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise ValueError(f"priority must be an integer, lower goes first, got {priority!r}")
