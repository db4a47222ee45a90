"""The reference's distributions, and what one setting changes of them.

N tokens of a document, T rows handed over at once, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter import LLM
from tokenrouter.engine import LLMEngine
from tokenrouter.evaluation.divergence import RowMetrics, TokenScores, compare_rows
from tokenrouter.kvcache import SlotTable

from .documents import Document
from .forced import Sink, finish, force
from .settings import Setting
from .setup import Bench


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The same engine without retention.

    Attributes:
        logp_NV: per document its log-probabilities, float16: close to exact where the probability is not small, which
            is what counts in KL, at half of float32's memory.
        scores: its own, KL 0.
        is_sensitive_N: per document, bool.
        peak_bytes: per document the most that its entries took at once.
    """

    logp_NV: list[Tensor]
    scores: TokenScores
    is_sensitive_N: list[Tensor]
    peak_bytes: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one setting did.

    Attributes:
        scores: of all documents' tokens.
        peak_bytes: per document the most that its entries took at once.
        engine_peak_bytes: the most that all documents' took at once.
    """

    setting: Setting
    scores: TokenScores
    peak_bytes: list[float]
    engine_peak_bytes: int


def measure_reference(bench: Bench) -> Reference:
    """Everything that settings are compared with."""
    llm = bench.llm(None)
    vocab = llm.model.config.vocab_size
    logp_NV = [torch.empty(len(d.ids), vocab, dtype=torch.float16) for d in bench.documents]
    parts = []

    def keep(index: int, position: int, logits_TV: Tensor) -> None:
        logp_TV = torch.log_softmax(logits_TV, dim=-1)
        stop = position + len(logp_TV)
        logp_NV[index][position:stop] = logp_TV
        next_T = _next_ids(bench.documents[index])[position:stop]
        nll_T = -logp_TV.gather(1, next_T[:, None].clamp(min=0))[:, 0]
        nll_T.masked_fill_(next_T < 0, float("nan"))
        rows = RowMetrics(torch.zeros(len(logp_TV)), nll_T, torch.ones(len(logp_TV)).bool())
        parts.append(TokenScores.of(index, position, rows))

    peaks = run_documents(llm, bench.documents, keep)
    top1_N = [logp.argmax(dim=-1) for logp in logp_NV]
    return Reference(
        logp_NV=logp_NV,
        scores=TokenScores.concatenate(parts),
        is_sensitive_N=[
            windowed_top1(llm, d.ids, bench.sizes.visible_tokens, bench.sizes.shared_tokens, own_N)
            != own_N
            for d, own_N in zip(bench.documents, top1_N, strict=True)
        ],
        peak_bytes=peaks,
    )


def measure_setting(bench: Bench, setting: Setting, reference: Reference) -> Run:
    """Compares row by row as the logits come; nothing of [N, V] is stored."""
    llm = bench.llm(setting)
    parts = []

    def compare(index: int, position: int, logits_TV: Tensor) -> None:
        rows = slice(position, position + len(logits_TV))
        logp_TV = reference.logp_NV[index][rows].float()
        next_T = _next_ids(bench.documents[index])[rows]
        parts.append(TokenScores.of(index, position, compare_rows(logp_TV, logits_TV, next_T)))

    peaks = run_documents(llm, bench.documents, compare)
    engine_peak = llm.engine.stats.peak_live_bytes
    return Run(
        setting=setting,
        scores=TokenScores.concatenate(parts),
        peak_bytes=peaks,
        engine_peak_bytes=engine_peak,
    )


def run_documents(llm: LLM, documents: Sequence[Document], sink: Sink) -> list[float]:
    """All documents at once; ``sink`` gets (index, position, logits) of every position.

    Returns:
        Per document the most bytes that its KV entries took at once, those of the running chunk included.
    """
    held: dict[str, float] = defaultdict(float)

    def watch(index: int, position: int, logits_TV: Tensor) -> None:
        """Between a step's forward and its evictions a request holds the most."""
        for request_id, num_bytes in _held(llm.engine).items():
            held[request_id] = max(held[request_id], num_bytes)
        sink(index, position, logits_TV)

    for index, document in enumerate(documents):
        force(llm, index, document.ids, document.prompt_len, watch, wants_all=True)
    finish(llm.engine)
    return [held[str(index)] for index in range(len(documents))]


def windowed_top1(
    llm: LLM, ids: Sequence[int], visible: int, shared: int, full_N: Tensor
) -> Tensor:
    """The most likely successor of each token when only its last ``visible`` to ``visible + shared - 1`` are read.

    Args:
        llm: without retention.
        ids: N tokens.
        visible: tokens at least, the token itself included.
        shared: tokens that share one reading.
        full_N: int64, of the whole context: the answer where nothing is left out.

    Returns:
        int64 ``[N]``.
    """
    found_N = full_N.clone()
    starts = range(visible, len(ids), shared)

    def take(index: int, position: int, logits_TV: Tensor) -> None:
        first = max(visible - 1 - position, 0)  # rows before it have seen less
        at = starts[index] - visible + 1 + position + first
        top1_T = logits_TV[first:].argmax(dim=-1)
        found_N[at : at + len(top1_T)] = top1_T

    llm.score([ids[start - visible + 1 : start + shared] for start in starts], sink=take)
    return found_N


def _held(engine: LLMEngine) -> Mapping[str, float]:
    """Bytes of each running request's entries, mean over layer groups: of both forms."""
    tables, full, int8 = engine.pool.tables, engine.kv_bytes_per_slot, engine.int8_bytes_per_slot

    def num_bytes(table: SlotTable, row: int) -> int:
        slots_N = table.slots_RN[row, : table.num_kept_R[row]]
        num_int8 = int((slots_N >= table.slots.first_int8).sum())
        return (len(slots_N) - num_int8) * full + num_int8 * int8

    return {
        request.request_id: sum(num_bytes(table, request.row) for table in tables) / len(tables)
        for request in engine.scheduler.running
    }


def _next_ids(document: Document) -> Tensor:
    """int64 ``[N]``: the token that follows each, -1 behind the last."""
    return torch.tensor([*document.ids[1:], -1])
