"""The library's front door: ``LLM(model, router=..., executors=...).generate(prompts, SamplingParams(...))``."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenrouter.engine import calibration
from tokenrouter.engine.admission import Prompt, as_prompts
from tokenrouter.engine.build import build_engine, token_types_of
from tokenrouter.engine.feed import Feed, Offer, one_each
from tokenrouter.engine.options import EngineOptions
from tokenrouter.engine.probe import served_inputs
from tokenrouter.engine.retention_notes import RetentionWatch
from tokenrouter.executors import ExecutorPool, PoolSpec, build_pool
from tokenrouter.models import LoadedModel, load_model
from tokenrouter.outputs import RequestOutput
from tokenrouter.routers import Router, make_router
from tokenrouter.sampling_params import SamplingParams

ScoreSink = Callable[[int, int, Tensor], None]


class LLM:
    """A model with a router and a pool of executors, and an engine that runs them. For one thread at a time.

    Args:
        model: a LoadedModel, or what ``load_model`` takes.
        router: a Router, or the name of one with its default options.
        executors: a built pool, a PoolSpec, or the name of one (``full``, ``int8``, ``int8_smooth``, ``int8_shared``,
            ``int8_weight``, ``int4``, ``sparse``, ``int8_sparse``).
        dtype: of the high path, when ``model`` is a name.
        max_model_len: a shorter limit than the model's own, when ``model`` is a name.
        options: scheduling, dispatch and memory; see EngineOptions.
        calibration_ids: token sequences on which a router with a budget sets its thresholds; None: the default text.

    Raises:
        ValueError: unknown names; a router with a feature that does not exist where it decides, or with types of
            tokens and a model without a tokenizer; a router with a route that is not built yet; a calibration that is
            impossible.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        router: Router | str = "all_high",
        executors: ExecutorPool | PoolSpec | str = "full",
        *,
        dtype: str | torch.dtype = "bfloat16",
        max_model_len: int | None = None,
        options: EngineOptions | None = None,
        calibration_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.router = make_router(router) if isinstance(router, str) else router
        self.router.check()
        self.model = (
            load_model(model, dtype=dtype, max_model_len=max_model_len)
            if isinstance(model, str)
            else model
        )
        self.pool = (
            executors if isinstance(executors, ExecutorPool) else build_pool(executors, self.model)
        )
        self.router.use_for(
            model=self.model.name, model_hash=self.model.model_hash, low=self.pool.low_name
        )
        self.router.use_kernels(self.pool.kernels)
        self.options = options or EngineOptions()
        self.token_types = token_types_of(self.model, self.router)
        serve = partial(
            served_inputs, self.router, self.model, self.pool, self.token_types, self.options
        )
        calibration.calibrate(
            self.router, self.token_types, self.model.tokenizer, calibration_ids, serve
        )
        self.engine = build_engine(
            self.model, self.router, self.pool, self.token_types, self.options
        )
        self._retention_watch = RetentionWatch(self.options.retention, self.engine.stats)
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer; None for a model without text."""
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the outputs in their order.

        A refused prompt does not stop the others: its output has ``error`` set and no completions. When every prompt
        is refused, the first refusal is raised. Where ``max_num_waiting`` bounds the engine's queue, prompts enter it
        as it has room, in their order; they arrive, and their queue time begins, with the call.

        Args:
            prompts: one prompt or several, each text or token ids.
            params: for all prompts, or one per prompt.
            priority: for all prompts, or one per prompt; lower goes first, with the scheduler ``priority``.
            use_tqdm: show a progress bar.

        Raises:
            ValueError: all prompts were refused, numbers of prompts and params or priorities differ, or ``prompts`` is
                neither a prompt nor a sequence of them.
        """
        final: dict[str, RequestOutput] = {}
        feed = self._feed(as_prompts(prompts), params, priority, stream=False)
        order = feed.request_ids
        with tqdm(total=len(order), desc="generate", disable=not use_tqdm, unit="request") as bar:
            for output in self._run(feed):
                final[output.request_id] = output
                bar.update()
        self._retention_watch.check()
        return [final[request_id] for request_id in order]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """As ``generate``, but yields a request's state after each of its tokens; ids count up over the LLM's life.

        Joined ``delta`` texts equal the final text. Stopping the iteration early aborts what is unfinished. Several
        streams may be read in turns, and ``generate`` or ``score`` called between: all run in one batch.
        """
        yield from self._run(self._feed(as_prompts(prompts), params, priority, stream=True))
        self._retention_watch.check()

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes conversations (one, or several) in the model's chat template."""
        return self.generate(self.render_chat(messages), params, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]]
    ) -> list[list[int]]:
        """Token ids of conversations, ready for the assistant's answer.

        Raises:
            ValueError: no tokenizer, no chat template or no message.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"model {self.model.name!r} has no tokenizer: use generate with token ids"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"model {self.model.name!r} has no chat template: use generate with a prompt of its format"
            )
        if not messages:
            raise ValueError("chat needs at least one message")
        single = isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        texts = [
            self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in conversations
        ]
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        sink: ScoreSink,
        prefill_len: int | None = None,
        logits_from: Sequence[int] | None = None,
    ) -> None:
        """Teacher forcing: runs given tokens through the serving path and hands over the logits.

        Args:
            sequences: token ids.
            sink: called with (index of the sequence, position of the first row, float32 logits ``[rows, V]``). Those at
                position p predict token p + 1. Rows must be used or copied before it returns.
            prefill_len: None: every token goes through prefill chunks, and every position is handed over. Else this
                many tokens are the prompt, every later one is fed alone through decode, and positions from
                ``prefill_len - 1`` on are handed over.
            logits_from: without ``prefill_len``: of each sequence the first position that is handed over. What lies
                before costs no lm_head, and with ``prefix_sharing`` may be another sequence's. None: 0 of all.

        Raises:
            ValueError: a sequence is refused, or ``prefill_len`` or ``logits_from`` lies outside it.
        """
        first = [0] * len(sequences) if logits_from is None else logits_from
        if prefill_len is not None and logits_from is not None:
            raise ValueError(
                "logits_from and prefill_len exclude each other: leave one of them out"
            )
        offers = []
        for index, (ids, start) in enumerate(zip(sequences, first, strict=True)):
            if not 0 <= start < max(len(ids), 1):
                raise ValueError(
                    f"logits_from {start} must lie in 0 .. {len(ids) - 1}, the positions of sequence {index}"
                )
            split = len(ids) if prefill_len is None else prefill_len
            if not 1 <= split <= len(ids):
                raise ValueError(
                    f"prefill_len {split} must lie in 1 .. {len(ids)}, the length of sequence {index}"
                )
            request_id = f"score-{next(self._ids)}"
            add = partial(
                self.engine.add_request,
                request_id,
                ids[:split],
                SamplingParams(temperature=0.0, detokenize=False),
                forced_ids=ids[split:],
                logits_sink=partial(sink, index),
                wants_all_logits=prefill_len is None,
                logits_from=start,
                stream=False,
            )
            offers.append(Offer(request_id=request_id, prompt=ids, add=add))
        for _ in self._run(Feed(offers, may_refuse=False)):
            pass

    def _feed(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        *,
        stream: bool,
    ) -> Feed:
        """Requests for ``prompts``, which all arrive now; nothing is queued yet."""
        arrival_s, offers = time.perf_counter(), []
        given = SamplingParams() if params is None else params
        all_params = one_each(given, len(prompts), "sampling params")
        priorities = one_each(priority, len(prompts), "priorities")
        for prompt, wanted, urgency in zip(prompts, all_params, priorities, strict=True):
            request_id = str(next(self._ids))
            add = partial(
                self.engine.add_request,
                request_id,
                prompt,
                wanted,
                priority=urgency,
                arrival_s=arrival_s,
                stream=stream,
            )
            offers.append(Offer(request_id=request_id, prompt=prompt, add=add))
        return Feed(offers, may_refuse=True)

    @contextmanager
    def _undone_if_it_fails(self, order: Sequence[str]) -> Iterator[None]:
        """Aborts the requests of ``order`` when the block raises or is left early."""
        try:
            yield
        except BaseException:
            for request_id in order:
                self.engine.abort(request_id, silent=True)
            raise

    def _run(self, feed: Feed) -> Iterator[RequestOutput]:
        """Feeds and steps until the requests are done; aborts them when the caller stops early or a step fails."""
        pending = set(feed.request_ids)
        inbox: deque[RequestOutput] = deque()
        self._inboxes |= dict.fromkeys(feed.request_ids, inbox)
        try:
            with self._undone_if_it_fails(feed.request_ids):
                while pending and (inbox or feed or self.engine.has_unfinished()):
                    if not inbox:
                        inbox.extend(feed.fill(self.engine.scheduler))
                    if not inbox:
                        self._step()
                        continue
                    output = inbox.popleft()
                    pending -= {output.request_id} if output.finished else set()
                    yield output
        finally:
            for request_id in feed.request_ids:
                del self._inboxes[request_id]

    def _step(self) -> None:
        """Steps the engine once; every output goes to the run that owns its request, which may not be the caller."""
        for output in self.engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)
