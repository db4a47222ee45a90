"""What ``bench_memory.py`` is made of."""
