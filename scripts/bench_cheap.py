"""What cheaper decisions cost in quality and save in time: every few tokens, from a cache, in batches.

python scripts/bench_cheap.py [--quick] [--only shared|cost|quality ...] [--windows N] [--turns N] [--json PATH]

The trained mlp for int8 at a budget of 10 %, asked about each token, and in wrappers: interval (1, 2, 4 and 8 tokens),
cached (key=pattern and key=exact), batched (64 and 256 tokens). all_low and random (10 %) stand beside them.

- Quality: windows of held-out text as prompts, KL to float32 on a float32 simulation of both paths. Thresholds are set
  on the text's calibration side, of interval on the tokens that decide. Brackets are 90 % of a bootstrap over windows.
- Cost: features and router in an engine, microseconds per token: where 32 requests decode, whose positions differ,
  where one does (decode_1), and in the prefill of one prompt, in one chunk and in chunks of 16 tokens. Caches are
  emptied before each prompt and before decode, where they get warm. Medians of turns (in decode of 8 steps) after one
  that does not count, in brackets their 10th and 90th percentile; ratios are turn by turn.
- Shared prompt: 32 requests at once, 512 tokens in common and 60 of their own, 32 tokens out, without and with prefix
  sharing. "asked" is the share of all tokens, computed or shared, that the mlp was asked about.

The last line is one JSON object.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from scripts.cheap_bench import app

    app.main(__doc__ or "")


if __name__ == "__main__":
    main()
