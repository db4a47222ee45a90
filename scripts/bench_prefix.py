"""Requests that begin alike, with and without prefix sharing, in one run.

python scripts/bench_prefix.py [--quick] [--repeats N]

32 requests at once whose prompts have their first 512 tokens in common and 60 of their own, 32 tokens out, all_high:
once on an engine that computes every prompt (plain), once on one that uses earlier requests' entries (shared). They
take turns after a turn that does not count, and every turn starts with an empty prefix cache. Per engine: seconds in
forwards, TTFT, output tok/s, the peak of live KV bytes, and the prompt tokens that were not computed; medians over
turns with the smallest and the largest. Ratios are shared over plain, turn by turn. The last line is one JSON object.
"""

from prefix_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
