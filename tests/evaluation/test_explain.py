"""Guards against tokens that cannot be seen, words that become tags, and pictures that break on a text."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenrouter.evaluation.explain import (
    ExplainedToken,
    Explanation,
    draw,
    html_page,
    token_texts,
    visible,
    watched,
)
from tokenrouter.evaluation.explain.page import REPEATS
from tokenrouter.evaluation.explain.picture import COLUMNS, _rgb, lay_out, lay_out_keys
from tokenrouter.evaluation.explain.tokens import _features
from tokenrouter.features import FeatureExtractor, TextSignals, TokenTypeTable, sequence_batch
from tokenrouter.routers import make_router


def _token(text: str = "a", **values: Any) -> ExplainedToken:
    given = {
        "position": 0,
        "token_id": 5,
        "text": text,
        "piece": text,
        "phase": "prefill",
        "requested": "high",
        "executed": "high",
        "score": float("nan"),
        "rank_frac": float("nan"),
        "reason": "always",
        "features": {},
        "labels": {},
    }
    return ExplainedToken(**(given | values))


def _explanation(*tokens: ExplainedToken) -> Explanation:
    routes = {"high": "layers 0 to 3: high (full)", "low": "layers 0 to 3: low (int8)"}
    return Explanation(tokens=tokens, routes=routes, facts={"model": "<b>m</b>"})


def test_what_shows_nothing_is_made_visible() -> None:
    """A token that is there and cannot be seen or pointed at, or that turns the rest of the line around."""
    assert visible("a\u202eb\x00\u200b\u2028") == "a⟨202E⟩b⟨0000⟩⟨200B⟩⟨2028⟩"
    assert visible("\r\n\t ") == "␍↵\n⇥ "
    assert visible("é 北 🙂 <") == "é 北 🙂 <"


def test_a_character_of_several_tokens_is_at_its_last(smollm2_tokenizer: Any) -> None:
    """Chinese text and emoji as a row of question marks; leading spaces and control tokens that are lost."""
    text = "<|im_start|>user\n北京 🙂 café"
    ids = smollm2_tokenizer.encode(text)
    texts = token_texts(smollm2_tokenizer, ids, 49152)
    assert "".join(texts).replace("\ufffd", "") == text
    assert len(texts) == len(ids) > 8 and texts[0] == "<|im_start|>" and "\ufffd" in texts
    broken = [i for i in ids if "\ufffd" in smollm2_tokenizer.decode([i])][:1] * 40
    assert token_texts(smollm2_tokenizer, broken, 49152) == ["\ufffd"] * 40


def test_the_shade_follows_the_rank() -> None:
    """One outlier that makes all other scores look alike; a token without a score that looks like the lowest."""
    tokens = [_token(score=10.0**n, rank_frac=n / 4) for n in range(4)]
    shades = re.findall(r"--a:(0\.\d+)\"", html_page(_explanation(*tokens, _token())))
    assert shades == ["0.18", "0.31", "0.44", "0.57", "0.45"]


def _of_routes(count: int) -> Explanation:
    names = [f"high_0_{number}+28_30" for number in range(count)]
    return Explanation(
        tokens=[_token(requested=name, executed=name) for name in names],
        routes=dict.fromkeys(names, "layers 0 to 29: high (full)"),
        facts={},
    )


def test_no_two_routes_share_a_colour() -> None:
    """Eight routes that look like six, by day or by night, in the text or beside it."""
    source = html_page(_of_routes(16))
    assert REPEATS not in source and REPEATS in html_page(_of_routes(17))
    for part in re.split(r"@media\(prefers-color-scheme:dark\)\{\.r0", source)[:2]:
        colours = re.findall(r"\{--c:(\d+ \d+ \d+)\}", part)
        assert len(colours) == len(set(colours)) == 16
    for kind in ("token", "swatch"):
        shown = re.findall(rf'class="{kind} (r\d+)"', source)
        assert len(shown) == len(set(shown)) == 16


def test_the_picture_names_every_route(tmp_path: Path) -> None:
    """Routes that fall off the end of the one line of keys."""
    explained = _of_routes(17)
    keys = lay_out_keys(explained)
    assert [key.text.split()[0] for key in keys] == list(explained.routes)
    assert all(key.column + 3 + len(key.text) <= COLUMNS for key in keys)
    assert len({(key.line, key.column) for key in keys}) == 17 and keys[-1].line > 1
    assert draw(explained, tmp_path / "explain.png").exists()
    assert len({_rgb(index) for index in range(16)}) == 16


def test_facts_and_features_are_escaped() -> None:
    """A model's path or a router's reason that is taken for a tag."""
    hostile = '<i onclick="x">\''
    token = _token(reason=hostile, features={hostile: 1.0}, labels={hostile: 2.0}, piece=hostile)
    source = html_page(_explanation(token))
    assert "<i onclick" not in source and "<b>m</b>" not in source
    assert source.count("&lt;i onclick=&quot;x&quot;&gt;&#x27;") >= 4


def test_lines_break_in_the_picture() -> None:
    """A picture in which a long token runs out of the page, or a line break is lost."""
    long = "x" * (COLUMNS + 5)
    pieces = lay_out(["ab↵\n", long, "↵\n↵\n", "c"])
    assert [(p.line, p.column, len(p.text), p.token) for p in pieces] == [
        (0, 0, 3, 0),
        (1, 0, COLUMNS, 1),
        (2, 0, 5, 1),
        (2, 5, 1, 2),
        (3, 0, 1, 2),
        (4, 0, 1, 3),
    ]


def test_the_picture_takes_any_text(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A dollar sign that begins a formula; characters that the font lacks, with a warning for each."""
    from matplotlib.image import imread

    low = _token("$ ", requested="low", executed="low")
    tokens = (_token("$\\frac{$"), low, _token("北🙂"), _token(executed=None, phase=None))
    image = imread(draw(_explanation(*tokens), tmp_path / "explain.png"))
    assert not list(recwarn)
    left = round(image.shape[1] / (COLUMNS + 2))
    row = image[round(image.shape[0] * 4 / 5) - 1, left:, :3]
    assert row[2].tolist() != row[-1].tolist()


def test_a_long_text_is_cut_in_the_picture_and_says_so(tmp_path: Path) -> None:
    """A picture of a book that takes all memory."""
    from matplotlib.image import imread

    tall = imread(draw(_explanation(*[_token("a↵\n")] * 400), tmp_path / "tall.png"))
    short = imread(draw(_explanation(*[_token("a↵\n")] * 120), tmp_path / "short.png"))
    assert tall.shape == short.shape


def test_a_watched_router_is_itself_again() -> None:
    """A router that keeps all that it is shown for the rest of a process, or whose error is lost."""
    router = make_router("all_high")
    with pytest.raises(RuntimeError, match="broken"), watched(router):
        assert "route" in vars(router)
        raise RuntimeError("broken")
    assert "route" not in vars(router)


def test_a_feature_that_a_token_lacks_is_not_shown() -> None:
    """A number that is none beside a prompt token, whose phase has no logits before it."""
    batch, types = sequence_batch([1, 0], prompt_len=1), TokenTypeTable.from_texts([None, " a"])
    signals = TextSignals(types, {"entropy": torch.tensor([math.nan, 0.5])})
    extractor = FeatureExtractor(("position", "entropy"), types, signals, optional={"entropy"})
    shown = dict(_features(extractor.extract(batch)))
    assert shown == {0: {"position": 0.0}, 1: {"position": 1.0, "entropy": 0.5}}
