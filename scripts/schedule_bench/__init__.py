"""What ``bench_schedule.py`` is made of."""
