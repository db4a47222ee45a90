"""What ``bench_cheap.py`` is made of."""
