"""Each operator of the native kernels against torch's own and against its roofline.

python scripts/bench_kernels.py [--quick] [--repeats N] [--threads N] [--cached] [--only FAMILY ...]
                                [--model-shapes hidden,inter,heads,kv_heads,head_dim] [--vocab N] [--layers N]

The machine is measured first: bandwidth of reading and of copying, from a buffer that lies in the second cache to
one beyond all caches, and the rate of large products. A roofline is the longer of an operator's bytes by the bandwidth
of the smallest such buffer that holds its working set, and its operations by the product rate; "share" is how much of
it native reaches. Beside native: the reference backend (torch's own operators; its dense bf16 products are oneDNN's
with packed weights); torch's special operator where there is one (library: oneDNN's qlinear, _weight_int8pack_mm,
scaled_dot_product_attention on gathered entries); for rows of two paths the two products after each other (separate).

Between two uses of weights or KV entries as many bytes of others are streamed as all layers have, as in a decode step;
--cached repeats the same ones instead. Rows come from a cache, as in a forward. Implementations take turns after a turn
that does not count; times are microseconds per call from Python: medians, native's with smallest and largest. The last
line is one JSON object.
"""

from kernel_bench.app import main

if __name__ == "__main__":
    main(__doc__ or "")
