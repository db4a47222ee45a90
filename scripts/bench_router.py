"""What routers are worth on held-out text: KL, the share of an oracle's gain, throughput, and what a decision costs.

python scripts/bench_router.py [--quick] [--executor int8|int8_smooth] [--windows N] [--texts NAME ...] [--json PATH]
    [--plots FOLDER] [--routers FOLDER] [--phases prefill|decode ...] [--compared ROUTER ...] [--keep FOLDER]
    [--decode-batch N] [--turns N] [--only-costs]

Windows of 2,048 tokens from the evaluation side of each text, at 5, 10 and 20 % of the decided tokens high. KL is to
float32, on a float32 simulation of both paths. Each window is run in both phases. Prefill: the window is a prompt.
Decode: its first token is a prompt, which runs high for every router, and the others are forced one by one; the logits
before each, which entropy and a decode head of its own look at, are those of the high path. KL is of the decided
tokens; the same choice has the same KL in both phases. Routers:

- mlp_tokens is the mlp where all layers of a token go one way (router.layer_groups=false);
- random (the expectation, by 3 seeds, in prefill each with the window's first token low and high, weighed by the chance
  of both: that token alone is worth 6 to 16 % of all_low's KL) and oracle (Fisher label, 3 draws, per linear, summed
  over layers) send exactly the share of each window high ("exact");
- rule, the trained routers and, in decode, entropy send high what reaches a threshold that was set on windows of the
  text's calibration side ("threshold": what users get, and what the JSON's first keys are of), and beside it exactly
  the share of each window with the largest scores ("rank");
- layerwise keeps the layers that the labels of the training text find neediest high for all tokens, rounded up to whole
  layers, so that it has at least the routers' high work ("exact"); all_low has none.

AUROC and recall are within a window: of the 10 % largest labels, and of as many as the share. Brackets are 90 % of a
bootstrap over windows; a difference whose interval holds 0 is a tie.

Throughput is that of an engine with a bfloat16 high path which runs a prompt of 1,024 tokens, or decodes 32 requests
(``--decode-batch``) in mixed forwards, the router's time included, as a multiple of all_high's: measured per router at
each share, in turns, and read in between by a line (the oracle is as fast as random; entropy's is not measured). "At
equal throughput" compares the mlp with rule and layerwise where they are as fast, on their own curves. ``--plots``
draws all curves, a picture per text. With ``--keep`` a text that was measured at this commit is not measured again, so
that an interrupted run goes on, and throughput can be timed once more without it, at another batch too. Decode holds
the KV of all engines at once, 12 GB.

At the end the routers' time on 32 decode tokens and on a chunk of 1,024, beside the executors' time for the same tokens
in an engine, and requests served on the smoothed path with a learned 5 % beside all_high; ``--only-costs`` measures
these alone. Last comes one JSON object.
"""

from router_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
