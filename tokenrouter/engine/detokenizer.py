"""Text from tokens, as they come: whole characters only, and nothing of a stop string.

The method is that of text-generation-inference and vLLM: decode a small window of tokens with and
without the new ones; what differs is the new text.
"""

from collections.abc import Sequence
from typing import Any

from tokenrouter.engine.sampler import ends_output
from tokenrouter.outputs import FinishReason
from tokenrouter.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output: its first token may start with a space or not."""
_MOST_PENDING = 16
"""Undecided tokens after which the older ones are settled: the output is not text, but bytes."""


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
                self._held = ""
                self._show(text[: end if self._params.include_stop_str_in_output else start])
                return
        num_held = max(_overlap(text, stop) for stop in stops)
        self._held = text[len(text) - num_held :]
        self._show(text[: len(text) - num_held])


class _Window:
    """The last few tokens: ``context``, whose text is out, and ``pending``, whose text is not."""

    def __init__(self, tokenizer: Any, skip_special: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._num_ids = len(tokenizer)
        self._dropped = _special_ids(tokenizer) if skip_special else frozenset()
        recent = [
            int(i) for i in prompt_ids[-2 * _CONTEXT_TOKENS :] if not self._is_dropped(int(i))
        ]
        self._context = recent[-_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def append(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if self._is_dropped(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text == self._context_text and text and not text.endswith(_REPLACEMENT):
            self._pending.clear()  # a token without text
            return ""
        if text == self._context_text or text.endswith(_REPLACEMENT):
            return self._settle(text) if len(self._pending) > _MOST_PENDING else ""
        return self._release(len(self._pending), text)

    def flush(self) -> str:
        """The text of what is pending, unfinished characters included."""
        if not self._pending:
            return ""
        return self._release(len(self._pending), self._decode(self._context + self._pending))

    def _release(self, count: int, text: str) -> str:
        """Moves ``count`` pending tokens to the context; ``text`` is context and those, decoded."""
        moved = self._pending[:count]
        known = self._context_text
        if not text.startswith(known):
            known = known.rstrip(_REPLACEMENT)  # a character that the prompt began
        new = text[len(known) :] if text.startswith(known) else self._decode(moved)
        self._context, self._pending = moved, self._pending[count:]
        self._context_text = self._decode(moved)
        return new

    def _settle(self, text: str) -> str:
        """Releases the older part of a long run of bytes that form no characters.

        A cut is exact where the two sides, decoded apart, give the text of the whole.
        """
        half = len(self._pending) // 2
        for count in range(half, half + 4):  # a character has at most four bytes
            before = self._decode(self._context + self._pending[:count])
            if before + self._decode(self._pending[count:]) == text:
                return self._release(count, before)
        return ""

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
