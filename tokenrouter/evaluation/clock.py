"""The clock of a pass: real time for computing, none for waiting."""

import time


class VirtualClock:
    """A request's arrival, on its workload's axis, against time that runs only while something is computed.

    Args:
        start_s: where the axis starts: the first arrival.

    Attributes:
        skipped_s: the idle gaps that were jumped over, in seconds.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._start_s = start_s
        self._started = time.perf_counter()
        self._reached_s = start_s  # rounding could leave the sum just below it
        self.skipped_s = 0.0

    def elapsed_s(self) -> float:
        """Seconds since the first arrival, skipped ones included."""
        return time.perf_counter() - self._started + self.skipped_s

    def now_s(self) -> float:
        """The moment on the workload's axis; never before the last moment that was skipped to."""
        return max(self._start_s + self.elapsed_s(), self._reached_s)

    def skip_to(self, arrival_s: float) -> None:
        """Jump to ``arrival_s``; without effect where that has passed."""
        self.skipped_s += max(0.0, arrival_s - self.now_s())
        self._reached_s = max(self._reached_s, arrival_s)

    def real_s(self, arrival_s: float) -> float:
        """An arrival on the clock of ``time.perf_counter``, as long as nothing more is skipped."""
        return self._started + arrival_s - self._start_s - self.skipped_s
