"""The engine against transformers and its own paths, as ratios in one run.

python scripts/bench_engine.py [--quick] [--repeats N] [--high-frac F] [--backend NAME]

Systems: all_high, all_low and routed (the rules as a score, with a budget) on the pool int8 (high = full); shared_high
and shared_routed on int8_shared (high = int8 weights with full activations); transformers' `generate` in the same dtype
in static batches of 8, padded on the left, in the order given. Requests: 16, prompts of 20 to 1000 tokens, outputs of 8
to 128, greedy, EOS ignored. Beside them: all_high with attention statistics, all_high on the reference kernels, all_low
with an int8 lm_head. KL is measured with thresholds set for the windows, and random goes high exactly as often as
routed. Systems take turns after a turn that does not count. A ratio is taken turn by turn; medians with
smallest and largest are printed, and the last line is one JSON object with the medians.
"""

from engine_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
