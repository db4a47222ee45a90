"""What is known of each token of one request: its decision, and the features that the router was shown.

T tokens of one call of the router.
"""

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenrouter import LLM
from tokenrouter.features.vocabulary import vocabulary_texts
from tokenrouter.routers import Router
from tokenrouter.types import Phase, RouteInput, RoutingDecision

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that show nothing, or change how their neighbours are shown."""
_PARTIAL = "\ufffd"
_MOST_PARTS = 8
"""Tokens that are tried as the parts of a character; more are no text."""
_MARKS = {"\n": "↵\n", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedToken:
    """One token of the text.

    Attributes:
        position: in the request.
        token_id: in the vocabulary.
        text: as it is shown, see ``visible``; never empty.
        piece: the tokenizer's own spelling.
        phase: ``prefill`` or ``decode``; None where the token was never fed, so that nothing was decided.
        requested, executed: names of routes; None where nothing was decided.
        score: the router's; NaN where it has none.
        rank_frac: share of the text's scored tokens with a lower score, 0 to 1; NaN without a score.
        reason: the router's words.
        features: by name, what the router was shown; empty where it was not asked or asks for none.
        labels: by name; empty where none were made.
    """

    position: int
    token_id: int
    text: str
    piece: str
    phase: str | None
    requested: str | None
    executed: str | None
    score: float
    rank_frac: float
    reason: str
    features: Mapping[str, float]
    labels: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A text and how it was routed.

    Attributes:
        tokens: in order.
        routes: by name, the executors of its layers in words; the index gives the colour.
        facts: name and value of what the reader must know of the run, such as the model.
    """

    tokens: Sequence[ExplainedToken]
    routes: Mapping[str, str]
    facts: Mapping[str, str]

    def counts(self) -> dict[str, int]:
        """Tokens per executed route."""
        return {name: sum(t.executed == name for t in self.tokens) for name in self.routes}

    def label_shares(self) -> dict[str, dict[str, float]]:
        """By label and executed route, the share of the label's sum that its tokens hold; labels with a sum only."""
        shares: dict[str, dict[str, float]] = {}
        for label in self.tokens[0].labels if self.tokens else ():
            known = [t for t in self.tokens if math.isfinite(t.labels[label])]
            if total := sum(t.labels[label] for t in known):
                shares[label] = {
                    name: sum(t.labels[label] for t in known if t.executed == name) / total
                    for name in self.routes
                }
        return shares


@contextmanager
def watched(router: Router) -> Iterator[list[RouteInput]]:
    """Keeps what ``router`` is shown while the block runs; its answers are its own."""
    seen: list[RouteInput] = []
    route: Callable[[RouteInput], RoutingDecision] = router.route

    def watching(inputs: RouteInput) -> RoutingDecision:
        seen.append(inputs)
        return route(inputs)

    vars(router)["route"] = watching
    try:
        yield seen
    finally:
        del vars(router)["route"]


def gather(
    llm: LLM,
    ids: Sequence[int],
    seen: Sequence[RouteInput],
    *,
    labels: Mapping[str, Sequence[float]],
    facts: Mapping[str, str],
) -> Explanation:
    """What ``llm`` decided of the one request that it served since its decision log was reset.

    Args:
        llm: an engine with ``EngineOptions.log_decisions`` and a tokenizer.
        ids: of the request, prompt and output.
        seen: what its router was shown meanwhile, see ``watched``.
        labels: by name, one per token.
        facts: of the run, see ``Explanation``.
    """
    decided = _decisions(llm)
    features = {p: values for inputs in seen for p, values in _features(inputs)}
    scores = sorted(d.score for d in decided.values() if math.isfinite(d.score))
    ranks = {score: index / len(scores) for index, score in reversed(list(enumerate(scores)))}
    texts = token_texts(llm.tokenizer, ids, llm.model.config.vocab_size)
    tokens = []
    for position, (token_id, text) in enumerate(zip(ids, texts, strict=True)):
        own = decided.get(position, _NOT_DECIDED)
        tokens.append(
            ExplainedToken(
                position=position,
                token_id=token_id,
                text=visible(text) or f"⟨{token_id}⟩",
                piece=visible(str(llm.tokenizer.convert_ids_to_tokens([token_id])[0])),
                phase=own.phase,
                requested=own.requested,
                executed=own.executed,
                score=own.score,
                rank_frac=ranks.get(own.score, math.nan),
                reason=own.reason,
                features=features.get(position, {}),
                labels={name: float(values[position]) for name, values in labels.items()},
            )
        )
    table = llm.router.routes(llm.model.config.num_layers)
    routes = {
        route.name: ", ".join(
            f"layers {span.start} to {span.stop - 1}: {_executor(llm, span.executor)}"
            for span in route.spans
        )
        for route in table.routes
    }
    return Explanation(tokens=tokens, routes=routes, facts=facts)


def token_texts(tokenizer: Any, ids: Sequence[int], vocab_size: int) -> list[str]:
    """Text of each token: leading spaces kept, control tokens by name.

    A character in several tokens is the text of the last of them; the others have U+FFFD.
    """
    vocabulary = vocabulary_texts(tokenizer, vocab_size)
    texts, start = [], 0
    for position, token_id in enumerate(ids):
        text, stop = vocabulary[token_id], position + 1
        if text is None:
            text, start = str(tokenizer.decode([token_id], skip_special_tokens=False)), stop
        elif _PARTIAL in text:
            joined = str(tokenizer.decode(list(ids[start:stop]), skip_special_tokens=False))
            is_whole = not joined.endswith(_PARTIAL)
            text = joined if is_whole else _PARTIAL
            start = stop if is_whole or stop - start >= _MOST_PARTS else start
        else:
            start = stop
        texts.append(text)
    return texts


def visible(text: str) -> str:
    """``text`` with marks for line breaks and tabs, and code points for what shows nothing or reorders its neighbours.

    A line break stays behind its mark.
    """
    return "".join(_MARKS.get(c) or (f"⟨{ord(c):04X}⟩" if _is_hidden(c) else c) for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    phase: str | None
    requested: str | None
    executed: str | None
    score: float
    reason: str


_NOT_DECIDED = _Decision(
    phase=None,
    requested=None,
    executed=None,
    score=math.nan,
    reason="drawn last and never fed: no route",
)


def _decisions(llm: LLM) -> dict[int, _Decision]:
    """By position, from the engine's log."""
    recorder, names = llm.engine.decisions, llm.engine.stats.route_names
    assert recorder is not None, "the engine logs no decisions"
    assert len(recorder.request_ids) <= 1, "one request at a time is explained"
    columns = ("position", "phase", "requested", "executed", "score", "reason")
    return {
        int(position): _Decision(
            phase=Phase(phase).name.lower(),
            requested=names[requested],
            executed=names[executed],
            score=float(score),
            reason=recorder.reasons[reason],
        )
        for block in recorder.blocks
        for position, phase, requested, executed, score, reason in zip(
            *(block[name] for name in columns), strict=True
        )
    }


def _features(inputs: RouteInput) -> Iterator[tuple[int, dict[str, float]]]:
    """Position and features of each token of a call, without those that do not exist for it."""
    rows = zip(inputs.positions_T.tolist(), inputs.values_TF.tolist(), strict=True)
    for position, values in rows:
        known = zip(inputs.names, values, strict=True)
        yield position, {name: value for name, value in known if not math.isnan(value)}


def _executor(llm: LLM, path: str) -> str:
    """A path of the pool by the executor behind it; a path that the pool lacks runs high."""
    executor = llm.pool.executors.get(path)
    return f"{path} ({executor.name})" if executor is not None else f"{path} (not in this pool)"
