"""What ``bench_lm_eval.py`` is made of."""
