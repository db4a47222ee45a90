"""Text from tokens, as they come: whole characters only, and nothing of a stop string.

As in text-generation-inference and vLLM a small window of tokens is decoded again with each new one,
since what a token adds depends on those before it.
"""

from collections.abc import Sequence
from typing import Any

from tokenrouter.engine.sampler import ends_output
from tokenrouter.outputs import FinishReason
from tokenrouter.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output: its first token may start with a space or not."""
_MOST_TOKENS = 24
"""A longer window holds bytes that are no text; the work per token must not grow with them."""
_KEPT_TOKENS = 10
"""Tokens to which such a window is shortened."""
_MOST_UNFINISHED = 3
"""Characters that the bytes of one unfinished character may be decoded to."""


class IncrementalDetokenizer:
    """The text of one completion, token by token; work per token does not grow with the length.

    Text is shown when it can no longer change: bytes of an unfinished character wait for the rest,
    and an ending that may become a stop string waits until it has or cannot. Without stop strings
    the final text is ``tokenizer.decode(output_ids)`` without clean-up of spaces (or its
    continuation of the prompt, in tokenizers where the two differ by a leading space).

    Of several stop strings the one that is complete first counts, of equals the longest, however
    the text falls into tokens.

    Args:
        tokenizer: of transformers; not used, and may be None, when ``params.detokenize`` is False.
        params: of the request.
        prompt_ids: the last few are the context of the first token.
        eos_token_ids: of the model. Like stop ids, they end the output and are not part of its text
            unless ``include_stop_str_in_output``.

    Attributes:
        stop_hit: the stop string that ended the text; later tokens are ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.stop_hit: str | None = None
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._num_output = 0
        self._finished = False
        self._text = ""
        self._pieces: list[str] = []  # shown, but not yet joined to the text
        self._delta: list[str] = []  # shown, but not yet taken
        self._held = ""  # the longest ending that a stop string starts with
        if params.detokenize:
            self._window = _Window(tokenizer, params.skip_special_tokens, prompt_ids)

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        if self._pieces:
            self._text += "".join(self._pieces)
            self._pieces.clear()
        return self._text

    def take_delta(self) -> str:
        """The text shown since the last call; all of them joined are ``text``."""
        delta = "".join(self._delta)
        self._delta.clear()
        return delta

    def append(self, token_id: int) -> None:
        """Takes the next output token; may show text and may set ``stop_hit``."""
        if self.stop_hit is not None or self._finished or not self._params.detokenize:
            return
        self._num_output += 1
        if not self._params.include_stop_str_in_output and ends_output(
            self._params, token_id, self._num_output, self._eos_token_ids
        ):
            return
        self._add(self._window.append(token_id))

    def finish(self, reason: FinishReason) -> FinishReason:
        """Shows what was held back, an unfinished character as the tokenizer decodes it.

        Returns:
            ``reason``, or "stop" where the text turned out to end with a stop string.
        """
        if self._params.detokenize and self.stop_hit is None and not self._finished:
            self._add(self._window.flush())
            if self.stop_hit is None:
                self._show(self._held)
                self._held = ""
        self._finished = True
        return reason if self.stop_hit is None else "stop"

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._delta.append(text)

    def _add(self, new: str) -> None:
        """Shows ``new`` but for what may be part of a stop string."""
        stops = self._params.stop_strings
        if not stops:
            self._show(new)
            return
        if not new:
            return
        text = self._held + new
        if self._num_output >= self._params.min_tokens:
            # Earlier text was searched before: a match ends in the new part.
            found = [
                (start + len(stop), start, stop)
                for stop in stops
                if (start := text.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
            ]
            if found:
                end, start, self.stop_hit = min(found)
                self._show(text[: end if self._params.include_stop_str_in_output else start])
                return
        num_held = max(_overlap(text, stop) for stop in stops)
        self._held = text[len(text) - num_held :]
        self._show(text[: len(text) - num_held])


class _Window:
    """The last few tokens, and how much of their text is out.

    The window starts where the text was last certain, or one such place earlier: the tokens before
    the new ones decide about leading spaces and unfinished characters.
    """

    def __init__(self, tokenizer: Any, skip_special: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._num_ids = len(tokenizer)
        self._dropped = _special_ids(tokenizer) if skip_special else frozenset()
        recent = [i for i in map(int, prompt_ids[-_KEPT_TOKENS:]) if not self._is_dropped(i)]
        self._ids = recent[-_CONTEXT_TOKENS:]
        self._prompt_text = self._decode(self._ids)
        self._num_certain = len(self._ids)  # tokens
        self._num_shown = len(self._prompt_text)  # characters

    def append(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if self._is_dropped(token_id):
            return ""
        self._ids.append(token_id)
        return self._advance(end=False)

    def flush(self) -> str:
        """The rest, an unfinished character included."""
        return self._advance(end=True)

    def _advance(self, *, end: bool) -> str:
        text = self._decode(self._ids)
        if not text.startswith(self._prompt_text):  # the prompt's last character got its rest
            self._num_shown = len(self._prompt_text.rstrip(_REPLACEMENT))
            self._prompt_text = ""
        is_long = len(self._ids) > _MOST_TOKENS
        certain = text if end else text.rstrip(_REPLACEMENT)
        is_whole = certain == text
        if is_long and not is_whole:
            certain = max(certain, text[:-_MOST_UNFINISHED], key=len)
        new = certain[self._num_shown :]
        self._num_shown += len(new)
        if is_whole and new:
            self._ids, self._prompt_text = self._ids[self._num_certain :], ""
            self._num_certain = len(self._ids)
            self._num_shown = len(self._decode(self._ids))
        elif is_long:
            self._shorten(text[self._num_shown :])
        return new

    def _shorten(self, rest: str) -> None:
        """Forgets the older tokens of a long run without whole characters; ``rest`` is not out."""
        ids = self._ids[-_KEPT_TOKENS:]
        text = self._decode(ids)
        if text.endswith(rest):
            self._ids, self._prompt_text = ids, ""
            self._num_certain, self._num_shown = 0, len(text) - len(rest)

    def _is_dropped(self, token_id: int) -> bool:
        return token_id in self._dropped or not 0 <= token_id < self._num_ids

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids,
                skip_special_tokens=self._skip_special,
                clean_up_tokenization_spaces=False,
            )
        )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that ``decode(skip_special_tokens=True)`` leaves out."""
    if not getattr(tokenizer, "is_fast", False):
        return frozenset(tokenizer.all_special_ids)
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
