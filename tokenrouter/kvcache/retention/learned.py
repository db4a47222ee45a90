"""A small trained model says which entries later tokens will need; trained by ``task=train_retention``."""

from dataclasses import dataclass, field

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy
from tokenrouter.kvcache.retention.checkpoint import TRAIN, RetentionModel, read_model, shipped
from tokenrouter.kvcache.retention.entry_features import entry_features

SHIPPED = "shipped"


@dataclass(kw_only=True)
class Learned(ScoredPolicy):
    """By what the trained model says of an entry's attention, age and repeats.

    Attributes:
        path: of a trained policy; ``shipped``: the one that comes with the package.

    Raises:
        ValueError: a file that is missing, damaged, or of other features; as ScoredPolicy.
    """

    name = "learned"
    needs = frozenset({"attention", "ids"})

    path: str = SHIPPED
    _trained: RetentionModel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(
                f"path={self.path!r} must be the path of a trained policy, or {SHIPPED!r}"
            )
        self._trained = read_model(_shipped() if self.path == SHIPPED else self.path)

    @property
    def version(self) -> str:
        """Of the trained model: a hash of all that a score depends on."""
        return self._trained.version

    def use_for(self, *, model: str, model_hash: str) -> None:
        """See RetentionPolicy; raises ValueError for another model than that it was trained for."""
        known = self._trained
        if model_hash != known.model_hash:
            raise ValueError(
                f"retention {self.name} was trained for the model {known.model} ({known.model_hash}), and this is "
                f"{model} ({model_hash}): {TRAIN} model=..., and use it by kvcache.retention.policy.path=<its file>"
            )

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy; raises ValueError where what is known of an entry is not finite."""
        values_NF = entry_features(entries)
        if not bool(values_NF.isfinite().all()):
            is_bad_F = ~values_NF.isfinite().all(0)
            bad = [n for n, is_bad in zip(self._trained.features, is_bad_F, strict=True) if is_bad]
            raise ValueError(
                f"retention {self.name}: {', '.join(bad)} of an entry is not finite: the model's attention holds NaN"
            )
        return self._trained(values_NF)


def _shipped() -> str:
    paths = shipped()
    if not paths:
        raise ValueError(
            f"no trained retention policy is shipped: {TRAIN}, and give kvcache.retention.policy.path"
        )
    return str(paths[0])
