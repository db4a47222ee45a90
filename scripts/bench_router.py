"""What routers are worth on held-out text: KL, the share of an oracle's gain, and what a decision costs.

python scripts/bench_router.py [--quick] [--executor int8|int8_smooth] [--windows N] [--texts NAME ...] [--json PATH]

Windows of 2,048 tokens from the evaluation side of each text, each a prompt (forced prefill), at 5, 10 and 20 % of the
tokens high. KL is to float32, on a float32 simulation of both paths. Routers:

- random (the expectation, by 3 seeds, each with the window's first token low and high, weighed by the chance of both:
  that token alone is worth 6 to 16 % of all_low's KL) and oracle (Fisher label, 3 draws, per linear, summed over
  layers) send exactly the share of each window high ("exact");
- rule and the trained routers send high what reaches a threshold that was set on windows of the text's calibration side
  ("threshold": what users get, and what the JSON's first keys are of), and beside it exactly the share of each window
  with the largest scores ("rank");
- layerwise keeps the layers with the largest labels of these very windows high for all tokens, rounded up to whole
  layers, so that it has at least the routers' high work ("exact"); all_low has none.

AUROC and recall are within a window: of the 10 % largest labels, and of as many as the share. Brackets are 90 % of a
bootstrap over windows; a difference whose interval holds 0 is a tie. At the end the routers' time on 32 decode tokens
and on a chunk of 1,024, beside the executors' time for the same tokens in an engine, and requests served on the
smoothed path with a learned 5 % beside all_high. The last line is one JSON object.
"""

from router_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
