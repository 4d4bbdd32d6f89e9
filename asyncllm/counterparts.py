"""COUNTERPARTS: map from names in vLLM or an earlier asyncllm to asyncllm's names."""

from __future__ import annotations

from collections.abc import Mapping

COUNTERPARTS: Mapping[str, Mapping[str, str]] = {
    "setting": {
        "cuda_graph_sizes": "cudagraph_capture_sizes",
        "enforce_eager": 'cuda_graphs="off"',
        "guided_decoding_backend": "structured_outputs_backend",
        "kv_cache_memory_bytes": "kv_cache_memory",
        "num_gpu_blocks_override": "num_blocks",
        "num_state_checkpoints": "num_state_snapshots",
        "tool_parser": "tool_call_parser",
    },
    "sampling parameter": {
        "guided_choice": 'structured_outputs={"choice": …}',
        "guided_decoding": "structured_outputs",
        "guided_grammar": 'structured_outputs={"grammar": …}',
        "guided_json": 'structured_outputs={"json": …}',
        "guided_json_object": 'structured_outputs={"json_object": True}',
        "guided_regex": 'structured_outputs={"regex": …}',
        "params": "sampling_params",
    },
}
"""Map from a kind of name (as in error messages) and the foreign name to asyncllm's name. Equal
names are left out."""
