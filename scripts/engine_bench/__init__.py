"""What ``bench_engine.py`` is made of."""
