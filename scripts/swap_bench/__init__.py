"""What ``bench_swap.py`` is made of."""
