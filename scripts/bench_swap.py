"""Preemption: swap, recompute, or the cheaper of both; and memory that goes back to the system while requests run.

python scripts/bench_swap.py [--quick] [--repeats N] [--data-dir FOLDER]

Serving: more requests than the KV pool holds, at contexts of 128 and 1,500 tokens, with entries in bf16 and in int8.
Three engines serve the same requests in turns: `never` has no host tier, so a preempted request is computed again;
`always` copies every one; `by_cost` has the library's choice. Per engine: output tok/s (median of passes with the
smallest and the largest, after a warm-up that does not count), preemptions, copies out and in, recomputes, tokens that
ran again, and the seconds in copies. `by_cost_vs_fixed` is by_cost over the better of the two others, pass by pass;
`smallest` is its worst median.

One request: milliseconds to copy its entries out and back against computing them again, and what the choice estimated.

Release: a run with a retention policy in which most requests end early: bytes of live entries, of slots whose memory is
in use, and of the process, over its steps. The engine gives memory back by itself.

The last line is one JSON object.
"""

from swap_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
