"""Mistakes that show before anything is measured: in the config by itself, or beside the loaded model."""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from tokenrouter.checks import check_count, check_flag, check_integer
from tokenrouter.kernels import BACKENDS
from tokenrouter.tasks import groups
from tokenrouter.tasks.accuracy import task_settings

_HINTS = {"model.name": "<hub name, local folder or .gguf file>"}
_SCORES = ("tokenrouter.tasks.evaluate.run", "tokenrouter.tasks.tradeoff.run")
_HYDRAS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def check_config(cfg: DictConfig) -> None:
    """Refuse what cannot run whatever is loaded.

    Args:
        cfg: the composed config.

    Raises:
        ValueError: a mandatory value is missing, an option is unknown to the target that it is for or, where a part has
            none, to ``groups.KEYS``, ``evaluation.slo`` holds no options, ``kernels.backend`` names none,
            ``evaluation.num_repeats`` or ``num_threads`` is no count, ``seed`` no integer, a flag neither true nor
            false, or what is asked of evaluation.tasks is out of its range.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        wanted = " ".join(f"{key}={_HINTS.get(key, '<value>')}" for key in missing)
        raise ValueError(f"{', '.join(missing)} has no value yet; add to the command: {wanted}")
    for path, node in _targets(cfg):
        try:
            target = get_object(node["_target_"])
        except ImportError:
            continue  # Hydra says so with the config's key when it builds the object
        check_options(path, map(str, node), target)
    _warn_of_unread_features(cfg)
    _warn_of_priorities(cfg)
    _warn_of_unread_tasks(cfg)
    for path, known in groups.KEYS.items():
        _refuse_unknown(path, map(str, cfg[path]), list(known), owner=path)
    if (backend := cfg.kernels.backend) not in BACKENDS:
        close = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        meant = f"; did you mean kernels.backend={close[0]}?" if close else ""
        raise ValueError(
            f"kernels.backend={backend} is no backend; choose one of: {', '.join(BACKENDS)}{meant}"
        )
    if not isinstance(slo := cfg.evaluation.slo, DictConfig):
        raise ValueError(
            f"evaluation.slo must hold options, got {slo!r}: set single ones, such as evaluation.slo.ttft_scale=8"
        )
    for name in ("log_decisions", "skip_finished", "chat"):
        if name in cfg:
            check_flag(name, cfg[name])
    task_settings(cfg)
    check_integer("seed", cfg.seed)
    _check_objective(cfg.objective)
    if cfg.num_threads is not None:
        check_count("num_threads", cfg.num_threads, 1)
    num_repeats = cfg.evaluation.num_repeats
    if type(num_repeats) is not int or num_repeats < 1:
        raise ValueError(
            f"evaluation.num_repeats must be at least 1 (passes over the requests), got {num_repeats!r}"
        )


def _check_objective(objective: Any) -> None:
    paths = objective if isinstance(objective, ListConfig) else [objective]
    if objective is not None and not (paths and all(isinstance(path, str) for path in paths)):
        raise ValueError(
            f"objective={objective} must be null, a dotted path in metrics.json such as quality.kl_mean_nats, or a "
            "list of them"
        )


def _warn_of_unread_features(cfg: DictConfig) -> None:
    """Says so where ``features=`` names a set and no other part of the config refers to it."""
    if cfg.get("features") is None:
        return
    others = {key: value for key, value in cfg.items() if key != "features"}
    if "features.names" not in OmegaConf.to_yaml(OmegaConf.create(others), resolve=False):
        warnings.warn(
            "options without effect: features (no part of this run asks for features.names: task=collect and "
            "task=train_router do, and a router's config may, by an option of ${features.names}). A trained router "
            "has the features that it was trained with",
            stacklevel=2,
        )


def _warn_of_priorities(cfg: DictConfig) -> None:
    """Says so where a scheduler by priority finds none to tell apart, or priorities find no such scheduler."""
    priorities, policy = cfg.workload.get("priorities"), cfg.scheduler.policy
    are_many = isinstance(priorities, ListConfig) and len(set(priorities)) > 1
    if policy == "priority" and not are_many:
        warnings.warn(
            "scheduler=priority serves as fcfs does: all requests have the same priority. Give them some, such as "
            "workload.priorities=[0,1]",
            stacklevel=2,
        )
    elif policy != "priority" and priorities is not None:
        warnings.warn(
            f"options without effect: workload.priorities (scheduler {policy} ignores them: choose scheduler=priority)",
            stacklevel=2,
        )


def _warn_of_unread_tasks(cfg: DictConfig) -> None:
    """Says so where lm-eval's tasks or retrieval are asked for and nothing measures them, or the reverse."""
    evaluation = cfg.evaluation
    if evaluation.get("tasks") and cfg.task._target_ not in _SCORES:
        warnings.warn(
            "options without effect: evaluation.tasks (this task measures no accuracy: choose task=evaluate or "
            "task=tradeoff)",
            stacklevel=2,
        )
    if evaluation.get("retrieval") and cfg.task._target_ not in _SCORES:
        warnings.warn(
            "options without effect: evaluation.retrieval (this task asks nothing: choose task=evaluate or "
            "task=tradeoff)",
            stacklevel=2,
        )
    given = [name for name in groups.TASKS if name != "tasks" and evaluation.get(name)]
    if given and not evaluation.get("tasks"):
        names = ", ".join(f"evaluation.{name}" for name in given)
        warnings.warn(
            f"options without effect: {names} (no task is asked for: set evaluation.tasks, or choose "
            "evaluation=lm_eval)",
            stacklevel=2,
        )


def check_options(path: str, options: Iterable[str], target: Callable[..., Any]) -> None:
    """Refuse options that ``target`` does not take.

    Args:
        path: of the config's node, for messages.
        options: its keys.
        target: a class or function, which is not called.

    Raises:
        ValueError: an unknown option, with those that ``target`` has.
    """
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    _refuse_unknown(path, options, known, owner=target.__name__)


def check_windows(
    window_tokens: int,
    max_model_len: int,
    num_slots: int | None,
    slots_for: Callable[[int], int] = int,
) -> None:
    """Refuse windows of text that no engine takes whole.

    Args:
        window_tokens: length of an evaluation window.
        max_model_len: the model's length in tokens.
        num_slots: of the KV pool; None holds any request.
        slots_for: the most slots that so many tokens hold at once: fewer where a retention policy bounds them.

    Raises:
        ValueError: a window is longer than the model's length or the pool.
    """
    if window_tokens > max_model_len:
        raise ValueError(
            f"evaluation.window_tokens={window_tokens} is longer than the model's length of {max_model_len} tokens: "
            f"set evaluation.window_tokens to at most {max_model_len}, or raise model.max_model_len where it is set"
        )
    if num_slots is not None and (needed := slots_for(window_tokens)) > num_slots:
        raise ValueError(
            f"a window of {window_tokens} tokens needs {needed} KV slots, and the pool has {num_slots}: lower "
            "evaluation.window_tokens or raise kvcache.num_slots"
        )


def check_requests(
    lengths: Iterable[int],
    num_slots: int | None,
    slots_for: Callable[[int], int] = int,
    *,
    shorter: str = "shorter requests (workload.max_prompt_tokens, workload.max_output_tokens)",
) -> None:
    """Refuse requests that the KV pool cannot hold even one at a time.

    Args:
        lengths: prompt and output tokens of each.
        num_slots: of the pool; None holds any request.
        slots_for: as in ``check_windows``.
        shorter: what to choose instead.

    Raises:
        ValueError: the longest one needs more slots at once than there are.
    """
    longest = max(lengths, default=0)
    if num_slots is not None and (needed := slots_for(longest)) > num_slots:
        raise ValueError(
            f"a request of {longest} tokens, those to generate included, needs {needed} KV slots, and the pool has "
            f"{num_slots}: raise kvcache.num_slots, or choose {shorter}"
        )


def _refuse_unknown(path: str, options: Iterable[str], known: list[str], *, owner: str) -> None:
    for option in options:
        if option in _HYDRAS or option in known:
            continue
        close = difflib.get_close_matches(option, known, n=1)
        meant = f"; did you mean {path}.{close[0]}?" if close else ""
        raise ValueError(
            f"{path}.{option} is no option of {owner}; its options: {', '.join(known) or 'none'}{meant}"
        )


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Every node with a ``_target_``, and its dotted path."""
    if isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _targets(item, f"{path}[{index}]")
    elif isinstance(node, DictConfig):
        if "_target_" in node:
            yield path, node
        for key in node:
            yield from _targets(node[key], f"{path}.{key!s}".removeprefix("."))
