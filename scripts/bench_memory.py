"""What KV retention costs in quality, against the peak KV memory that it saves.

python scripts/bench_memory.py [--quick] [--documents N] [--dialogues N] [--start N] [--items N] [--data-dir DIR]
                               [--policies NAME ... | --only-shipped] [--json PATH]
                               [--evicted-fracs [FRAC ...]] [--fixed-fracs [FRAC ...]]
                               [--question-window N] [--interval N] [--window N] [--layers N] [--groups N] [--sinks N]
                               [--recent N]

Documents of 4,096 tokens (wiki_articles, arxiv_latex; N of each) and dialogues (mt_bench_101), all in one engine: the
prompt in prefill chunks, the last 256 tokens fed one by one. --start passes over the first N of each set, so that
settings can be judged on other documents than those they were chosen on. Reference: the same bf16 engine without
retention. Policies evict 25, 50, 75 and 87.5 % of the tokens seen ("50 %"), or all beyond a fixed number with which the
longest documents' peak falls by a quarter, half or three quarters ("to 1920 r1536": 1,536 of them are the last tokens,
the policy chooses the others; "int8": entries become int8 when they are older than --recent); --evicted-fracs and
--fixed-fracs name other shares. threshold runs with several thresholds and that many last tokens guarded; route runs
with the rule router, all of whose routes are computed high, so that only the classes of their entries differ. full
evicts nothing and shows the noise of other chunks; the policy int8 evicts nothing either and keeps every entry in int8.
--only-shipped runs the configs of conf/kvcache with their own windows, layers and budgets instead ("as shipped").

Peak live bytes: each document's own peak, entries of the running chunk included, summed over documents; an engine in
which they do not peak together needs less at once (engine_peak_live_bytes). KL in thousandths of nats; "ppl % of
documents": the smallest and the largest change of one document (in the JSON object quartiles, and every document).

Context-sensitive: tokens whose most likely successor changes when the model reads only its last 256 tokens, afresh. To
save work 128 tokens share one such reading, so that they see 256 to 383. Evicting all but 256 entries would not do: it
also takes the attention sink away, and most of what then changes is due to that.

Retrieval, a second table: in 384 tokens of Python's language reference stand 16 words to copy, or 6 keys of two words
with a value each; 64 tokens later the question has been read: the list's first 7 words, or two of the keys with their
values and a third key. Then come one more word and the other 8, or a colon and the value. Each answer is a choice, by
its logit, among the words not yet said (a uniform guess finds 12.5 and 25 %). A setting decides once: "before" the
question, when it has the context, or "after" it, when it has seen what is asked for; the share is of the tokens seen.
Attention is that of the last --question-window queries, about a question. Thresholds evict what they do: see the
column. What the full cache finds, what a guess, and what the question without its context, stands above the table.
Intervals are bootstraps over items; beats_controls in the JSON object names the settings that find more than random and
sink_window do at the same share, outside the interval of the difference. --documents 0 --dialogues 0 leaves the first
table out, --items 0 the second.

The last line is one JSON object; --json writes it to a file, too.
"""

from memory_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
