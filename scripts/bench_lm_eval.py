"""Multiple choice of lm-eval through the engine, against the harness's own transformers backend, in one run.

python scripts/bench_lm_eval.py [--quick] [--limit N] [--repeats N] [--tasks NAME ...] [--data-dir DIR]

Both sides get the same requests (a context and one choice each) of the same tasks, bfloat16, all on the high path, and
take turns after a turn on a few requests that does not count; the transformers backend has batches of 8. The engine
computes what choices have in common once, and the lm_head for the choices alone. Per task and in all: requests per
second of both, their ratio turn by turn, medians with the smallest and the largest; and how far their log-likelihoods
lie apart, in how many questions the choice differs. The last line is one JSON object.
"""

from lm_eval_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
