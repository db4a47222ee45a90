"""The engine as a model of lm-evaluation-harness 0.4 (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness).

Importing this registers it there as ``tokenrouter``; the extra ``lm-eval`` installs the harness.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation.harness.scoring import Pair, Score, score_pairs, scoring_options
from tokenrouter.evaluation.progress import progress
from tokenrouter.routers import make_router

log = logging.getLogger(__name__)
BLANK_LINE = "\n\n"
_SAMPLING = {"top_p", "top_k", "min_p", "repetition_penalty", "seed"}


@register_model("tokenrouter")
class TokenRouterLM(TemplateLM):  # type: ignore[misc]  # the harness is not checked with us
    """An LLM with its router, as the harness asks it.

    Log-likelihoods run in forced prefill, context and continuation as one prompt; texts are generated as they are
    served. Every token is routed as in any other request.

    Args:
        llm: a model with a tokenizer, whose engine is idle. Built with ``scoring_options`` it computes what choices
            have in common once.
        max_gen_toks: of an answer whose task does not say.

    Raises:
        ValueError: a model without a tokenizer.
    """

    def __init__(self, llm: LLM, *, max_gen_toks: int = 256) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise ValueError(
                f"model {llm.model.name!r} has no tokenizer, and the harness gives text: load it with its tokenizer "
                "files"
            )
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.max_gen_toks = max_gen_toks
        self._device = "cpu"
        self._is_chat = False
        self._encoded: dict[tuple[str, bool | None], list[int]] = {}

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "TokenRouterLM":
        """For ``simple_evaluate(model="tokenrouter", model_args=...)``.

        Args:
            arg_dict: ``model``, and any of ``router``, ``executors``, ``dtype`` and ``max_model_len``, as in LLM.
            additional_config: must hold nothing: the engine makes its own batches.

        Raises:
            ValueError: no ``model``, another argument, or a batch size or device.
        """
        known = ("model", "router", "executors", "dtype", "max_model_len")
        if "model" not in arg_dict or not set(arg_dict) <= set(known):
            raise ValueError(
                f"model_args of tokenrouter are model (needed) and {', '.join(known[1:])}; got {', '.join(arg_dict)}"
            )
        if given := [
            name for name, value in (additional_config or {}).items() if value is not None
        ]:
            raise ValueError(
                f"{', '.join(given)}: the engine makes its own batches on its own device; leave it out"
            )
        router = make_router(arg_dict.get("router", "all_high"))
        options = scoring_options(EngineOptions(), router)
        return cls(LLM(**{**arg_dict, "router": router}, options=options))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "TokenRouterLM":
        """As ``create_from_arg_obj``, from ``key=value,key=value``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the beginning of a text where the model has one."""
        first = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """The model's length in tokens."""
        return self.llm.model.config.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's cache of requests."""
        return self.llm.model.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, in the model's template."""
        self._is_chat = True
        rendered: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return rendered

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; without ``add_special_tokens`` as the tokenizer does, and no second beginning of a text."""
        key = (string, add_special_tokens)
        if key not in self._encoded:  # contexts come once per choice, alone and with it
            given = add_special_tokens
            if given is None and has_bos_prefix(
                string, self.tokenizer.decode([self.prefix_token_id])
            ):
                given = False
            options = {} if given is None else {"add_special_tokens": given}
            self._encoded[key] = list(self.tokenizer.encode(string, **options))
        return self._encoded[key]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """As the contract says; see ``score_pairs``."""
        try:
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._encoded.clear()
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._scores(
            [Pair(context, continuation) for _, context, continuation in requests]
        )
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """As the contract says: whole texts, in windows of the model's length that overlap by one token."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [Pair(*make_disjoint_window(window)) for window in windows]
            pairs += own
            owners += [index] * len(own)
        self._encoded.clear()
        totals = [0.0] * len(requests)
        for index, score in zip(owners, self._scores(pairs), strict=True):
            totals[index] += score.logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As the contract says; too long contexts lose tokens at their beginning.

        Raises:
            ValueError: an option of generation that the engine does not have.
        """
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            own = self._params(options)
            room = self.max_length - (own.max_tokens or 0)
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={own.max_tokens} leaves no room for a prompt: the model's length is "
                    f"{self.max_length}"
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(own)
        self._encoded.clear()
        outputs = self.llm.generate(prompts, params) if prompts else []
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise ValueError(f"the engine refused a prompt: {output.error}")
            texts.append(output.outputs[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        kwargs = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        stop = handle_stop_sequences(kwargs.pop("until", None), eos=None)
        if self._is_chat and BLANK_LINE in stop:
            log.warning(
                "answers in a chat template end at their first blank line here, because the task's generation_kwargs "
                "set no `until` (or that one): set what really ends an answer there, such as until=['Question:']"
            )
        does_sample = kwargs.pop("do_sample", False)
        temperature = kwargs.pop("temperature", 0.0)
        max_tokens = kwargs.pop("max_gen_toks")
        if unknown := sorted(set(kwargs) - _SAMPLING):
            raise ValueError(
                f"generation_kwargs {', '.join(unknown)}: the engine has no such option; it has until, max_gen_toks, "
                f"do_sample, temperature, {', '.join(sorted(_SAMPLING))}"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            stop=[s for s in stop if s],
            temperature=temperature if does_sample else 0.0,
            **kwargs,
        )

    def _scores(self, pairs: Sequence[Pair]) -> list[Score]:
        with progress("log-likelihoods", len(pairs), unit="requests") as advance:
            return score_pairs(
                self.llm, pairs, lambda *, count: advance(self.llm.router.name, count)
            )
