// Attention over token-granular slots: planned once per step, run once per layer.
//
// Q queries and K entries of a request, H query heads, G key heads, D head size. A request with one query is decoded:
// its keys are read where they lie, in ranges of kSplitKeys. One with more is prefill: its keys and values are packed
// into panels once per layer, and blocks of 32 (query, head) rows pass over them with an online softmax (Milakov and
// Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Ranges and blocks depend on the request alone,
// never on threads or on other requests.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "native/rows.h"

namespace tr {

constexpr int64_t kSplitKeys = 128;  // keys of one decode item
constexpr int64_t kChunkKeys = 32;   // of them between two rescalings
constexpr int64_t kSplitChunks = kSplitKeys / kChunkKeys;
constexpr int64_t kBlockRows = 32;   // (query, head) rows of one prefill item
constexpr int64_t kBlockKeys = 128;  // keys between two rescalings of a prefill item

// What a sparse query sees, in positions: types/sparse.py says it in full.
struct SparseShape {
    int64_t sinks, window, block, top_blocks;  // block 0: no query is sparse

    int64_t window_start(int64_t position) const {
        return std::max<int64_t>(0, position - window + 1) / block * block;
    }
    int64_t num_blocks(int64_t position) const { return window_start(position) / block; }  // before the window
    bool limits(int64_t position) const { return block && num_blocks(position) > top_blocks; }
};

struct AttentionShape {
    int64_t num_heads, num_groups, head_dim;
    float scale;
    int64_t window;  // a query sees keys with query - key < window; 0: all earlier keys
    bool is_bf16;
    SparseShape sparse;

    int64_t repeat() const { return num_heads / num_groups; }
    int64_t padded_dim() const { return (head_dim + 31) / 32 * 32; }
};

// A request some of whose queries are sparse.
struct SparseQueries {
    std::vector<int64_t> order;  // [Q] queries, those that see all before the sparse ones, each kind in its order
    int64_t num_full;            // of the first kind
    std::vector<int64_t> edges;  // of blocks before the last query's window: where their entries begin, and the last one's end

    int64_t num_blocks() const { return int64_t(edges.size()) - 1; }
};

struct AttentionRequest {
    const int64_t* query_rows;  // [Q] rows of q and out
    int64_t num_queries;
    int64_t query_start;        // position of the first query; the others follow
    const int64_t* slots;       // [K], oldest first
    const int64_t* positions;   // [K] ascending, or null when they are 0 .. K - 1
    int64_t num_keys;
    int64_t num_observed;       // the last queries, whose attention `received` sums up
    int64_t received_offset;    // where its K entries lie in `received`
    int64_t row;                // of the slot table
    const uint8_t* is_sparse;   // [Q] or null: none is
    const SparseQueries* sparse = nullptr;  // the plan's, where some are and do not see all

    // Query number i in the order that items take them in, and whether `received` sums it up.
    int64_t query(int64_t i) const { return sparse ? sparse->order[size_t(i)] : i; }
    bool is_observed(int64_t query) const { return query >= num_queries - num_observed; }

    // Entries [first, last) that a query at `position` sees.
    int64_t last_key(int64_t position) const;
    int64_t first_key(int64_t position, int64_t window) const;
};

struct AttentionItem {
    int64_t request, group;  // decode: all groups
    int64_t begin, end;      // decode: keys; prefill: (query, head) rows
    int64_t part;        // decode: its place among partial results; prefill: its place among column sums, -1: none
    int64_t cost;
};

// Mean keys of blocks, of one layer: values [rows of the slot table, G, D, num_blocks]. The first num_valid[row] of a row
// are up to date: a run adds those that it needs.
struct BlockMeans {
    float* values;
    int64_t num_blocks;
    int64_t* num_valid;
};

// One run over one layer.
struct AttentionRun {
    const void* q;       // [T, H, D], rows q_stride elements apart
    int64_t q_stride;
    KvMemory kv;         // contiguous
    void* out;           // [T, H * D] contiguous
    float* received;     // sums over heads / H and observed queries are added, per entry of each request; or null
    BlockMeans means;    // where some query is sparse
};

// ---- what the two kinds of items share --------------------------------------------------------------------------------

// Result of a decode item: per head its largest scaled score, sum of weights, weighted values (unnormalised), and where
// they are asked for the weights themselves, in the dtype of q and relative to the largest score up to their chunk.
struct DecodePart {
    float *largest, *sum, *values;  // [H], [H], [H, D]
    float* tops;                    // [H, kSplitChunks] or null
    void* weights;                  // [H, kSplitKeys] or null; entries beyond the range are anything
};

void decode_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                 const AttentionRun& run, const DecodePart& part);

// Puts the ranges of a request together, each weighing exp(its largest score - the largest of all). `counts`: keys of
// each; `scratch` [num_parts + H (2 + kSplitChunks)]; `out` [H * D]; `received` [sum of counts] or null: the mean over heads
// is added.
void merge_parts(const AttentionShape& shape, const DecodePart* parts, int64_t num_parts, const int64_t* counts,
                 float* scratch, void* out, float* received);

// Packed keys and values of one request and group: `num_panels` panels of 32 keys, from entry `first_key` on.
struct PackedKeys {
    uint8_t *keys, *values;
    int64_t first_key, num_panels;
};

// Bytes of one panel of 32 keys (or values).
int64_t packed_panel_bytes(const AttentionShape& shape);

void pack_panel(const AttentionShape& shape, const AttentionRequest& request, int64_t group, const KvMemory& kv,
                const PackedKeys& packed, int64_t panel);

// Where copies of entries go, in T: keys `stride` elements apart, each entry's value `value_offset` behind its key.
struct EntryRows {
    void* first;
    int64_t stride, value_offset;
};

// Copies keys and values of one group of entries slots[0 .. count); int8 ones become T.
void copy_entries(const AttentionShape& shape, const KvMemory& kv, const int64_t* slots, int64_t count, int64_t group,
                  const EntryRows& to);

// 0, 1, 2, ...: the slots of entries that lie side by side.
const int64_t* neighbours();

// `columns` [K] or null: attention received by every entry from the observed rows, summed over heads, is added.
void prefill_item(const AttentionShape& shape, const AttentionRequest& request, const AttentionItem& item,
                  const AttentionRun& run, const PackedKeys& packed, float* columns);

class AttentionPlan {
  public:
    AttentionPlan(const AttentionShape& shape, std::vector<AttentionRequest> requests);

    void run(const AttentionRun& run);

    int64_t received_size() const { return received_size_; }

    // Blocks that the means of a row must have room for; 0: no query is sparse.
    int64_t num_blocks() const;

  private:
    void plan_sparse(AttentionRequest& request);
    void plan_decode(int64_t request);
    void plan_prefill(int64_t request);
    void plan_rows(int64_t request, int64_t group, int64_t begin, int64_t end);
    bool decodes_in_parts(const AttentionRequest& request) const { return request.num_queries == 1 && !request.sparse; }
    PackedKeys packed(int64_t request, int64_t group, uint8_t* panels) const;
    void pack(const AttentionRun& run, uint8_t* panels);
    void bring_up_means(const AttentionRun& run) const;
    size_t items_per_claim() const;
    void run_item(const AttentionRun& run, const AttentionItem& item, float* parts, float* columns, uint8_t* panels);
    void finish_decode(const AttentionRun& run, int64_t request, float* parts);
    void finish_columns(const AttentionRun& run, int64_t request, const float* columns);

    AttentionShape shape_;
    std::vector<AttentionRequest> requests_;
    std::deque<SparseQueries> sparse_;  // whose places stay
    std::vector<AttentionItem> items_;
    struct PanelSpan {
        int64_t request, group, panel;
    };
    std::vector<PanelSpan> spans_;  // what is packed, once per layer
    int64_t received_size_ = 0;
    int64_t num_parts_ = 0;        // decode items
    std::vector<int64_t> first_part_, num_request_items_;  // per request
    // Prefill, per request: first packed key, offset of its panels in the work space (in panels), column sums' offset.
    std::vector<int64_t> first_key_, panel_offset_, column_offset_;
    int64_t num_panels_ = 0, num_column_floats_ = 0;
    std::unique_ptr<std::atomic<int64_t>[]> open_items_;
};

}  // namespace tr
