"""Guards mistakes that the config shows by itself: one clear line, before a model is loaded."""

from dataclasses import fields
from pathlib import Path

import pytest

from tests.tasks.jobs import compose_config, run_in
from tokenrouter import SamplingParams
from tokenrouter.models.tiny import tiny_hf
from tokenrouter.tasks import build
from tokenrouter.tasks.checks import check_config, check_windows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=hf"], r"model\.name=<hub name, local folder or \.gguf file>"),
        (["+router.hi_frac=0.3"], r"router\.hi_frac is no option of RuleRouter; .*first_positions"),
        (
            ["+router.budget.hig_frac=1"],
            r"high_frac, seed; did you mean router\.budget\.high_frac\?",
        ),
        (["router=request_level", "+router.inner.x=1"], r"router\.inner\.x is no option of RuleR"),
        (["+executor.low.bits=4"], r"executor\.low\.bits is no option of Int8Executor"),
        (["+model.dtyp=x"], r"model\.dtyp is no option of tiny; its options: name, dtype; did"),
        (["+logger.tag=x"], r"logger\.tag is no option of NoTracker; its options: none"),
        (
            ["+scheduler.max_seqs=1"],
            r"scheduler\.max_seqs is no option of scheduler; .*policy, .*; did you mean scheduler\.max_num_seqs\?",
        ),
        (
            ["+kvcache.slots=1"],
            r"kvcache\.slots is no option of kvcache; .*mean kvcache\.num_slots\?",
        ),
        (["+evaluation.repeats=1"], r"mean evaluation\.num_repeats\?"),
        (["+kernels.x=1"], r"kernels\.x is no option of kernels; its options: backend$"),
        (["task=generate", "+sampling.top=1"], r"sampling\.top is no option of SamplingParams"),
        (["evaluation.num_repeats=0"], r"evaluation\.num_repeats must be at least 1 .* got 0"),
        (["evaluation.num_repeats=few"], r"num_repeats must be at least 1 .* got 'few'"),
        (["evaluation.window_tokens=1"], r"window_tokens >= 2 and num_windows >= 1, got 1 and 2"),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    """A TypeError that names no option; a missing value without a word on what to give; minutes before a refusal."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load", load)
    with pytest.raises(ValueError, match=message):
        run_in(tmp_path, "debug=tiny", *overrides)


def test_a_window_that_no_engine_takes_is_refused() -> None:
    """5,000 tokens for a model of 4,096: refused only when throughput was measured already."""
    check_windows(4096, 4096, None)
    check_windows(4096, 4096, 4096)
    with pytest.raises(ValueError, match=r"window_tokens=4097 is longer than .* at most 4096"):
        check_windows(4097, 4096, None)
    with pytest.raises(ValueError, match=r"100 tokens needs .* has 99: lower .*kvcache\.num_slots"):
        check_windows(100, 4096, 99)


def test_good_configs_and_targets_that_hydra_reports_are_left_alone() -> None:
    """Options that a target takes refused; a target that is not there reported without its key."""
    for router in ("all_high", "layerwise", "random", "request_level", "rule"):
        check_config(compose_config("debug=tiny", f"router={router}"))
    check_config(compose_config("task=generate", "sampling.logit_bias={5:1.0}"))
    check_config(compose_config("router._target_=nowhere.Router"))


def test_a_command_line_has_every_sampling_option_that_changes_the_text() -> None:
    """sampling.stop=[...] needed a plus; a default that differs from the library's own."""
    sampling = dict(compose_config("task=generate").sampling)
    left_out = {
        "n",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
        "include_stop_str_in_output",
    }
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    assert set(sampling) == set(defaults) - left_out
    changed = {name for name, value in sampling.items() if value != defaults[name]}
    assert changed == {"temperature", "max_tokens"}


def test_sampling_options_reach_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias or a stop that the job takes and drops: the biased "!" (id 36) ends the output at once."""
    run_in(
        tmp_path,
        *("debug=tiny", "task=generate", "prompt=hi"),
        *("sampling.logit_bias={36:1000}", "sampling.stop=['!!!']", "sampling.stop_token_ids=[7]"),
    )
    assert "3 out (stop)" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["generate", "benchmark", "evaluate"])
def test_a_task_without_a_tokenizer_says_what_to_do(tmp_path: Path, task: str) -> None:
    """AttributeError: 'NoneType' object has no attribute 'encode'."""
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    overrides = ["model=hf", f"model.name={tmp_path / 'model'}", f"task={task}", "router=all_high"]
    with (
        pytest.warns(UserWarning, match="no tokenizer files"),
        pytest.raises(ValueError, match="needs text, and the model has no tokenizer: put its"),
    ):
        run_in(tmp_path / "run", "debug=tiny", *overrides)
