"""Where a decode step spends its time.

python scripts/bench_step.py [--quick] [--repeats N] [--batch N] [--context N] [--router NAME] [--executor NAME]

32 requests past prompts of 512 tokens decode together, on an engine that takes the most likely tokens (greedy), on one
that draws (sampled) and on one that draws from the likeliest 90 % (top_p), in turns of 24 steps after a turn that
does not count. The parts of a step: schedule, pack, decide (features and router), dispatch; build (what a forward reads
is put together, and the rows are found whose logits are wanted), forward (the decoder), logits; sample, accept, retire
(retention, prefixes, and what ended requests held), and other, all that no part covers. Microseconds: a turn's
median, and over turns the median with the smallest and the largest; next to it the share of the step. "overhead" is a
step without forward and logits. The last line is one JSON object.
"""

from step_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
