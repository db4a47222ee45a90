"""What is measured: a model's shapes, and the numbers of rows and keys. K inputs and N outputs of a product."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Weights ``[N, K]``; ``gated``: gate rows, then as many up rows."""

    name: str
    num_outputs: int
    num_inputs: int
    gated: bool = False

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs

    @property
    def width(self) -> int:
        """Features of a result."""
        return self.num_outputs // 2 if self.gated else self.num_outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """A decoder's geometry; SmolLM2-135M's by default."""

    hidden: int = 576
    inter: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    layers: int = 30

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads: choose a divisor"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE turns pairs), got {self.head_dim}")

    @property
    def qkv(self) -> int:
        """Features of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A layer's four."""
        attention = self.heads * self.head_dim
        return (
            Linear(name="qkv", num_outputs=self.qkv, num_inputs=self.hidden),
            Linear(name="out", num_outputs=self.hidden, num_inputs=attention),
            Linear(name="gate_up", num_outputs=2 * self.inter, num_inputs=self.hidden, gated=True),
            Linear(name="down", num_outputs=self.hidden, num_inputs=self.inter),
        )

    @property
    def lm_head(self) -> Linear:
        return Linear(name="lm_head", num_outputs=self.vocab, num_inputs=self.hidden)

    def copies(self, *linears: Linear) -> int:
        """So many copies of ``linears`` take the memory of all layers, which a step streams between two uses of one."""
        layer = sum(each.num_weights for each in self.linears)
        return ceil(self.layers * layer / sum(linear.num_weights for linear in linears))


def parse_shapes(text: str, *, vocab: int, layers: int) -> Shapes:
    """Shapes from ``hidden,inter,heads,kv_heads,head_dim``."""
    parts = text.split(",")
    if len(parts) != 5 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"--model-shapes {text!r} must be five numbers: hidden,inter,heads,kv_heads,head_dim"
        )
    hidden, inter, heads, kv_heads, head_dim = map(int, parts)
    return Shapes(
        hidden=hidden,
        inter=inter,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        layers=layers,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        rows: tokens of the token-wise operators.
        routed_rows: tokens of a product of two paths; a tenth of them high.
        decode_batches: requests that decode together.
        decode_context: entries that each of them holds.
        prefill_tokens: of one prompt that runs in one piece.
        observe_queries: the last queries whose attention a prefill reports.
        turn_s: an operator is called at least this long in each turn.
        bandwidth_bytes: buffers between the second cache and one beyond all caches.
        beyond_bytes: the smallest buffer that counts as beyond all caches.
        rate_rows: rows of the square products that find the product rate.
        rate_width: their inputs and outputs.
        machine_repeats: turns that find the fastest of each.
    """

    rows: tuple[int, ...] = (1, 4, 32, 256, 1024)
    routed_rows: tuple[int, ...] = (32, 256, 1024)
    decode_batches: tuple[int, ...] = (1, 32)
    decode_context: int = 512
    prefill_tokens: tuple[int, ...] = (256, 1024)
    observe_queries: int = 64
    turn_s: float = 0.02
    bandwidth_bytes: tuple[int, ...] = (32 << 20, 256 << 20)
    beyond_bytes: int = 256 << 20
    rate_rows: int = 1024
    rate_width: int = 2048
    machine_repeats: int = 20


QUICK = Sizes(
    rows=(1, 32),
    routed_rows=(32,),
    decode_batches=(1, 3),
    decode_context=40,
    prefill_tokens=(48,),
    observe_queries=8,
    turn_s=0.0002,
    bandwidth_bytes=(),
    beyond_bytes=8 << 20,
    rate_rows=64,
    rate_width=256,
    machine_repeats=2,
)
