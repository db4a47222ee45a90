"""How much is read, and how strong the settings are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        document_tokens: of every document but dialogues, which may be shorter.
        decode_tokens: a document's last tokens, fed one by one.
        documents: of each set.
        dialogues: of the set of dialogues.
        start: so many documents of each set, dialogues too, are skipped: those that something was chosen on.
        items: of each retrieval task; 0 leaves them out.
        context_tokens: of an item, before its question.
        question_tokens: of an item, other text before the question included.
        question_window: queries before an item's decision whose attention counts: about a question, since a longer
            window drowns it in what was read before.
        retrieval_thresholds: for ``threshold`` in the items, relative.
        visible_tokens: what the model still reads of a context-sensitive token's context.
        shared_tokens: so many tokens share one such reading; its last one sees that many more.
        evicted_fracs: of the tokens seen, for policies with a budget.
        fixed_fracs: of the peak of a document of ``document_tokens``: by a fixed budget, which evicts nothing before.
        int8_policies: these run their fixed budgets again with old entries in int8.
        recent_frac: share of a fixed budget that goes to the last tokens; the policy chooses the others.
        guarded_recent: thresholds run with so many last tokens guarded.
        thresholds: for ``threshold``, relative.
    """

    document_tokens: int = 4096
    decode_tokens: int = 256
    documents: int = 1
    dialogues: int = 1
    start: int = 0
    items: int = 48
    context_tokens: int = 384
    question_tokens: int = 64
    question_window: int = 16
    retrieval_thresholds: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    visible_tokens: int = 256
    shared_tokens: int = 128
    evicted_fracs: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)
    fixed_fracs: tuple[float, ...] = (0.25, 0.5, 0.75)
    int8_policies: tuple[str, ...] = ("heavy_hitter", "sink_window", "random")
    thresholds: tuple[float, ...] = (0.4, 0.6, 0.8)
    recent_frac: float = 0.8
    guarded_recent: int = 1536


QUICK = Sizes(
    document_tokens=512,
    decode_tokens=32,
    dialogues=1,
    items=2,
    context_tokens=192,
    question_tokens=96,
    retrieval_thresholds=(0.1,),
    evicted_fracs=(0.5,),
    fixed_fracs=(0.5,),
    thresholds=(0.1,),
    guarded_recent=192,
)
