"""The least time that an operator's memory traffic and products take on a measured machine."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one call cannot avoid.

    Attributes:
        read_bytes: read at least once.
        written_bytes: written once.
        bf16_ops: multiplications and additions of full-precision products.
        int8_ops: those of int8 products.
        working_set_bytes: what is touched until the same memory is touched again.
    """

    read_bytes: int
    written_bytes: int
    bf16_ops: int = 0
    int8_ops: int = 0
    working_set_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Bytes per second of a buffer: read only, and copied (bytes read and bytes written both count)."""

    num_bytes: int
    read_bytes_s: float
    copy_bytes_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Seconds, and which of the two takes longer."""

    seconds: float
    bound: Literal["memory", "product"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was measured of a machine.

    Attributes:
        hardware: processor or device, and threads.
        isa: the native operators' instruction set.
        threads: of torch.
        levels: ascending in size; the first lies in the second cache, the last beyond all caches.
        bf16_ops_s: the best product rate of native operators and torch.
        int8_ops_s: the same of int8 products.
    """

    hardware: str
    isa: str
    threads: int
    levels: tuple[Level, ...]
    bf16_ops_s: float
    int8_ops_s: float

    def level(self, working_set_bytes: int) -> Level:
        """The smallest level that holds the working set, else the largest."""
        holding = (level for level in self.levels if level.num_bytes >= working_set_bytes)
        return next(holding, self.levels[-1])

    def roofline(self, work: Work) -> Roofline:
        """Memory traffic and products overlap at best: the longer of the two is the limit.

        Bytes that are read and as many that are written move at the copy's rate, what else is read at the read's.
        """
        level = self.level(work.working_set_bytes)
        copied = 2 * min(work.read_bytes, work.written_bytes)
        only_read = max(0, work.read_bytes - work.written_bytes)
        only_written = max(0, work.written_bytes - work.read_bytes)
        memory_s = only_read / level.read_bytes_s + (copied + only_written) / level.copy_bytes_s
        product_s = work.bf16_ops / self.bf16_ops_s + work.int8_ops / self.int8_ops_s
        return Roofline(
            seconds=max(memory_s, product_s),
            bound="memory" if memory_s >= product_s else "product",
        )

    def lines(self) -> list[str]:
        """For the head of a table."""
        return [
            f"{self.hardware}; instruction set {self.isa}",
            *(
                f"  buffer of {level.num_bytes / 2**20:8.1f} MiB: read {level.read_bytes_s / 1e9:7.1f} GB/s, "
                f"copy {level.copy_bytes_s / 1e9:7.1f} GB/s (read and written)"
                for level in self.levels
            ),
            f"  products: bf16 {self.bf16_ops_s / 1e9:.0f} Gop/s, int8 {self.int8_ops_s / 1e9:.0f} Gop/s",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)
