"""Guards what task=doctor and its page advise: a cure that Hydra refuses, two tables that differ."""

import re

import pytest
from hydra.utils import instantiate

from tests.tasks.jobs import ROOT, compose_config
from tokenrouter.tasks import build
from tokenrouter.tasks.checks import check_config
from tokenrouter.tasks.doctor_rules import RULES
from tokenrouter.tasks.doctor_run import Rule

BASES = {
    "kvcache.retention.policy.threshold": ("kvcache=threshold",),
    "kvcache.retention": ("kvcache=heavy_hitter",),
    "router.high_frac": ("router=random",),
    "router.key": ("router=cached",),
    "router.steps_per_octave": ("router=cached",),
    "router.exact_below": ("router=cached",),
    "workload.num_requests": ("workload=poisson",),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_cure_is_an_override_that_the_config_takes(rule: Rule) -> None:
    """A cure with a misspelt key, a choice that is not there, or a value that the engine refuses."""
    for override in re.findall(r"`([\w.]+=[^`]+)`", rule.cure):
        base = next((b for key, b in BASES.items() if override.startswith(key)), ())
        cfg = compose_config(*base, override, "paths.data_dir=/data")
        check_config(cfg)
        build.engine_options(cfg)
        for part in (cfg.router, cfg.executor, cfg.workload):
            instantiate(part)


def test_the_troubleshooting_page_has_the_same_table() -> None:
    """A rule without its row, a row without its rule, or two texts that say different things."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+_\w+` \|", line)]
    assert rows == [f"| `{r.name}` | {r.when} | {r.why} | {r.cure} |" for r in RULES]
