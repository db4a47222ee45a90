"""Calls every native operator with arguments that fit, nearly fit or do not fit at all, in a process of its own.

``python -m tests.kernels.attack SEED CALLS`` prints how many calls were accepted and refused. Only ValueError,
IndexError and TypeError may come back, and nothing outside of a result may change; a refused call of those that the
engine makes (linears, MLP, attention with its KV write) changes nothing at all.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.attack_arguments import DTYPES, Arguments
from tokenrouter.executors.packing import packer
from tokenrouter.kernels import (
    AttentionPlan,
    BinRows,
    Cut,
    Int8Entries,
    NativeKernels,
    Norm,
    PackedWeights,
    Product,
    RouterTable,
    TailWeights,
    select,
)
from tokenrouter.types import AttentionBatch

NUM_SLOTS = 90
NUM_INT8 = 40


class Attacker(Arguments):
    """Calls with random arguments."""

    def norm(self, kernels: NativeKernels) -> None:
        num_rows, width, dtype = self.size(), self.size(), self.choice()
        x, weight = (self.tensor(*s, dtype=dtype) for s in ((num_rows, width), (width,)))
        residual = self.tensor(num_rows, width, dtype=dtype) if self.size() < 8 else None
        out = self.tensor(num_rows, width, dtype=dtype)
        kernels.rms_norm(x, weight, 1e-5, residual_TE=residual, out=out)
        rows = self.rows(num_rows, width, dtype)
        kernels.rms_norm_quantize(x, weight, 1e-5, residual_TE=residual, out=rows)

    def gate(self, kernels: NativeKernels) -> None:
        num_rows, width, dtype = self.size(), self.size(), self.choice()
        x = self.tensor(num_rows, 2 * width, dtype=dtype)
        kernels.silu_mul(x, out=self.tensor(num_rows, width, dtype=dtype))
        kernels.quantize_rows(x, out=self.rows(num_rows, 2 * width, dtype))

    def product(self, kernels: NativeKernels) -> None:
        num_rows, num_out, num_in, dtype = self.size(), self.size(), self.size(), self.choice()
        weight = torch.randn(
            num_out, num_in
        ).bfloat16()  # packing is torch's own until the weights are rows
        bias = self.tensor(num_out) if self.size() < 8 else None
        dense, options = kernels.pack_matmul(weight, bias), {"accumulate": self.size() < 8}
        out = self.tensor(num_rows, num_out, dtype=dtype)
        kernels.matmul(self.tensor(num_rows, num_in, dtype=torch.bfloat16), dense, out=out)
        int8 = kernels.pack_int8(weight, bias)
        kernels.int8_matmul(self.rows(num_rows, num_in, dtype), int8, out=out, **options)
        x = self.tensor(num_rows, num_in, dtype=dtype)
        kernels.int8_weight_matmul(x, int8, out=out, **options)
        low, high = self.rows(self.size(), num_in, dtype), self._random.choice((dense, int8))
        both = self.tensor(num_rows + len(low.q_TK), num_out, dtype=dtype)
        x = self.tensor(num_rows, num_in, dtype=torch.bfloat16)
        kernels.routed_matmul(x, high, low, int8, out=both, **options)
        int4 = kernels.pack_int4(weight, bias)
        kernels.int4_matmul(self.rows(num_rows, num_in, dtype), int4, out=out, **options)
        if num_out % 2 == 0:
            gated = kernels.pack_int8(weight, bias, gated=True)
            out = self.tensor(num_rows, num_out // 2, dtype=dtype)
            kernels.int8_matmul(self.rows(num_rows, num_in, dtype), gated, out=out, **options)

    def rope(self, kernels: NativeKernels) -> None:
        num_tokens, heads, groups, dim = (self.size() % 9 for _ in range(4))
        dim, dtype, num_slots = self._random.choice((dim, 2 * dim, 64)), self.choice(), 12
        int8 = None
        if self.size() < 8:
            int8 = Int8Entries(
                self.tensor(num_slots - 5, 2 * groups, dim, dtype=torch.int8),
                self.tensor(num_slots - 5, 2 * groups),
            )
        kernels.rope_store_kv(
            self.tensor(num_tokens, (heads + 2 * groups) * dim, dtype=dtype),
            self.tensor(num_tokens, dim, dtype=dtype),
            self.tensor(num_tokens, dim, dtype=dtype),
            self.ints([self._random.randrange(num_slots) for _ in range(num_tokens)]),
            self.tensor(5 if int8 else num_slots, 2 * groups, dim, dtype=dtype),
            int8=int8,
            out=self.tensor(num_tokens, heads, dim, dtype=dtype),
        )

    def weights(
        self,
        kernels: NativeKernels,
        product: Product,
        num_out: int,
        num_in: int,
        *,
        gated: bool = False,
    ) -> PackedWeights:
        """Mostly of the format that ``product`` takes; dense ones are bfloat16: float32 ones are torch's own."""
        weight = torch.randn(num_out * (2 if gated else 1), num_in).bfloat16()
        bias = torch.randn(len(weight)) if self.size() < 8 else None
        if self.rarely():
            product = self._random.choice(list(Product))
        return packer(kernels, product)(weight, bias, gated=gated)

    def linear(self, kernels: NativeKernels) -> None:
        num_rows, num_out, num_in, dtype = self.size(), self.size(), self.size(), self.choice()
        product, gated = self._random.choice(list(Product)), self.size() < 3
        kernels.project(
            product,
            self.tensor(num_rows, num_in, dtype=dtype),
            self.weights(kernels, product, num_out, num_in, gated=gated),
            norm=Norm(self.tensor(num_in, dtype=dtype), 1e-5) if self.size() < 17 else None,
            out=self.tensor(num_rows, num_out, dtype=dtype) if self.size() < 33 else None,
            accumulate=self.size() < 8,
        )

    def layer_tail(self, kernels: NativeKernels) -> None:
        num_rows, features, inner, attention, following = (self.size() for _ in range(5))
        dtype, product = self.choice(), self._random.choice(list(Product))
        outputs, inputs = (self.size() if self.rarely() else n for n in (features, inner))
        is_last = self.size() < 8
        weights = TailWeights(
            out=self.weights(kernels, product, features, attention),
            norm=Norm(self.tensor(features, dtype=dtype), 1e-5),
            gate_up=self.weights(kernels, product, inner, features, gated=not self.rarely()),
            down=self.weights(kernels, product, outputs, inputs),
            next_norm=None if is_last else Norm(self.tensor(features, dtype=dtype), 1e-5),
            next_qkv=None if is_last else self.weights(kernels, product, following, features),
        )
        kernels.layer_tail(product, weights)(
            self.tensor(num_rows, attention, dtype=dtype),
            self.tensor(num_rows, features, dtype=dtype),
            self.tensor(num_rows, following, dtype=dtype) if self.size() < 33 else None,
        )

    def tokens(self, kernels: NativeKernels) -> None:
        num_rows = self.size()
        x_TV = self.tensor(num_rows, self.size(), dtype=self.choice())
        inverse_T = self.tensor(num_rows).abs() + (not self.rarely())
        uniform_T = self.tensor(num_rows, dtype=torch.float64).abs() / (3 if self.rarely() else 4)
        num_found = len(kernels.row_max(x_TV)[1])
        if x_TV.dtype in DTYPES[:2]:  # others are torch's own
            assert len(kernels.draw(x_TV, inverse_T, uniform_T)) == num_found
            cut = Cut(
                self.ints([self.size() for _ in range(num_rows)]),
                (self.tensor(num_rows, dtype=torch.float64).abs() + 1)
                / (3 if self.rarely() else 4),
                self.tensor(num_rows, dtype=torch.float64).abs() / (2 if self.rarely() else 3),
            )
            assert len(kernels.draw_cut(x_TV, inverse_T, uniform_T, cut)) == num_found

    def scores(self, kernels: NativeKernels) -> None:
        num_tokens, hidden, edges = self.size(), self.size(), self.size()
        features, ids = (1 + self.size() % 4 for _ in range(2))
        num_rows, vocab = features * 3 + ids + 1, self.size()
        has_vocabulary = self.size() < 17
        more = 2 * (vocab + 1) if has_vocabulary else 0
        table = RouterTable(
            bins=BinRows(
                self.tensor(features, edges),
                self.ints([3 * feature for feature in range(features)]),
                self.ints([2] * features),
                self.ints(list(range(features * 3, num_rows))),
            ),
            table_KC=self.tensor(num_rows + more, hidden + 2),
            head_PH=self.tensor(2, hidden),
            vocab_row=num_rows if has_vocabulary else None,
            previous_column=self._random.randrange(-1, features) if has_vocabulary else -1,
        )
        kernels.router_mlp(
            self.tensor(num_tokens, features),
            self.ints([self.size() for _ in range(num_tokens)]),
            self.ints([self._random.randrange(2) for _ in range(num_tokens)]),
            table,
        )

    def arena(
        self, groups: int, dim: int, dtype: torch.dtype, num_int8: int
    ) -> tuple[Tensor, Int8Entries | None]:
        """``NUM_SLOTS`` entries of which the last ``num_int8`` are in int8, or nearly so."""
        if self.rarely():
            num_int8 = 0 if num_int8 else NUM_INT8
        kv_SPD = self.tensor(NUM_SLOTS - num_int8, 2 * groups, dim, dtype=dtype)
        if not num_int8:
            return kv_SPD, None
        q_SPD = self.tensor(num_int8, 2 * groups, dim, dtype=torch.int8)
        return kv_SPD, Int8Entries(q_SPD, self.tensor(num_int8, 2 * groups))

    def plan(
        self, kernels: NativeKernels, dtype: torch.dtype, groups: int, dim: int, num_int8: int
    ) -> tuple[AttentionPlan, int, int]:
        """A plan of some requests over ``NUM_SLOTS``, their tokens and the query heads; its tables change later."""
        heads = groups * self._random.choice((1, 2, 3, 5))
        queries = [self._random.choice((1, 1, 2, 40)) for _ in range(self.size() % 4)]
        keys = [self._random.randrange(0, NUM_SLOTS) for _ in queries]
        starts = [self._random.randrange(0, NUM_SLOTS) for _ in queries]
        rows = list(range(sum(queries)))
        num_tokens = len(rows)
        self._random.shuffle(rows)
        positions = torch.arange(NUM_SLOTS).repeat(4, 1) if self.size() < 8 else None
        batch = AttentionBatch(
            query_rows_T=self.ints(rows),
            num_queries_B=self.ints(queries),
            query_start_B=self.ints(starts),
            row_B=self.ints([self._random.randrange(4) for _ in queries]),
            num_keys_B=self.ints(keys),
            slots_RN=torch.randint(0, NUM_SLOTS, (4, NUM_SLOTS)),
            positions_RN=positions,
        )
        plan = kernels.plan_attention(
            batch,
            num_slots=NUM_SLOTS,
            num_int8=num_int8,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=dim,
            scale=0.1,
            dtype=dtype,
            window=self._random.choice((None, 0, 1, 30, 2**62)),
            num_observed_B=self.ints([self._random.choice((0, 1, 7, 2**62)) for _ in queries]),
        )
        for table in (batch.slots_RN, positions, batch.query_rows_T):
            if table is not None:
                table.fill_(self._random.choice((-1, 2**30)))
        return plan, num_tokens, heads

    def attention(self, kernels: NativeKernels) -> None:
        groups, dim = self._random.choice((1, 2, 3)), self._random.choice((1, 2, 20, 32, 64))
        dtype = self.choice()
        num_int8 = self._random.choice((0, 0, 1, NUM_INT8))
        plan, num_tokens, heads = self.plan(kernels, dtype, groups, dim, num_int8)
        kv_SPD, int8 = self.arena(groups, dim, dtype, num_int8)
        q_THD = self.tensor(num_tokens, heads, dim, dtype=dtype)
        out_TA = self.tensor(num_tokens, heads * dim, dtype=dtype)
        received = self.tensor(plan.received_size) if self.size() < 8 else None
        kernels.attention(q_THD, kv_SPD, plan, out=out_TA, received=received, int8=int8)

    def attend(self, kernels: NativeKernels) -> None:
        groups, dim = self._random.choice((1, 2, 3)), self._random.choice((2, 6, 20, 32, 64))
        dtype = self.choice()
        num_int8 = self._random.choice((0, 0, 1, NUM_INT8))
        plan, num_tokens, heads = self.plan(kernels, dtype, groups, dim, num_int8)
        kv_SPD, int8 = self.arena(groups, dim, dtype, num_int8)
        slots = [self._random.randrange(NUM_SLOTS) for _ in range(num_tokens)]
        kernels.attend(
            self.tensor(num_tokens, (heads + 2 * groups) * dim, dtype=dtype),
            self.tensor(num_tokens, dim, dtype=dtype),
            self.tensor(num_tokens, dim, dtype=dtype),
            self.ints(slots),
            kv_SPD,
            plan,
            int8=int8,
            out=self.tensor(num_tokens, heads * dim, dtype=dtype) if self.size() < 33 else None,
            received=self.tensor(plan.received_size) if self.size() < 8 else None,
        )


def main(seed: int, num_calls: int) -> None:
    """Attacks; a crash ends the process."""
    attacker, kernels = Attacker(seed), select("native")
    assert isinstance(kernels, NativeKernels)
    torch.manual_seed(seed)
    at_once = [
        attacker.linear,
        attacker.layer_tail,
        attacker.tokens,
        attacker.scores,
        attacker.attend,
    ]
    attacks: list[Callable[[NativeKernels], None]] = [
        attacker.norm,
        attacker.gate,
        attacker.product,
        attacker.rope,
        attacker.attention,
        *at_once,
    ]
    accepted = [0] * len(attacks)
    refused = [0] * len(attacks)
    for call in range(num_calls):
        kernels.limit_isa(("plain", "avx2", "avx512", "amx")[call % 4])
        which = call % len(attacks)
        try:
            attacks[which](kernels)
            accepted[which] += 1
            attacker.check_canaries()
        except (ValueError, IndexError, TypeError):
            refused[which] += 1
            attacker.check_canaries(unchanged=attacks[which] in at_once)
    print(*accepted, *refused)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
