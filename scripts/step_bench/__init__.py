"""What ``bench_step.py`` is made of."""
