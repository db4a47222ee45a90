"""The part of a comparison that asks for what stands far back in a prompt: evaluation.retrieval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import EngineOptions
from tokenrouter.engine.memory import slots_for
from tokenrouter.evaluation.request_level import choose_high, prompt_shares
from tokenrouter.evaluation.retrieval.measure import (
    Answers,
    Probe,
    make_probes,
    measure_retrieval,
)
from tokenrouter.evaluation.retrieval.results import (
    RetrievalRow,
    mix_answers,
    retrieval_by_system,
    retrieval_rows,
    retrieval_section,
    retrieval_table,
)
from tokenrouter.evaluation.retrieval.settings import RetrievalSettings
from tokenrouter.evaluation.systems import Systems
from tokenrouter.evaluation.tables import as_csv
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Router
from tokenrouter.tasks import build, checks
from tokenrouter.tasks.parts import Part
from tokenrouter.telemetry import RunFolder

RETRIEVAL_NOTE = (
    "Retrieval: greedy answers that come out exactly, in percent, by length of the prompt in tokens and by depth (0: "
    "the answer stands at its beginning, 1: at its end), ± standard error; drop against all_high in percentage points, "
    "of the same prompts. A tie: luck alone parts the prompts on which the two differ at least so unevenly in 5 of 100 "
    "cases (McNemar, exact)."
)
REQUEST_LEVEL_NOTE = (
    "request_level's answers are computed, not run: all_high's to the neediest prompts and all_low's to the others, up "
    "to the run's share of high tokens in them ({:.1%} of the tokens, as near as whole prompts come)."
)


def load_settings(cfg: DictConfig) -> RetrievalSettings | None:
    """conf/evaluation's ``retrieval``; None where nothing is asked.

    Raises:
        ValueError: no such settings, a value out of its range, or a prompt longer than model.max_model_len, where that
            is set.
    """
    node = cfg.evaluation.retrieval
    if node is None:
        return None
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ValueError(
            f"evaluation.retrieval must hold options or be null, got {node!r}: choose evaluation=retrieval, and set "
            "single ones, such as evaluation.retrieval.lengths=[256]"
        )
    settings: RetrievalSettings = instantiate(node, _convert_="object")
    if (most := cfg.model.get("max_model_len")) is not None:
        settings.check_length(most)
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Probes that the engines can take."""

    probes: Sequence[Probe]

    @property
    def max_tokens(self) -> int:
        """Of the longest one, answer included."""
        return max(len(probe.item.ids) for probe in self.probes)


def make_questions(
    settings: RetrievalSettings | None,
    options: EngineOptions,
    router: Router,
    model: LoadedModel,
    *,
    text_ids: Sequence[int],
    seed: int,
) -> Questions | None:
    """The probes of ``settings``; None where there are none.

    Args:
        settings: or None.
        options: of the run's engine.
        router: the run's.
        model: with a tokenizer.
        text_ids: of the other text in the prompts.
        seed: of the draws.

    Raises:
        ValueError: a prompt that is too short for what it asks, or too long for the model or the run's pool.
    """
    if settings is None:
        return None
    settings.check_length(model.config.max_model_len)
    probes = make_probes(settings, build.encoder(model.tokenizer), text_ids, seed=seed)
    made = Questions(probes=probes)
    needed = slots_for(options.retention, router.routes(model.config.num_layers))
    checks.check_requests(
        [made.max_tokens],
        options.num_kv_slots,
        needed,
        shorter="shorter evaluation.retrieval.lengths",
    )
    return made


def measure(questions: Questions, systems: Systems) -> dict[str, Answers]:
    """Answers by system, on the engines that scored text; request_level's are computed from all_high and all_low."""
    probes = questions.probes
    names = [*(n for n in ("all_high", "all_low") if n in systems.llms), systems.chosen]
    llms = {name: systems.scored.get(name, systems.llms[name]) for name in names}
    measured = measure_retrieval(llms, probes)
    router = systems.ranking_router
    if router is None or "request_level" in measured:
        return measured
    prompts = [probe.prompt_ids for probe in probes]
    weights = [len(probe.item.ids) for probe in probes]
    shares = prompt_shares(router, systems.llms["all_high"].token_types, prompts)
    goes_high = choose_high(router, shares, weights, measured[systems.chosen].high_frac)
    num_high = sum(weight for weight, is_high in zip(weights, goes_high, strict=True) if is_high)
    computed = mix_answers(
        measured["all_high"], measured["all_low"], goes_high, num_high / sum(weights)
    )
    order = dict.fromkeys(["all_high", "all_low", "request_level", systems.chosen])
    return {name: measured.get(name, computed) for name in order}


def report(
    folder: RunFolder, questions: Questions, measured: Mapping[str, Answers], chosen: str
) -> Part:
    """Writes retrieval.csv; returns what the run says of it."""
    rows = retrieval_rows(questions.probes, measured)
    folder.write_text("retrieval.csv", as_csv(RetrievalRow, rows))
    notes = [RETRIEVAL_NOTE]
    if "request_level" in measured and chosen != "request_level":
        notes.append(REQUEST_LEVEL_NOTE.format(measured["request_level"].high_frac))
    return Part(
        name="retrieval",
        tables=(retrieval_table(rows, chosen),),
        notes=tuple(notes),
        section=retrieval_section(rows, chosen),
        by_system=retrieval_by_system(rows),
    )
