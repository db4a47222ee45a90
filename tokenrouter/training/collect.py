"""Labels and features of text, window by window, into a data set that a later run goes on with.

N tokens of a window.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tokenrouter.features import (
    FEATURES,
    FeatureExtractor,
    TextSignals,
    TokenTypeTable,
    feature_specs,
    needs_signals,
    of_one_phase,
    sequence_batch,
)
from tokenrouter.features.base import DecisionPoint
from tokenrouter.training.entropies import previous_logits
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import LabelMaker
from tokenrouter.training.low_path import LowPath
from tokenrouter.training.storage import LabelStore, WindowRows
from tokenrouter.training.windows import Window
from tokenrouter.workloads import TextSource

STORABLE = frozenset({"tokens", "prompt_length", "prompt", "phase", "logits"})
"""What a stored feature may depend on: a window of text has no engine, so no history or load. Logits are those of the
high path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectOptions:
    """``collect`` of conf/task/collect.

    Attributes:
        num_tokens: at least so many, over all sources.
        window_tokens: of a window, which is a request of its own.
        entropy_tokens: about so many more, over all sources, get no labels but the entropy behind each, see
            ``entropies``; as far as the texts have them. 0: none. Labels of retention have no use for them.
        texts: sources by name.
        sources: which of them, in equal parts; None: the run's data.
        features: names; None: all that can be stored.
        after_layer: layers that run high for every token before a router is asked: features of the hidden state are
            those behind them. 0: it is asked before the forward.
        path: folder of the data set; None: one by what is collected.

    Raises:
        ValueError: a count that is no integer above 0, fewer tokens than a window, or a feature that cannot be stored.
    """

    num_tokens: int
    window_tokens: int
    entropy_tokens: int = 0
    texts: Mapping[str, TextSource] = field(default_factory=dict)
    sources: Sequence[str] | None = None
    features: Sequence[str] | None = None
    after_layer: int = 0
    path: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "window_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"collect.{name}={value!r} must be an integer of at least 1")
        if type(self.entropy_tokens) is not int or self.entropy_tokens < 0:
            raise ValueError(
                f"collect.entropy_tokens={self.entropy_tokens!r} must be an integer of at least 0"
            )
        if self.num_tokens < self.window_tokens:
            raise ValueError(
                f"collect.num_tokens={self.num_tokens} is less than one window and would give an empty data set: set "
                f"it to at least collect.window_tokens={self.window_tokens}"
            )
        if type(self.after_layer) is not int or self.after_layer < 0:
            raise ValueError(
                f"collect.after_layer={self.after_layer!r} must be an integer of at least 0"
            )
        stored_features(self.features, self.after_layer)


def stored_features(names: Sequence[str] | None, after_layer: int = 0) -> tuple[str, ...]:
    """``names``, or all features that can be stored.

    Args:
        names: of features.
        after_layer: layers that have run before a router is asked.

    Raises:
        ValueError: an unknown name, or a feature that needs a running engine or another decision point.
    """
    point: DecisionPoint = "after_layer_k" if after_layer else "pre_forward"
    choices = [
        name
        for name, spec in FEATURES.items()
        if spec.depends_on <= STORABLE and point in spec.decision_points
    ]
    if names is None:
        return tuple(choices)
    specs = feature_specs(names)
    if missing := [spec for spec in specs if spec.name not in choices]:
        needs = ", ".join(sorted(set[str]().union(*(s.depends_on for s in missing)) - STORABLE))
        why = f"it depends on {needs}, which only a running engine has"
        if not needs:
            why = "it exists after some layers: set collect.after_layer"
        raise ValueError(
            f"collect.features: {', '.join(s.name for s in missing)} cannot be stored with text ({why}); these can: "
            f"{', '.join(choices)}"
        )
    return tuple(names)


def about(
    *,
    maker: LabelMaker,
    decoder: DifferentiableDecoder,
    low: LowPath,
    features: Sequence[str],
    options: CollectOptions,
    texts: Mapping[str, str],
    seed: int,
) -> dict[str, Any]:
    """What determines every row of a data set, as plain values; ``texts``: hash by name.

    Raises:
        ValueError: ``options.after_layer`` leaves no layer.
    """
    if options.after_layer >= (num_layers := decoder.config.num_layers):
        raise ValueError(
            f"collect.after_layer={options.after_layer} leaves none of the model's {num_layers} layers to route: set "
            f"it to at most {num_layers - 1}"
        )
    given = {f.name: getattr(maker, f.name) for f in fields(maker)}  # type: ignore[arg-type]
    plain = {k: v if isinstance(v, bool | int | float | str) else list(v) for k, v in given.items()}
    return {
        "label": maker.name,
        "label_options": plain,
        "label_columns": list(maker.columns(decoder.config)),
        "kind": maker.kind,
        "features": list(features),
        "model": decoder.model.name,
        "model_hash": decoder.model.model_hash,
        "executor": low.executor,
        "executor_version": low.version,
        "window_tokens": options.window_tokens,
        "texts": dict(texts),
        "seed": seed,
        **({"after_layer": options.after_layer} if options.after_layer else {}),
    }


def folder_name(about: Mapping[str, Any]) -> str:
    """A name for a data set's folder: label, low path, and a hash of all that determines its rows."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"{about['label']}_{about['executor']}_{digest[:12]}"


def collect(
    windows: Iterable[Window],
    *,
    store: LabelStore,
    maker: LabelMaker,
    decoder: DifferentiableDecoder,
    features: Sequence[str],
    token_types: TokenTypeTable,
    on_done: Callable[[Window, bool], None],
    after_layer: int = 0,
) -> None:
    """Makes and stores the windows that are not there yet.

    Args:
        windows: of one or several texts.
        store: opened. What is finished stays when this is interrupted.
        maker: of the labels.
        decoder: of the model and its low path.
        features: names that ``stored_features`` allows.
        token_types: of the vocabulary.
        on_done: called after each window, with whether it was there already.
        after_layer: as ``CollectOptions``.

    Raises:
        ValueError: a window that the maker refuses, or a feature or label that is not finite.
    """
    finished = store.finished()
    for window in windows:
        was_there = window.name in finished
        if not was_there:
            store.write(
                window.name, make_rows(window, maker, decoder, features, token_types, after_layer)
            )
        on_done(window, was_there)


def make_rows(
    window: Window,
    maker: LabelMaker,
    decoder: DifferentiableDecoder,
    features: Sequence[str],
    token_types: TokenTypeTable,
    after_layer: int,
) -> WindowRows:
    """Labels and features of one window; features of a phase are NaN for tokens of the other."""
    batch = sequence_batch(
        window.ids_N.tolist(),
        prompt_len=window.prompt_len,
        token_types=token_types,
    )
    signals = None
    if after_layer or needs_signals(features):
        trace = decoder.trace(window.ids_N)
        if needs_signals(features):
            signals = TextSignals(token_types, previous_logits(decoder, trace))
        if after_layer:
            batch = replace(batch, hidden_TE=trace.inputs[after_layer])
    extractor = FeatureExtractor(features, token_types, signals, of_one_phase(features))
    return WindowRows(
        text=window.text,
        split=window.split,
        window=window.number,
        prompt_len=window.prompt_len,
        columns={
            "document": window.document_N,
            "position": batch.positions_T,
            "token_id": batch.ids_T,
            "phase": batch.phase_T,
            "prefix_hash": batch.prefix_hash_T,
        },
        features_NF=extractor.extract(batch).values_TF,
        label_NC=maker(decoder, window.ids_N, window.seed),
    )
