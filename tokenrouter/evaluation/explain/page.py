"""explain.html: one file without scripts or anything from outside, so that a text can hold what it likes."""

import math
from html import escape

from tokenrouter.evaluation.explain.tokens import ExplainedToken, Explanation
from tokenrouter.features import TokenType

FAINT, FULL, UNSCORED = 0.18, 0.70, 0.45
"""Opacity of the lowest and the highest score, and of a token without one."""
COLOURS = (
    ("29 78 137", "110 168 230"),
    ("232 132 46", "224 138 60"),
    ("63 124 104", "116 196 168"),
    ("140 74 110", "214 140 180"),
    ("188 75 81", "235 120 126"),
    ("96 108 118", "160 172 182"),
    ("154 201 58", "178 222 90"),
    ("167 123 216", "190 120 235"),
    ("31 201 154", "64 232 170"),
    ("224 72 155", "250 100 195"),
    ("107 106 20", "190 180 110"),
    ("63 180 224", "60 205 245"),
    ("207 174 31", "242 205 60"),
    ("205 180 238", "216 200 240"),
    ("47 114 224", "80 125 255"),
    ("31 122 46", "100 178 85"),
)
"""Red, green and blue of each route on white and on black, as many as a router of four layer groups has routes."""
REPEATS = f"colours repeat after {len(COLOURS)} routes"

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#16181d;--muted:#5b6472;--line:#d5dae1;--panel:#f4f6f8;--none:#e4e7eb}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1rem 16rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.3rem;margin:0 0 .5rem}
.facts,.legend{color:var(--muted);margin:.3rem 0}
.facts span,.legend>span{margin-right:1.2rem;display:inline-block}
.facts b,.legend b{color:var(--ink);font-weight:600}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:15px/1.9 ui-monospace,'DejaVu Sans Mono',monospace;
border:1px solid var(--line);border-radius:6px;padding:.8rem;margin-top:1rem}
.token,.swatch{background:rgb(var(--c)/var(--a));border-radius:2px}
.token{padding:.12em 0;cursor:default}
.swatch{display:inline-block;width:1.6em;height:.95em;vertical-align:-.1em;margin-right:.25em;--a:.6}
.scale{display:inline-block;width:6em;height:.95em;vertical-align:-.1em;margin:0 .4em;border-radius:2px;
background:linear-gradient(90deg,rgb(var(--c)/FAINT),rgb(var(--c)/FULL))}
.none{background:var(--none)}
.degraded{outline:2px dotted #c2410c;outline-offset:-1px}
.token:hover,.token:focus{outline:2px solid var(--ink);outline-offset:0}
.tip{display:none;position:fixed;left:0;right:0;bottom:0;z-index:1;max-height:14rem;overflow:auto;padding:.7rem 1rem;
background:var(--panel);color:var(--ink);border-top:2px solid var(--line);white-space:normal;
font:14px/1.6 system-ui,sans-serif}
.token:focus>.tip{display:block}
.token:hover>.tip{display:block;z-index:2}
.tip code{white-space:pre-wrap;background:var(--bg);border:1px solid var(--line);border-radius:3px;padding:0 .3em}
.row{display:block}
.row>span{display:inline-block;margin-right:1.3rem}
.row b{font-weight:600;color:var(--muted)}
@media(prefers-color-scheme:dark){
:root{--bg:#14171c;--ink:#eceff3;--muted:#a3adba;--line:#3a414c;--panel:#1f242c;--none:#343a43}}
"""


def html_page(explanation: Explanation) -> str:
    """The whole page; every word of the text and of the run is escaped."""
    title = "Routes token by token"
    facts = "".join(_fact(name, value) for name, value in explanation.facts.items())
    names = list(explanation.routes)
    tokens = "".join(_token(token, names) for token in explanation.tokens)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_style()}</style></head>\n'
        f'<body><h1>{title}</h1>\n<p class="facts">{facts}</p>\n{_legend(explanation)}\n'
        f'<div class="text">{tokens}</div>\n</body></html>\n'
    )


def opacity(token: ExplainedToken) -> float:
    """How strongly a token has its route's colour: by the rank of its score in the text."""
    if math.isnan(token.rank_frac):
        return UNSCORED
    return FAINT + (FULL - FAINT) * token.rank_frac


def _style() -> str:
    light, dark = (
        "".join(f".r{index}{{--c:{pair[side]}}}" for index, pair in enumerate(COLOURS))
        for side in (0, 1)
    )
    style = _STYLE.replace("FAINT", str(FAINT)).replace("FULL", str(FULL))
    return f"{style}{light}\n@media(prefers-color-scheme:dark){{{dark}}}"


def _legend(explanation: Explanation) -> str:
    counts, shares = explanation.counts(), explanation.label_shares()
    total = max(sum(counts.values()), 1)
    parts = []
    for index, (name, executors) in enumerate(explanation.routes.items()):
        held = "".join(f", {of[name]:.0%} of {label}" for label, of in shares.items())
        parts.append(
            f'<span><i class="swatch r{index % len(COLOURS)}"></i><b>{escape(name)}</b> '
            f"{counts[name]} tokens, {counts[name] / total:.1%}{escape(held)}; {escape(executors)}</span>"
        )
    if any(not math.isnan(token.score) for token in explanation.tokens):
        parts.append(
            '<span>score, by its rank in this text: low<i class="scale r0"></i>high</span>'
        )
    if any(token.executed != token.requested for token in explanation.tokens):
        parts.append('<span><i class="swatch none degraded"></i>ran on another route</span>')
    if any(token.executed is None for token in explanation.tokens):
        parts.append('<span><i class="swatch none"></i>never fed: no route</span>')
    if len(explanation.routes) > len(COLOURS):
        parts.append(f"<span>{REPEATS}</span>")
    hint = "<span>Point at a token, or tap it, to see what is known of it.</span>"
    return f'<p class="legend">{"".join(parts)}{hint}</p>'


def _token(token: ExplainedToken, names: list[str]) -> str:
    if token.executed is None:
        kind, shade = "none", ""
    else:
        kind = f"r{names.index(token.executed) % len(COLOURS)}"
        kind += "" if token.executed == token.requested else " degraded"
        shade = f' style="--a:{opacity(token):.2f}"'
    return (
        f'<span class="token {kind}"{shade} tabindex="0">{escape(token.text)}'
        f'<span class="tip">{_tip(token)}</span></span>'
    )


def _tip(token: ExplainedToken) -> str:
    first = {"position": str(token.position), "id": str(token.token_id), "piece": token.piece}
    if token.executed is not None:
        first |= {
            "phase": token.phase or "",
            "requested": token.requested or "",
            "executed": token.executed,
        }
    first["reason"] = token.reason
    second = {}
    if not math.isnan(token.score):
        higher = f"higher than {token.rank_frac:.0%} of the text"
        second["score"] = f"{_number(token.score)} ({higher})"
    second |= {f"label {name}": _number(value) for name, value in token.labels.items()}
    seen = {name: _feature(name, value) for name, value in token.features.items()}
    rows = (first, second, {"features": "as the router saw them:"} | seen if seen else {})
    return f'<span class="row"><code>{escape(token.text)}</code></span>' + "".join(
        f'<span class="row">{"".join(_fact(*item) for item in row.items())}</span>'
        for row in rows
        if row
    )


def _fact(name: str, value: str) -> str:
    return f"<span><b>{escape(name)}</b> {escape(value)}</span> "


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.4g}"


def _feature(name: str, value: float) -> str:
    """A value as a number, and in words where it stands for a type of token."""
    is_type = name in ("token_type", "previous_token_type") and value in set(TokenType)
    words = f" ({TokenType(int(value)).label})" if is_type else ""
    return _number(value) + words
