"""What the tests of streamed text share: texts that are hard to cut, and a stream that is checked at every token."""

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.sampling_params import SamplingParams

checked = settings(deadline=None, max_examples=200)
ALPHABET = (
    "abc .\n\u00e9e\u0301\u4e2d\u6587\u3042\ud55c\U0001f600\U0001f469\u200d\U0001f467\ufffd\u0301"
)
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=ALPHABET, max_size=60),
    st.text(alphabet="ab", max_size=60),
)
PROMPT = [504, 1528]


def decode(tokenizer: Any, ids: Sequence[int], *, skip: bool = True) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


def stream(
    tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[IncrementalDetokenizer, list[str]]:
    """The detokenizer at the end, and the pieces; checks what holds for every stream."""
    eos = options.pop("eos", frozenset())
    params = SamplingParams(max_tokens=None, **options)
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, params, prompt, eos), []
    for token in ids:
        detokenizer.append(token)
        pieces.append(detokenizer.take_delta())
        assert detokenizer.text == "".join(pieces)
        if detokenizer.stop_hit is not None:
            break
    detokenizer.finish("length")
    pieces.append(detokenizer.take_delta())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.take_delta() == ""
    return detokenizer, pieces
