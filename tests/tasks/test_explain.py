"""Guards against a page that lies about a text's routes, or that a text can break or take over."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra.errors import InstantiationException

from tests.tasks.browser import Page
from tests.tasks.jobs import ROOT, run_in
from tokenrouter.evaluation.explain import ExplainedToken, Explanation, html_page
from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.models import tiny_random
from tokenrouter.routers import RuleRouter
from tokenrouter.tasks.common import root_cause

TINY = ("debug=tiny", "task=explain", "executor=int8")
HOSTILE = (
    "</span></div><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    "\"'&amp;&#60; <style>*{display:none}</style> <!-- \n\n\t  two  spaces $\\frac{1}{ $ {{7*7}} \\"
)


class _Tokens(HTMLParser):
    """The page's tokens, and every tag that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.texts: list[str] = []
        self.tips: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        kind = dict(attrs).get("class") or ""
        if tag == "span":
            self._open.append(kind.split(" ")[0])
            if kind.startswith("token"):
                self.classes.append(kind)
                self.texts.append("")
                self.tips.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if "tip" in self._open:
            self.tips[-1] += data
        elif "token" in self._open:
            self.texts[-1] += data


def _read(path: Path) -> _Tokens:
    found = _Tokens()
    found.feed((path / "explain.html").read_text(encoding="utf-8"))
    return found


def _explain(path: Path, text: str, *overrides: str) -> Path:
    source = path.with_name(path.name + ".txt")
    source.write_text(text, encoding="utf-8", newline="")
    return run_in(path, *TINY, f"explain.text_file={source}", *overrides)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "run"
    return _explain(
        path, HOSTILE, "router=rule", "router.budget.high_frac=0.3", "log_decisions=true"
    )


def test_the_page_says_what_the_decision_log_says(hostile_run: Path) -> None:
    """A token with its neighbour's route, score, reason or id."""
    tokens = _read(hostile_run)
    rows = pq.read_table(hostile_run / "decisions.parquet").to_pylist()
    assert len(rows) == len(tokens.texts) == len(HOSTILE.encode())
    assert {row["executed"] for row in rows} == {"high", "low"}
    for row in rows:
        kind, tip = tokens.classes[row["position"]], tokens.tips[row["position"]]
        assert f"r{['high', 'low'].index(row['executed'])}" in kind.split()
        for name in ("position", "phase", "requested", "executed", "reason"):
            assert f"{name} {row[name]} " in tip
        assert f"id {row['token_id']} " in tip
        assert f"score {row['score']:.4g} (" in tip
    summary = json.loads((hostile_run / "explained.json").read_text())
    assert sum(summary["routes"].values()) == len(rows)


def test_the_glossary_lists_what_is_written(hostile_run: Path) -> None:
    """A file that nobody knows of, or one that is looked for in vain."""
    glossary = (ROOT / "docs" / "metrics.md").read_text().partition("`task=explain` writes")[2]
    listed = set(re.findall(r"`(\w+\.\w+)`", glossary.partition("\n\n`status.json`")[0]))
    assert {path.name for path in hostile_run.iterdir() if path.is_file()} == listed


def test_the_text_reads_as_it_was_given(hostile_run: Path) -> None:
    """Words of a text that are taken for tags, spaces that collapse, line breaks that vanish."""
    tokens = _read(hostile_run)
    assert "".join(tokens.texts) == HOSTILE.replace("\n", "↵\n").replace("\t", "⇥")
    assert tokens.tags.isdisjoint({"script", "img", "iframe"})


def test_the_page_needs_nothing_from_outside(hostile_run: Path) -> None:
    """A page that is empty on a machine without network, or that tells somebody that it was read."""
    source = (hostile_run / "explain.html").read_text(encoding="utf-8")
    head = source[: source.index("<body>")]
    assert re.findall(r'(?:href|src)="([^"]*)"', head) == ["data:,"]
    assert "url(" not in head and "@import" not in head and "default-src 'none'" in head
    assert "prefers-color-scheme:dark" in head


def test_features_are_those_of_their_token(hostile_run: Path) -> None:
    """Features of another position, which a router was asked about in the same call."""
    tips, model = _read(hostile_run).tips, tiny_random()
    table = TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size)
    batch = sequence_batch(model.tokenizer.encode(HOSTILE), token_types=table)
    inputs = RuleRouter().extractor(table).extract(batch)
    assert len(inputs.names) >= 2
    for tip, values in zip(tips, inputs.values_TF.tolist(), strict=True):
        assert all(f"{n} {v:.4g} " in tip for n, v in zip(inputs.names, values, strict=True)), tip
    assert "token_type 1 (newline) " in tips[HOSTILE.index("\n")]


def test_decoded_tokens_are_shown_and_the_last_has_no_route(tmp_path: Path) -> None:
    """A generated text without colours, or a route that the last token never took."""
    tokens = _read(_explain(tmp_path / "run", "abcdef", "explain.max_tokens=5", "router=random"))
    assert len(tokens.texts) == 11
    assert ["phase decode" in tip for tip in tokens.tips] == [False] * 6 + [True] * 4 + [False]
    assert [kind == "token none" for kind in tokens.classes] == [False] * 10 + [True]


def test_a_text_may_be_fed_one_by_one(tmp_path: Path) -> None:
    """The decode side of a router that nobody can see on a text of his own; signals that only a running engine has."""
    only = ("explain.prompt_tokens=4", "router=entropy", "router.budget.high_frac=0.5")
    tokens = _read(_explain(tmp_path / "run", "abcdefgh" * 4, *only))
    assert ["phase decode" in tip for tip in tokens.tips] == [False] * 4 + [True] * 28
    assert all("entropy" in tip for tip in tokens.tips[4:])
    assert not any(re.search(r"entropy [\d.]", tip) for tip in tokens.tips[:4])


def test_labels_are_shown_per_token(tmp_path: Path) -> None:
    """Labels that are switched on and not there; a share of them that is not one."""
    path = _explain(tmp_path / "run", "abcdefgh" * 3, "explain.labels=true", "labels=own_kl")
    assert all("label own_kl" in tip for tip in _read(path).tips)
    held = json.loads((path / "explained.json").read_text())["labels"]["own_kl"]
    assert sum(held.values()) == pytest.approx(1.0)


def test_retention_labels_have_a_column_each(tmp_path: Path) -> None:
    """Horizons that are added up as if they were layers."""
    wanted = ("explain.labels=true", "labels=future_attention", "labels.horizons=[2,4]")
    tip = _read(_explain(tmp_path / "run", "abcdefgh" * 3, *wanted)).tips[0]
    assert len(re.findall(r"label future_attention \S+ ", tip)) == 2


def test_a_token_that_ran_elsewhere_is_marked(tmp_path: Path) -> None:
    """A page that shows what was asked for where another route ran."""
    path = run_in(
        tmp_path / "run",
        "debug=tiny",
        "task=explain",
        "router=all_low",
        "executor=full",
        "prompt=abc",
    )
    tokens = _read(path)
    assert tokens.classes == ["token r0 degraded"] * 3
    assert "requested low executed high" in tokens.tips[0]
    assert "ran on another route" in (path / "explain.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("router", ["interval", "cached", "batched", "composite", "request_level"])
def test_routers_around_routers_are_explained(tmp_path: Path, router: str) -> None:
    """A router whose calls cannot be watched, or whose tokens of one call are not those of the step."""
    path = _explain(tmp_path / "run", "some text 123\n" * 3, f"router={router}")
    tokens = _read(path)
    assert len(tokens.texts) == 42 and not any("none" in kind for kind in tokens.classes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "needs one text and got neither"),
        (("prompt=a", "explain.text_file=b"), "needs one text and got both"),
        (("explain.text_file=no/such/file",), "no/such/file is no file"),
        (("prompt=''",), "the text is empty"),
        (("prompt=abc", "explain.prompt_tokens=4"), "more than the text's 3 tokens"),
        (("prompt=abc", "explain.prompt_tokens=0"), "explain.prompt_tokens must be at least 1"),
        (("prompt=abc", "explain.max_tokens=-1"), "explain.max_tokens must be at least 0"),
        (("prompt=abc", "explain.prompt_tokens=1", "explain.max_tokens=1"), "set one of them"),
        (("prompt=abc", "explain.labels=fisher"), "explain.labels='fisher' must be true or false"),
        (("prompt=abc", "explain.labels=true", "executor=full"), "set executor=int8"),
        (("prompt=abc", "chat=true"), "no chat template"),
        ((f"prompt={'a' * 4097}",), "4097 tokens and the model's length is 4096"),
    ],
)
def test_mistakes_are_refused_by_name(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    """A traceback, or an empty page, for what the user could put right."""
    with pytest.raises((ValueError, InstantiationException)) as caught:
        run_in(tmp_path, *TINY, *overrides)
    assert message in str(root_cause(caught.value))
    assert not (tmp_path / "explain.html").exists()


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A decoder's own words about a byte, without the file's name."""
    source = tmp_path / "bytes"
    source.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes is no UTF-8 text"):
        run_in(tmp_path / "run", *TINY, f"explain.text_file={source}")


def test_a_browser_shows_the_text_and_runs_nothing_of_it(hostile_run: Path, page: Page) -> None:
    """A page that only looks right in its source: errors, a script of the text that runs, colours without effect."""
    page.open(hostile_run / "explain.html")
    assert page.complaints == []
    assert page.evaluate("document.title") == "Routes token by token"
    assert page.evaluate("document.querySelectorAll('script, .text img, .text style').length") == 0
    shown = page.evaluate("document.querySelector('.text').innerText")
    assert "</span></div><script>document.title='taken'</script>" in shown
    assert "  two  spaces" in shown
    colours = page.evaluate(
        "[...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)"
    )
    assert len(colours) == len(HOSTILE.encode())
    assert all(colour.startswith("rgba(") and not colour.endswith(" 0)") for colour in colours)
    kinds = [kind.split()[1] for kind in _read(hostile_run).classes]
    hues = {(kind, c.rsplit(",", 1)[0]) for kind, c in zip(kinds, colours, strict=True)}
    assert len(hues) == 2


def test_a_browser_takes_a_token_for_text_whatever_it_holds(tmp_path: Path, page: Page) -> None:
    """Tags in one token, as a tokenizer with whole words has them: a byte's own page cannot show it."""
    facts = {"phase": "prefill", "requested": "high", "executed": "high", "score": 1.0}
    tokens = [
        ExplainedToken(
            position=position,
            token_id=7,
            text=HOSTILE,
            piece=HOSTILE,
            rank_frac=0.5,
            reason=HOSTILE,
            features={HOSTILE: 1.0},
            labels={HOSTILE: 1.0},
            **facts,  # type: ignore[arg-type]
        )
        for position in range(3)
    ]
    explanation = Explanation(tokens=tokens, routes={"high": HOSTILE}, facts={HOSTILE: HOSTILE})
    source = tmp_path / "page.html"
    source.write_text(html_page(explanation), encoding="utf-8", newline="")
    page.open(source)
    assert page.complaints == []
    assert page.evaluate("document.title") == "Routes token by token"
    assert page.evaluate("document.querySelectorAll('.text > .token').length") == 3
    assert page.evaluate("document.querySelectorAll('script, img, body style').length") == 0
    shown = page.evaluate("[...document.querySelectorAll('.token')].map(t => t.firstChild.data)")
    assert shown == [HOSTILE] * 3


def test_a_browser_shows_a_tokens_facts_where_the_mouse_is(hostile_run: Path, page: Page) -> None:
    """Facts that are in the source and never on the screen."""
    page.open(hostile_run / "explain.html")
    tips = "[...document.querySelectorAll('.tip')].filter(t => t.offsetParent || t.offsetHeight)"
    page.point_at(1, 1)
    assert page.evaluate(f"{tips}.length") == 0
    box = page.evaluate("document.querySelectorAll('.token')[20].getBoundingClientRect().toJSON()")
    page.point_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.evaluate(f"{tips}.length") == 1
    shown = page.evaluate(f"{tips}[0].innerText")
    assert "position 20" in shown and "reason" in shown and "score" in shown
    assert "token_type" in shown and f"id {ord(HOSTILE[20]) + 3}" in shown
    edges = page.evaluate(f"{tips}[0].getBoundingClientRect().toJSON()")
    height = page.evaluate("window.innerHeight")
    assert 0 <= edges["top"] < edges["bottom"] <= height


def test_a_browser_in_the_dark_has_other_colours(hostile_run: Path, page: Page) -> None:
    """Dark text on a dark page."""
    page.open(hostile_run / "explain.html")
    ask = "[document.body, document.querySelector('.token')].map(e => getComputedStyle(e))"
    ask += ".map(s => s.color + s.backgroundColor)"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    light = page.evaluate(ask)
    page.call("Emulation.setEmulatedMedia", features=dark)
    assert all(a != b for a, b in zip(light, page.evaluate(ask), strict=True))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
