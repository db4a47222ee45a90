"""Everything that is built before anything is measured: workloads and systems."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import HeavyHitter, RetentionOptions
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import (
    LengthMix,
    PythonDocs,
    RequestSpec,
    UniformRequests,
    Workload,
    evaluation_documents,
)
from tokenrouter.workloads.synthetic import gamma_arrivals

TOKEN_LEVEL = "fcfs"
CONTINUOUS: Mapping[str, EngineOptions] = {
    TOKEN_LEVEL: EngineOptions(),
    "prefill_first": EngineOptions(phase_order="prefill_first"),
    "decode_first": EngineOptions(phase_order="decode_first"),
    "shortest_first": EngineOptions(scheduler="shortest_first"),
}
STATIC: Mapping[str, EngineOptions] = {
    "static_batch": EngineOptions(scheduler="static_batch"),
    "static_prefill_first": EngineOptions(scheduler="static_batch", phase_order="prefill_first"),
}
OUTPUT_MIN, SEED = 8, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        prompt_lengths: tokens per prompt, in turn; mixed_lengths has each of them twice.
        crowd_requests: of crowd and poisson, in a drawn order; more than there are seats.
        output_max, crowd_output_max: outputs have 8 tokens to so many.
        load_frac: rate of poisson's arrivals over the rate at which the token level serves crowd.
        seats: requests that run at once.
        static_batch: requests of the static batches that ratios without a number in their name are taken against: the
            old way as a user would find it.
        static_batches: of all static batches that run; ``static_batch`` is added where it is not among them.
        decode_batch, decode_context, decode_steps: requests that decode together, the tokens of their prompts, and
            the steps of a turn.
    """

    prompt_lengths: tuple[int, ...] = (20, 30, 50, 80, 120, 200, 500, 1000)
    output_max: int = 128
    crowd_requests: int = 48
    crowd_output_max: int = 96
    load_frac: float = 0.8
    uniform_requests: int = 8
    uniform_prompt_tokens: int = 200
    uniform_output_tokens: int = 64
    seats: int = 32
    static_batch: int = 8
    static_batches: tuple[int, ...] = (8, 16, 32)
    decode_batch: int = 8
    decode_context: int = 2048
    decode_steps: int = 24

    @property
    def baselines(self) -> dict[int, tuple[str, ...]]:
        """By static batch, ``static_batch`` first, its systems in both orders; other sizes stand in the names."""
        others = sorted({*self.static_batches} - {self.static_batch})
        return {self.static_batch: tuple(STATIC)} | {
            size: tuple(f"{name}_{size}" for name in STATIC) for size in others
        }

    @property
    def schedules(self) -> dict[str, EngineOptions]:
        """What each system's engine does, by the system's name: token-level schedules, then static batches."""
        found = {
            name: replace(options, max_num_seqs=self.seats) for name, options in CONTINUOUS.items()
        }
        for size, names in self.baselines.items():
            for name, options in zip(names, STATIC.values(), strict=True):
                found[name] = replace(options, max_num_seqs=self.seats, static_batch_size=size)
        return found


QUICK = Sizes(
    prompt_lengths=(20, 50, 120),
    output_max=12,
    crowd_requests=6,
    crowd_output_max=12,
    uniform_requests=2,
    uniform_prompt_tokens=20,
    uniform_output_tokens=8,
    seats=4,
    static_batch=2,
    static_batches=(2, 4),
    decode_batch=2,
    decode_context=64,
    decode_steps=4,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Systems and requests.

    Attributes:
        repeats: passes, or turns, that count.
        ids: of the evaluation text.
        requests: of the workloads in which all arrive at once, by name.
        systems: all_high with each of ``Sizes.schedules``, by its name.
        kv: all_high by its entries, with a seat for each request that decodes: all full, all int8, and ``small``, as
            experiment=small_kv keeps them: old ones in int8, chosen among by attention that is observed.
    """

    sizes: Sizes
    repeats: int
    ids: list[int]
    requests: dict[str, list[RequestSpec]]
    systems: dict[str, LLM]
    kv: dict[str, LLM]


def build(model: LoadedModel, sizes: Sizes, *, repeats: int) -> Bench:
    """Workloads and systems for ``model``, on one pool of executors.

    Raises:
        ValueError: the static batch is larger than the number of seats.
    """
    pool = build_pool("full", model)
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    ids = list(encode("\n\n".join(evaluation_documents(PythonDocs().documents()))))

    def llm(options: EngineOptions) -> LLM:
        return LLM(model, executors=pool, options=options)

    kv = EngineOptions(max_num_seqs=sizes.decode_batch)
    return Bench(
        sizes=sizes,
        repeats=repeats,
        ids=ids,
        requests={name: w.requests(encode, ids) for name, w in make_workloads(sizes).items()},
        systems={name: llm(options) for name, options in sizes.schedules.items()},
        kv={
            "full": llm(kv),
            "int8": llm(replace(kv, kv_cache_dtype="int8")),
            "small": llm(replace(kv, retention=small_kv(model.config.num_layers))),
        },
    )


def small_kv(num_layers: int) -> RetentionOptions:
    """As conf/experiment/small_kv.yaml has them, in fewer groups where the model has fewer layers."""
    return RetentionOptions(
        policy=HeavyHitter(evicted_frac=0.0, max_entries=2944, recent_frac=0.8),
        window=128,
        layers=30,
        groups=min(5, num_layers),
        compress="old",
    )


def make_workloads(sizes: Sizes) -> dict[str, Workload]:
    """Those in which all requests arrive at once, by name."""
    lengths = sizes.prompt_lengths
    crowd = [lengths[i % len(lengths)] for i in range(sizes.crowd_requests)]
    random.Random(SEED).shuffle(crowd)

    def mix(prompt_lengths: Sequence[int], output_max: int) -> LengthMix:
        return LengthMix(
            prompt_lengths=prompt_lengths, output_min=OUTPUT_MIN, output_max=output_max, seed=SEED
        )

    return {
        "mixed_lengths": mix(lengths * 2, sizes.output_max),
        "crowd": mix(crowd, sizes.crowd_output_max),
        "uniform": UniformRequests(
            num_requests=sizes.uniform_requests,
            prompt_tokens=sizes.uniform_prompt_tokens,
            output_tokens=sizes.uniform_output_tokens,
            seed=SEED,
        ),
    }


def arriving(requests: Sequence[RequestSpec], rate_requests_s: float) -> list[RequestSpec]:
    """The same requests, each at its time of a Poisson process; the first one at 0."""
    times = gamma_arrivals(len(requests), rate_requests_s, 1.0, seed=SEED)
    return [replace(r, arrival_s=at_s) for r, at_s in zip(requests, times, strict=True)]
