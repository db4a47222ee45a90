"""The systems of one comparison: four baselines and the chosen router, on one executor pool.

Baselines keep every KV entry as it is; the chosen router has the retention and the form of entries that are asked for.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.request_level import calibrate_on_requests, request_router_for
from tokenrouter.evaluation.throughput import num_tokens, run_requests
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import TokenTypeTable
from tokenrouter.models import LoadedModel
from tokenrouter.routers import (
    AllHighRouter,
    AllLowRouter,
    RequestLevelRouter,
    Router,
)
from tokenrouter.workloads import RequestSpec

BASELINES = ("all_high", "all_low", "request_level", "static_batch")
WARM_UP_TOKENS = 4
CALIBRATION_TOKENS = 12_288
NO_LOW_NOTE = (
    "all_low and request_level are left out: this pool has no low path (executor=int8 has)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Systems:
    """Ready and warm.

    Attributes:
        chosen: name of the router that the run is about.
        llms: by name, baselines first; the chosen one among them if it is a baseline, else last.
        scored: by name those whose quality is measured; request_level's is computed, where it is the
            chosen one with memory options from all_high and all_low with the same ones. With a budget
            the chosen router is another instance here, on an engine of its own, with thresholds for
            the windows; else all others are engines of ``llms``.
        request_router: decides per request, with the chosen router's budget; None where the pool
            has no low path.
        ranking_router: says how needy a window is, as ``scored`` sees it; ``request_router`` itself
            where there is no budget, None where that is None.
        notes: what was left out, and why; how a budget was met.
    """

    chosen: str
    llms: dict[str, LLM]
    scored: dict[str, LLM]
    request_router: RequestLevelRouter | None
    ranking_router: RequestLevelRouter | None
    notes: tuple[str, ...]

    @property
    def chosen_llm(self) -> LLM:
        """The engine of the chosen router."""
        return self.llms[self.chosen]


def without_memory(
    options: EngineOptions, requests: Sequence[RequestSpec], *, window_tokens: int = 0
) -> EngineOptions:
    """Every entry stays in full, in its own request's slots; a pool that is too small for that grows.

    Args:
        options: of a system that may evict, share or round; those that need one of these are left out as well.
        requests: each must fit the pool.
        window_tokens: length of the longest window of text or other prompt that must fit it; 0: none.
    """
    num_slots = options.num_kv_slots
    if num_slots is not None:
        lengths = [len(r.prompt_ids) + r.max_output_tokens for r in requests]
        num_slots = max([num_slots, window_tokens, *lengths])
    plain = replace(
        options,
        retention=None,
        kv_cache_dtype="auto",
        num_kv_slots=num_slots,
        prefix_sharing=False,
    )
    return plain.without_ignored()


def pool_note(options: EngineOptions, plain: EngineOptions, who: str) -> tuple[str, ...]:
    """That a pool had to grow for those that keep every entry; nothing where it did not.

    Args:
        options: of the run.
        plain: of ``without_memory``.
        who: of them, with its verb.
    """
    own, grown = options.num_kv_slots, plain.num_kv_slots
    if own is None or grown is None or grown == own:
        return ()
    return (
        f"Without eviction the longest request or window needs {grown:,} KV slots: {who} so many, and the run has "
        f"{own:,}. What they gain or lose by room is no effect of the router.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemsBuilder:
    """Builds engines that differ in router and scheduler only.

    Attributes:
        model, pool: shared by all systems.
        options: of every engine; static_batch changes the scheduler, baselines keep every KV entry as it is
            and compute their own.
        requests: the workload: warms up, and calibrates request_level.
        calibration_ids: passages on which a router with a budget sets its thresholds, of other
            documents than the requests and the evaluated windows.
        held_out: where it sets those for quality; None: quality is not measured.
        static_batch_size: of the baseline; None: as ``options`` say.
        most_tokens: of other prompts that are put to the systems, answer included.
    """

    model: LoadedModel
    pool: ExecutorPool
    options: EngineOptions
    requests: Sequence[RequestSpec]
    calibration_ids: Sequence[Sequence[int]]
    held_out: HeldOutWindows | None = None
    static_batch_size: int | None = None
    most_tokens: int = 0

    def llm(
        self,
        router: Router,
        options: EngineOptions | None = None,
        pool: ExecutorPool | None = None,
    ) -> LLM:
        """One engine; ``pool`` and ``options`` in place of the builder's."""
        return LLM(
            self.model,
            router=router,
            executors=pool or self.pool,
            options=options or self.options,
            calibration_ids=self.calibration_ids,
        )

    @property
    def plain_options(self) -> EngineOptions:
        """The baselines': without eviction they need slots for whole requests and windows."""
        if self.options.retention is None:
            return without_memory(self.options, ())
        window_tokens = self.held_out.window_tokens if self.held_out is not None else 0
        longest = max(window_tokens, self.most_tokens)
        return without_memory(self.options, self.requests, window_tokens=longest)

    @property
    def static_options(self) -> EngineOptions:
        """The baselines', in static batches."""
        size = self.static_batch_size or self.options.static_batch_size
        static = replace(self.plain_options, scheduler="static_batch", static_batch_size=size)
        return static.without_ignored()

    def chosen_name(self, router: Router) -> str:
        """The router's, with what is done to its KV where a baseline has the same router and does not do it."""
        if self.options.without_ignored() == self.plain_options or router.name not in BASELINES:
            return router.name
        retention = self.options.retention
        forms: list[str] = (
            [self.options.kv_cache_dtype] if self.options.kv_cache_dtype != "auto" else []
        )
        forms += ["prefix_sharing"] if self.options.prefix_sharing else []
        return "+".join([router.name, *([retention.policy.name] if retention else []), *forms])

    def build(self, router: Router, *, serve: bool = True) -> Systems:
        """All systems around ``router``.

        Args:
            router: the chosen one.
            serve: the systems will serve requests: the chosen router serves the whole workload once, which warms it up
                and measures its share of high tokens for request_level; the others warm up with short outputs. Else
                only what quality needs is built: request_level and static_batch are left out.

        Raises:
            ValueError: a router that the pool cannot run or that cannot be calibrated, or a request that is refused.
        """
        model, low = self.model, self.pool.low_name
        num_layers = model.config.num_layers
        router.use_for(model=model.name, model_hash=model.model_hash, low=low)
        router.use_kernels(self.pool.kernels)
        types = TokenTypeTable.from_tokenizer(self.model.tokenizer, self.model.config.vocab_size)
        for_windows = self.held_out.calibrated(router, types) if self.held_out else router
        if isinstance(router, RequestLevelRouter):
            calibrate_on_requests(router, types, self.requests, self.calibration_ids)
        chosen = self.llm(router)
        name = self.chosen_name(router)
        llms = {"all_high": self.llm(AllHighRouter(), self.plain_options)}
        request_router = ranking_router = None
        if "low" in self.pool.executors:
            llms["all_low"] = self.llm(AllLowRouter(), self.plain_options)
            request_router = ranking_router = request_router_for(router, num_layers)
            if for_windows is not router:
                ranking_router = request_router_for(for_windows, num_layers)
        scored = dict(llms)
        if not isinstance(router, RequestLevelRouter) or request_router is None:
            scored[name] = chosen if for_windows is router else self.llm(for_windows)
        elif name not in BASELINES:
            sides = (AllHighRouter(), AllLowRouter())
            scored |= {self.chosen_name(side): self.llm(side) for side in sides}
        if serve:
            self._serve(name, chosen, llms, request_router)
        notes = pool_note(self.options, self.plain_options, "all_high and the other baselines have")
        notes += () if for_windows is router else (self._budget_note(for_windows),)
        return Systems(
            chosen=name,
            # Assigning to a name that is there already keeps the baselines' order.
            llms=llms | {name: chosen},
            scored=scored,
            request_router=request_router,
            ranking_router=ranking_router,
            notes=notes if request_router else (NO_LOW_NOTE, *notes),
        )

    def _budget_note(self, router: Router) -> str:
        assert self.held_out is not None
        return (
            f"The budget of {router.name} has thresholds for text and others for requests: for KL, "
            f"perplexity and top-1 set on held-out passages of {self.held_out.window_tokens:,} tokens "
            f"({router.version}), for throughput on held-out passages as long as the requests."
        )

    def _serve(
        self,
        chosen_name: str,
        chosen: LLM,
        llms: dict[str, LLM],
        request_router: RequestLevelRouter | None,
    ) -> None:
        """Adds the systems that differ only while serving, and warms all of them up."""
        short = [
            replace(r, params=replace(r.params, max_tokens=WARM_UP_TOKENS)) for r in self.requests
        ]
        num_short = sum(name != chosen_name for name in (*llms, "static_batch"))
        has_own_request_level = request_router is not None and request_router is not chosen.router
        total = num_tokens(self.requests) + (num_short + has_own_request_level) * num_tokens(short)
        with progress("warm-up", total, unit="tokens") as advance:
            tick = partial(advance, chosen_name)
            share = run_requests(chosen, self.requests, tick).high_frac
            if request_router is not None and has_own_request_level:
                request_router.set_target(share)
                calibrate_on_requests(
                    request_router, chosen.token_types, self.requests, self.calibration_ids
                )
                llms["request_level"] = self.llm(request_router, self.plain_options)
            llms["static_batch"] = self.llm(AllHighRouter(), self.static_options)
            for name, llm in llms.items():
                if name != chosen_name:
                    run_requests(llm, short, partial(advance, name))


def calibration_passages(
    requests: Sequence[RequestSpec], text_ids: Sequence[int], *, seed: int
) -> list[list[int]]:
    """Random passages of a text, as long as requests with outputs; 12,288 tokens or more.

    Args:
        requests: whose lengths the passages have, in turn; shorter where the text is.
        text_ids: the side of the text to calibrate on.
        seed: of the draw.
    """
    draw = random.Random(f"calibration {seed}")
    lengths = itertools.cycle([len(r.prompt_ids) + (r.params.max_tokens or 0) for r in requests])
    passages: list[list[int]] = []
    while sum(map(len, passages)) < CALIBRATION_TOKENS:
        length = min(next(lengths), len(text_ids))
        start = draw.randrange(len(text_ids) - length + 1)
        passages.append(list(text_ids[start : start + length]))
    return passages
