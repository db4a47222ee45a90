"""Guards what the retention benchmark reads and compares: documents, tasks, settings, and its options."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from scripts.memory_bench import app
from scripts.memory_bench.documents import Document, load_documents
from scripts.memory_bench.settings import CONF, make_settings, shipped_settings
from scripts.memory_bench.sizes import Sizes
from tokenrouter.evaluation.retrieval.items import WORDS
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.models.tiny import ByteTokenizer
from tokenrouter.tasks.build import engine_options

SCHEDULE = RetentionOptions(policy=Full(), interval=64, window=16, layers=2)


def encode(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def test_words_differ() -> None:
    """A word that stands twice has two answers."""
    assert len(set(WORDS)) == len(WORDS) >= 60


def test_settings_differ_in_strength_and_share_the_schedule() -> None:
    """Ratios for a policy without a budget; a fixed budget without room for the running chunk."""
    sizes = Sizes(evicted_fracs=(0.25,), fixed_fracs=(0.25, 0.75), thresholds=(0.1,))
    settings = make_settings(SCHEDULE, sizes, ("threshold", "random"))
    assert [s.strength for s in settings] == [
        *("< 0.1 r1536", "25 %", "to 3008 r2406", "to 960 r768", "to 3008 int8", "to 960 int8")
    ]
    assert [s.retention.recent for s in settings] == [1536, 32, 2406, 768, 32, 32]
    assert [s.retention.compress for s in settings] == [None, None, None, None, "old", "old"]
    assert {s.retention.interval for s in settings} == {64}
    budgets = [getattr(s.retention.policy, "evicted_frac", None) for s in settings]
    assert budgets == [None, 0.25, 0.0, 0.0, 0.0, 0.0]


def test_only_policies_that_look_at_attention_get_its_options() -> None:
    """Options without effect, of which every engine warned."""
    sizes = Sizes(evicted_fracs=(0.5,), fixed_fracs=(), thresholds=(0.1,))
    schedule = RetentionOptions(policy=Full(), interval=16, window=8, layers=2)
    found = {s.policy: s.retention for s in make_settings(schedule, sizes, app.POLICIES)}
    for name in ("heavy_hitter", "observation_window", "threshold"):
        assert (found[name].window, found[name].layers) == (8, 2)
    for name in ("full", "sink_window", "random", "key_norm", "route"):
        assert (found[name].window, found[name].layers) == (16, 4)


def test_int8_evicts_nothing_and_routes_have_a_router_that_names_them() -> None:
    """A row of int8 entries with eviction, and classes of routes under a router that has one route."""
    sizes = Sizes(evicted_fracs=(0.5,), fixed_fracs=())
    int8, route = make_settings(SCHEDULE, sizes, ("int8", "route"))
    assert (int8.retention, int8.kv_cache_dtype, int8.router) == (None, "int8", "all_high")
    assert (route.policy, route.strength, route.router) == ("route", "50 %", "rule")
    assert route.retention is not None and route.retention.interval == 64


def test_shipped_configs_keep_their_own_values() -> None:
    """The script's windows, layers and groups instead of those that a user of the config gets."""
    settings = {setting.policy: setting for setting in shipped_settings()}
    assert set(settings) == {path.stem for path in (CONF / "kvcache").glob("*.yaml")}
    for name, setting in settings.items():
        with initialize_config_dir(str(CONF), version_base="1.3"):
            options = engine_options(compose("config", overrides=[f"kvcache={name}"]))
        assert (setting.retention is None) == (options.retention is None)
        assert setting.kv_cache_dtype == options.kv_cache_dtype
        assert setting.strength == "as shipped"
        if setting.retention and options.retention:
            assert setting.retention.window == options.retention.window
            assert setting.retention.layers == options.retention.layers
            assert vars(setting.retention.policy) == vars(options.retention.policy)
    assert settings["int8"].kv_cache_dtype == "int8" and settings["full"].retention is None
    assert settings["heavy_hitter"].evicted_frac is not None
    assert settings["threshold"].threshold is not None


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name in ("wiki_articles", "arxiv_latex", "mt_bench_101"):
        (tmp_path / name).mkdir()
    (tmp_path / "wiki_articles" / "a.txt").write_text("short\n" + "w" * 99 + "\n" + "x" * 99)
    papers = [json.dumps({"text": letter * 99}) for letter in "pq"]
    (tmp_path / "arxiv_latex" / "a.jsonl").write_text("\n".join(papers))
    turns = [[{"user": "hi", "bot": letter * count}] for letter, count in (("s", 40), ("t", 60))]
    talks = [json.dumps({"history": history}) for history in turns]
    (tmp_path / "mt_bench_101" / "a.jsonl").write_text("\n".join(talks))
    return tmp_path


def load(
    data_dir: Path | None, documents: int, *, start: int = 0, dialogues: int = 1
) -> list[Document]:
    return load_documents(
        ByteTokenizer(),
        data_dir and str(data_dir),
        document_tokens=80,
        decode_tokens=10,
        documents=documents,
        dialogues=dialogues,
        start=start,
    )


def test_documents_are_long_enough_and_dialogues_the_longest(sets: Path) -> None:
    """A document shorter than asked for would weigh less, and its prompt could be empty."""
    found = load(sets, 1)
    assert [d.source for d in found] == ["wiki_articles", "arxiv_latex", "mt_bench_101"]
    texts = [ByteTokenizer().decode(d.ids) for d in found]
    assert texts[:2] == ["w" * 80, "p" * 80] and texts[2].startswith("user: hi\nassistant: ttt")
    assert [len(d.ids) - d.prompt_len for d in found] == [10, 10, 10]


def test_another_start_reads_other_documents(sets: Path) -> None:
    """Settings judged on the documents that they were chosen on."""
    first, second = load(sets, 1), load(sets, 1, start=1)
    texts = [ByteTokenizer().decode(d.ids) for d in second]
    assert texts[:2] == ["x" * 80, "q" * 80] and texts[2].startswith("user: hi\nassistant: sss")
    assert not {tuple(d.ids) for d in first} & {tuple(d.ids) for d in second}


def test_another_start_reads_other_parts_of_the_language_reference() -> None:
    """Windows whose places depend on their number overlap with those of another number."""
    few, more, others = load(None, 1), load(None, 3), load(None, 2, start=2)
    assert [d.ids for d in more[:2]] == [d.ids for d in few]
    assert [d.ids for d in others] == [d.ids for d in more[2:]]
    assert {d.source for d in more} == {"python_docs"} and len(more) == 6


def test_dialogues_have_a_number_of_their_own(sets: Path) -> None:
    """One dialogue beside any number of documents, or fewer than were asked for without a word."""
    assert [d.source for d in load(sets, 1, dialogues=2)].count("mt_bench_101") == 2
    assert [d.source for d in load(sets, 0, dialogues=1)] == ["mt_bench_101"]
    assert [d.source for d in load(sets, 1, dialogues=0)] == ["wiki_articles", "arxiv_latex"]
    with pytest.raises(ValueError, match="mt_bench_101 has 2 documents of 11 tokens, and 3 are"):
        load(sets, 1, dialogues=3)


def test_too_few_documents_are_refused(sets: Path) -> None:
    with pytest.raises(ValueError, match="wiki_articles has 2 documents of 80 tokens, and 3 are"):
        load(sets, 3)
    with pytest.raises(ValueError, match="and 3 are asked for, 2 that are skipped among them"):
        load(sets, 1, start=2)


def parse(monkeypatch: pytest.MonkeyPatch, *given: str) -> app.argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["bench_memory.py", *given])
    return app.parse_arguments("")


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is read and does not reach what is measured."""
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", "sets")
    given = ["--policies", "full", "random", "--interval", "32", "--window", "16"]
    counts = ["--documents", "2", "--dialogues", "3", "--start", "4", "--items", "0"]
    chosen = parse(monkeypatch, *given, *counts)
    assert (chosen.policies, chosen.data_dir, chosen.quick) == (["full", "random"], "sets", False)
    schedule, sizes = chosen.schedule, chosen.sizes
    assert (schedule.interval, schedule.window, schedule.recent) == (32, 16, 32)
    assert (schedule.layers, schedule.groups) == (30, 5)
    assert (sizes.documents, sizes.dialogues, sizes.start, sizes.items) == (2, 3, 4, 0)
    assert parse(monkeypatch).sizes == Sizes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--start", "-1"], "--start must be at least 0, got -1"),
        (["--only-shipped", "--policies", "full"], "--policies has no effect with --only-shipped"),
        (["--only-shipped", "--window", "32"], "--window has no effect with --only-shipped"),
        (["--dialogues", "2"], "--dialogues needs local sets"),
        (["--documents", "0", "--items", "0"], "nothing is read"),
        (["--items", "1"], "--items must be 0 or at least 2"),
        (["--question-window", "0"], "--question-window must be at least 1"),
        (["--only-shipped", "--question-window", "8"], "--question-window has no effect"),
        (["--interval", "32"], "window=128 must be at most interval=32"),
        (["--json", "no/such/folder/x.json"], "there is no folder no/such/folder"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    """They came up as a traceback after the model, or were ignored."""
    monkeypatch.delenv("TOKENROUTER_DATA_DIR", raising=False)
    with pytest.raises(SystemExit):
        parse(monkeypatch, *given)
    assert says in capsys.readouterr().err
