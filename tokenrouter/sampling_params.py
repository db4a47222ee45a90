"""What a user asks of generation. Names and defaults follow vLLM's SamplingParams.

Imports the standard library only.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: the scaled logits would leave float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Order of processing: ``logit_bias`` and the ``min_tokens`` mask, penalties, ``temperature``,
    ``min_p``, ``top_k``, ``top_p``. Log-probabilities are taken from the model's own logits, before
    all of these.

    Attributes:
        n: completions of the prompt; the i-th (from 0) uses ``seed + i``.
        presence_penalty: -2 to 2, subtracted once from every token in the output so far.
        frequency_penalty: -2 to 2, subtracted per occurrence in the output so far.
        repetition_penalty: above 0; divides the positive and multiplies the negative logits of
            tokens in the prompt or the output.
        temperature: 0 (anything below 1e-5) is greedy; top_k, top_p, min_p then have no effect.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all. Of equal logits the lower id comes
            first, so 1 is greedy.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: an own random stream, the same whatever runs beside it; None uses the engine's.
        stop: strings that end the output; kept as a tuple (``stop_strings``).
        stop_token_ids: ids that end the output; kept as a tuple (``stop_ids``).
        ignore_eos: do not end at the model's end-of-sequence tokens.
        max_tokens: most tokens to generate; None goes up to the model's length.
        min_tokens: EOS, stop ids and stop strings have no effect before this many tokens.
        logprobs: per output token, this many of the likeliest candidates and the sampled one.
        prompt_logprobs: the same per prompt token.
        detokenize: produce text; False leaves the text empty.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text after the stop string or stop token, not before.
        logit_bias: id to the number that is added to its logit; kept as an own dict.

    Raises:
        ValueError: a value has the wrong type or is out of range, or two options exclude each
            other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in (
            "n",
            "top_k",
            "min_tokens",
            "max_tokens",
            "seed",
            "logprobs",
            "prompt_logprobs",
        ):
            if getattr(self, name) is not None:  # a numpy integer would wrap or overflow later
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p may leave tokens out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it is stored."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as it is stored."""
        return cast(tuple[int, ...], self.stop_token_ids)

    def check_vocab(self, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Refuse what this model cannot do; call once when the request comes in.

        Raises:
            ValueError: an id in ``logit_bias`` or ``stop_token_ids`` is outside the vocabulary, more
                logprobs are asked for than it has tokens, or ``min_tokens`` leaves none to choose.
        """
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_ids)):
            if bad := [token_id for token_id in ids if token_id >= vocab_size]:
                raise ValueError(
                    f"{name} holds ids {bad}; this model's ids are 0 to {vocab_size - 1}"
                )
        if self.min_tokens and len(eos_token_ids | set(self.stop_ids)) >= vocab_size:
            raise ValueError(
                f"min_tokens={self.min_tokens} forbids EOS and stop_token_ids at first, which are all "
                f"{vocab_size} tokens of this model: set min_tokens=0 or name fewer stop ids"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; this model has only {vocab_size} tokens"
                )

    def _check_numbers(self) -> None:
        _real(
            "presence_penalty",
            self.presence_penalty,
            "in [-2, 2]; 0 is off",
            lambda v: -2 <= v <= 2,
        )
        _real(
            "frequency_penalty",
            self.frequency_penalty,
            "in [-2, 2]; 0 is off",
            lambda v: -2 <= v <= 2,
        )
        _real("repetition_penalty", self.repetition_penalty, "above 0; 1 is off", lambda v: v > 0)
        _real("temperature", self.temperature, "0 (greedy) or more", lambda v: v >= 0)
        _real("top_p", self.top_p, "in (0, 1]; 1 is off", lambda v: 0 < v <= 1)
        _real("min_p", self.min_p, "in [0, 1]; 0 is off", lambda v: 0 <= v <= 1)
        _integer("n", self.n, "1 or more", 1)
        _integer("top_k", self.top_k, "1 or more; 0 or -1 keeps all tokens", -1)
        _integer("min_tokens", self.min_tokens, "0 or more", 0)
        if self.seed is not None:
            _integer(
                "seed",
                self.seed,
                "in 0 to 2**63 - 1; None leaves the request unseeded",
                0,
                2**63 - 1,
            )
        if self.max_tokens is not None:
            _integer(
                "max_tokens", self.max_tokens, "1 or more; None goes up to the model's length", 1
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), "0 or more; None is off", 0)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} and "
                f"{self.max_tokens}; lower min_tokens or raise max_tokens"
            )
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n must be 1 when greedy, got {self.n} at temperature {self.temperature}: "
                "the completions would be equal; set n=1 or a temperature above 0"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings are looked for in the text: set detokenize=True or use stop_token_ids"
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integer(name: str, value: Any, allowed: str, least: int, most: int | None = None) -> None:
    if not _is_integer(value):
        raise ValueError(
            f"{name} must be an integer {allowed}, got {value!r} ({type(value).__name__})"
        )
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _real(name: str, value: Any, allowed: str, is_allowed: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(
            f"{name} must be a number {allowed}, got {value!r} ({type(value).__name__})"
        )
    if not math.isfinite(value) or not is_allowed(value):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise ValueError(
            f"stop must be a string or a list of strings, got {stop!r} ({type(stop).__name__})"
        )
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if bad := [text for text in strings if not isinstance(text, str)]:
        raise ValueError(
            f"stop must be a string or a list of strings, got {bad[0]!r} "
            f"({type(bad[0]).__name__}) in it"
        )
    if "" in strings:
        raise ValueError(f"stop must not hold an empty string, got {list(strings)}; use stop=None")
    return tuple(dict.fromkeys(strings))


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise ValueError(f"{name} must be a list of token ids, got {ids!r} ({type(ids).__name__})")
    values = tuple(ids)
    if bad := [value for value in values if not _is_integer(value) or value < 0]:
        raise ValueError(
            f"{name} must hold integers of 0 or more, got {bad[0]!r} ({type(bad[0]).__name__})"
        )
    return tuple(dict.fromkeys(int(value) for value in values))


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(
            f"logit_bias must be a dict of token id to number, got {bias!r} ({type(bias).__name__})"
        )
    ids = _ids("logit_bias", bias)
    for token_id, value in bias.items():
        _real(
            f"logit_bias[{token_id}]",
            value,
            "in [-1e9, 1e9]; -100 practically bans a token",
            lambda v: abs(v) <= 1e9,
        )
    return dict(zip(ids, map(float, bias.values()), strict=True)) or None
