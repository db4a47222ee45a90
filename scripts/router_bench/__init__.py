"""What ``bench_router.py`` is made of."""
