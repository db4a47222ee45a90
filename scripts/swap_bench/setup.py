"""Sizes, the text, and an engine per way to preempt."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import (
    LengthMix,
    LocalText,
    PythonDocs,
    RequestSpec,
    evaluation_documents,
)

NEVER, ALWAYS, BY_COST = VARIANTS = ("never", "always", "by_cost")
FORMS: Mapping[str, EngineOptions] = {
    "bf16": EngineOptions(),
    "int8": EngineOptions(kv_cache_dtype="int8"),
}
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests that do not fit at once.

    Attributes:
        context: tokens of each prompt.
        num_requests: all at once.
        num_fitting: prompts that the pool holds; what they generate beyond ``slack`` preempts.
        output_min, output_max: tokens that a request generates.
        slack: further slots of the pool.
    """

    context: int
    num_requests: int
    num_fitting: int
    output_min: int = 32
    output_max: int = 128
    slack: int = 64

    @property
    def num_slots(self) -> int:
        """Of the pool."""
        return self.num_fitting * self.context + self.slack


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        loads: served one after another, in both forms.
        release_requests, release_context: of the run that gives memory back.
        release_short, release_long: tokens that all but one of them generate, and that one.
        release_every: steps between two lines of its table.
    """

    loads: tuple[Load, ...] = (
        Load(context=128, num_requests=24, num_fitting=12),
        Load(context=1500, num_requests=8, num_fitting=4),
    )
    release_requests: int = 6
    release_context: int = 1500
    release_short: int = 16
    release_long: int = 400
    release_every: int = 32


QUICK = Sizes(
    loads=(
        Load(context=16, num_requests=6, num_fitting=3, output_min=12, output_max=16, slack=8),
        Load(context=48, num_requests=4, num_fitting=2, output_min=12, output_max=16, slack=8),
    ),
    release_requests=4,
    release_context=600,
    release_short=4,
    release_long=280,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is measured on.

    Attributes:
        repeats: passes, or turns, that count.
        ids: of the text that prompts are cut from.
    """

    model: LoadedModel
    pool: ExecutorPool
    sizes: Sizes
    repeats: int
    ids: list[int]

    def llm(self, options: EngineOptions) -> LLM:
        """All tokens high; engines share executors and weights."""
        return LLM(self.model, executors=self.pool, options=options)

    def requests(self, load: Load) -> list[RequestSpec]:
        """All at once, greedy, each with a passage and an output length of its own."""
        mix = LengthMix(
            prompt_lengths=(load.context,) * load.num_requests,
            output_min=load.output_min,
            output_max=load.output_max,
            seed=SEED,
        )
        return list(mix.requests(self.model.tokenizer.encode, self.ids))

    def systems(self, load: Load, form: str) -> dict[str, LLM]:
        """By the name in ``VARIANTS``, alike but for the host tier."""
        plain = replace(FORMS[form], num_kv_slots=load.num_slots, max_num_seqs=load.num_requests)
        tiered = replace(plain, num_host_slots=load.num_requests * (load.context + load.output_max))
        systems = {name: self.llm(plain if name == NEVER else tiered) for name in VARIANTS}
        host = systems[ALWAYS].engine.scheduler.host
        assert host is not None
        host.recompute_s = math.inf
        return systems


def build(model: LoadedModel, sizes: Sizes, *, repeats: int, data_dir: str | None) -> Bench:
    """Executors for ``model``, and the text: wiki_articles of ``data_dir``, or CPython's language reference.

    Raises:
        ValueError: the folder lacks the set.
    """
    if data_dir is None:
        documents = evaluation_documents(PythonDocs().documents())
    else:
        documents = LocalText(
            name="wiki_articles",
            data_dir=data_dir,
            folder="wiki_articles",
            pattern="*.txt",
            document_start="^",
        ).documents()
    ids = list(model.tokenizer.encode("\n\n".join(documents), add_special_tokens=False))
    return Bench(model=model, pool=build_pool("full", model), sizes=sizes, repeats=repeats, ids=ids)
