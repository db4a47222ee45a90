"""When a policy acts, what it sees, and what it may never evict."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from tokenrouter.checks import check_count, check_number
from tokenrouter.kvcache.retention.base import RetentionPolicy

OBSERVATION = ("window", "decay", "layers")
"""What says how attention is observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionOptions:
    """A retention policy and its schedule, in the request's own positions.

    The policy acts when a request has ``interval``, 2 ``interval``, ... tokens; chunks end there. Attention is observed
    from the last ``window`` queries before each of these points, in prefill and in decode alike, so that a recompute
    sees what the first run saw.

    Attributes:
        policy: what is evicted.
        interval: tokens from one decision to the next, at least 1; also the largest prefill chunk.
        window: observed queries, 1 to ``interval``; where the policy looks at no attention, the default is no
            contradiction of a shorter interval.
        decay: what the attention of a window is worth in the mean when the next one closes, over 0, at most 1.
        layers: how many layers are observed, evenly spread, or which; more cost more in prefill.
        groups: so many groups of neighbouring layers, of equal size as far as may be, each judge by their own attention
            and keep their own tokens; 1: all layers keep the same. Every group must hold an observed layer where the
            policy looks at attention. Each costs tables and a plan of its own in every step.
        sinks: first tokens that are never evicted.
        recent: last tokens that are never evicted, at least 1.
        compress: entries that stay become int8 where their token's class is ``compress`` (class), or when they are
            neither sinks, recent nor protected (old); None: none does.

    Raises:
        ValueError: an option out of its range, or ``policy`` is none.
    """

    policy: RetentionPolicy
    interval: int = 128
    window: int = 32
    decay: float = 1.0
    layers: int | Sequence[int] = 4
    groups: int = 1
    sinks: int = 4
    recent: int = 32
    compress: Literal["class", "old"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, RetentionPolicy):
            raise ValueError(
                f"policy={self.policy!r} must be a retention policy, such as SinkWindow(); to keep every entry leave "
                "retention itself out (null)"
            )
        for name, least in (
            ("interval", 1),
            ("window", 1),
            ("groups", 1),
            ("sinks", 0),
            ("recent", 1),
        ):
            check_count(name, getattr(self, name), least)
        check_number("decay", self.decay, lambda x: 0 < x <= 1, "over 0 and at most 1")
        if self.compress not in (None, "class", "old"):
            raise ValueError(f"compress={self.compress!r} must be 'class', 'old' or null")
        is_meant = self._watches or self.window != _defaults()["window"]
        if self.window > self.interval and is_meant:
            raise ValueError(
                f"window={self.window} must be at most interval={self.interval}: it ends where the policy acts"
            )
        self._check_layers()

    @property
    def _watches(self) -> bool:
        return "attention" in self.policy.needs

    def _check_layers(self) -> None:
        """What no model has; ``observed_layers`` refuses what one has not."""
        layers: Any = self.layers
        if isinstance(layers, int | float):
            check_count("layers", layers, 1)
        elif isinstance(layers, str | bytes) or not isinstance(layers, Sequence) or not layers:
            raise ValueError(
                f"layers={layers!r} must be how many layers are observed, such as 4, or a list of their numbers, "
                "such as [0, 10, 20]"
            )
        else:
            for layer in layers:
                check_count("a number in layers", layer, 0)

    def ignored(self) -> dict[str, str]:
        """Options that differ from their defaults and change nothing beside this policy: by name, and why."""
        name = self.policy.name
        found = {} if self._watches else dict.fromkeys(OBSERVATION, f"{name} looks at no attention")
        found |= dict.fromkeys(self.policy.unused, f"{name} does not use it")
        return {
            option: why
            for option, why in sorted(found.items())
            if getattr(self, option) != _defaults()[option]
        }

    @property
    def kept_beyond_budget(self) -> str | None:
        """Why more entries stay than ``max_entries`` of the policy says, and what to do; None where they do not."""
        most = getattr(self.policy, "max_entries", None)
        if most is None or most >= (guarded := self.sinks + self.recent):
            return None
        return (
            f"kvcache.retention.policy.max_entries={most} leaves {guarded} entries: the first sinks={self.sinks} and "
            f"the last recent={self.recent} always stay. Lower these, or set max_entries to {guarded} or more"
        )

    def observed_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose attention counts; raises ValueError when one does not exist."""
        if isinstance(self.layers, int):
            count = min(self.layers, num_layers)
            return tuple((2 * i + 1) * num_layers // (2 * count) for i in range(count))
        is_wrong = any(layer >= num_layers for layer in self.layers)
        if is_wrong or len(set(self.layers)) != len(self.layers):
            raise ValueError(
                f"layers={list(self.layers)} must name different layers of 0 to {num_layers - 1}"
            )
        return tuple(self.layers)

    def layer_groups(self, num_layers: int) -> tuple[int, ...]:
        """Per layer the number of its group; raises ValueError when there are more groups than layers."""
        if self.groups > num_layers:
            raise ValueError(
                f"groups={self.groups} must be at most {num_layers}, the model's layers"
            )
        return tuple(layer * self.groups // num_layers for layer in range(num_layers))

    def max_live(self, num_tokens: int) -> int:
        """Most slots that a request of ``num_tokens`` tokens holds at once: for admission."""
        decided = (num_tokens - 1) // self.interval * self.interval
        kept = self.policy.max_kept(decided) + self.sinks + self.recent
        return min(num_tokens, kept + self.interval)


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in fields(RetentionOptions)}
