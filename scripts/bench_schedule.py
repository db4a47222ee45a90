"""Token-level scheduling against static batches, all_high in one engine, and decode from int8 KV against full KV.

python scripts/bench_schedule.py [--quick] [--repeats N] [--static-batch N]

Workloads: mixed_lengths and uniform as in conf/workload (16 and 8 requests, all at once); crowd, 48 requests of the
same prompt lengths for 32 seats, all at once; poisson, the same 48 at 0.8 of the rate at which fcfs served them all at
once, so that the load is the same on every machine. Systems: fcfs, prefill_first and decode_first (its phase orders),
shortest_first; static_batch in batches of 8, and static_prefill_first, the same with prompts before decode; both again
in batches of 16 and 32 (their names end in the number), for fcfs has 32 seats. In the mixed order a static batch closes
when its first member decodes, so that long prompts form short batches; with prompts first it fills up.

Token level means fcfs, the default. Each ratio is taken against the static order that is better in this very number,
on its median over the passes, and names it: `tokenlevel_vs_static_tok_s` (higher is better) and
`tokenlevel_vs_static_ttft_p99` (lower is better), of crowd, where requests wait for seats; others have their own. These
two are over batches of --static-batch; `tokenlevel_vs_static16_tok_s` and its like are over batches of that size.
Systems take turns after a warm-up that does not count, latencies are percentiles within one pass, and every number is a
median over passes with the smallest and the largest. Ratios are taken pass by pass. The report says that token-level
scheduling does not pay where a pass of static is as good as one of fcfs, and where equal requests fill one batch.

KV: 8 requests that decode together at a context of 2,048, `int8_kv_decode2k_vs_full`, and the peaks of live KV bytes in
the same steps, `int8_kv_bytes_frac`; `small_kv_*`: the same with the entries of experiment=small_kv. The last line is
one JSON object.
"""

from schedule_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
