"""What is declared about pairs of features: refused, or without effect. Any other pair must work."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["works", "refused", "ignored"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """About two features, or two of their settings (``feature.setting``).

    Attributes:
        outcome: refused: a ValueError. ignored: ``second`` has no effect beside ``first``.
        why: for the reader of the matrix.
        match: of a refusal, a part of its message.
    """

    outcome: Outcome
    first: str
    second: str
    why: str
    match: str = ""

    def covers(self, a: str, b: str) -> bool:
        """Whether two settings are such a pair, in either order."""
        return any(is_of(x, self.first) and is_of(y, self.second) for x, y in ((a, b), (b, a)))


def is_of(setting: str, name: str) -> bool:
    """Whether ``name`` is that setting, or its feature."""
    return name in (setting, setting.split(".")[0])


RULES = (
    Rule(
        outcome="refused",
        first="observe",
        second="retention",
        match="watch attention at different positions",
        why="retention watches attention itself, from other queries: the last ones before its decisions",
    ),
    Rule(
        outcome="refused",
        first="observe",
        second="layer_groups",
        match="watch attention at different positions",
        why="layer groups are a part of retention, which watches attention itself",
    ),
    Rule(
        outcome="refused",
        first="observe",
        second="compress",
        match="watch attention at different positions",
        why="compression is a part of retention, which watches attention itself",
    ),
    Rule(
        outcome="refused",
        first="compress",
        second="kv_int8",
        match="has no effect with kvcache.dtype",
        why="every entry is int8 already",
    ),
    Rule(
        outcome="refused",
        first="request_level",
        second="layerwise",
        match="the first must be 'high'",
        why="a layer map does not say which tokens need the high path",
    ),
    Rule(
        outcome="refused",
        first="request_level",
        second="token_router.after_layer",
        match="which does not exist in prefill at pre_forward",
        why="a request gets its route before any of its layers has run",
    ),
    Rule(
        outcome="ignored",
        first="token_router.after_layer",
        second="dispatch.queued",
        why="the first layers run for all tokens of a step together, before any has a queue, and a warning says so",
    ),
    Rule(
        outcome="refused",
        first="layerwise",
        second="retention.route",
        match="classes names the routes high, low, and the router has layerwise",
        why="a layer map has one route: there are no classes to choose by",
    ),
    Rule(
        outcome="ignored",
        first="retention.route",
        second="compress.by_class",
        why="the policy names the classes of both routes, which counts more than the router, and neither is compress",
    ),
    Rule(
        outcome="refused",
        first="scoring",
        second="logprobs.prompt",
        match="prompt_logprobs=2 cannot be combined with a logits_sink",
        why="the sink gets the prompt's logits themselves",
    ),
    *(
        Rule(
            outcome="ignored",
            first="scoring",
            second=name,
            why="the next token is given, not chosen, and the request ends with the last one",
        )
        for name in ("sampling", "penalties", "logit_bias", "stop")
    ),
    Rule(
        outcome="ignored",
        first="scoring",
        second="logprobs.output",
        why="nothing is sampled; the sink gets the logits themselves",
    ),
    Rule(
        outcome="refused",
        first="prefix_sharing",
        second="compress",
        match="rewrites entries that prefix_sharing lets other requests use",
        why="a decision of one request would rewrite what others read",
    ),
    Rule(
        outcome="ignored",
        first="logprobs.prompt",
        second="prefix_sharing",
        why="the logits of every position of the prompt are wanted, so every token runs",
    ),
)


def rule_for(a: str, b: str) -> Rule | None:
    """The rule about two settings; None: they work together."""
    return next((rule for rule in RULES if rule.covers(a, b)), None)


def outcome_of(a: str, b: str) -> Outcome:
    """What the test of two settings proves."""
    rule = rule_for(a, b)
    return "works" if rule is None else rule.outcome
