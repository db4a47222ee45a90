"""What ``bench_prefix.py`` is made of."""
