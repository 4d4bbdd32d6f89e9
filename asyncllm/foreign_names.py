"""asyncllm's names for the settings and fields of vLLM, OpenAI and earlier versions."""

from __future__ import annotations

from collections.abc import Mapping

OUR_NAMES_BY_FOREIGN_NAME: Mapping[str, Mapping[str, str]] = {
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
    "field": {
        "extra_body": "what it holds, at the top level: it is an argument of OpenAI's client",
    },
    "field of /v1/chat/completions": {
        "input": "messages",
        "instructions": "a message with the role system",
        "max_output_tokens": "max_completion_tokens",
        "prompt": "messages",
        "reasoning": "reasoning_effort",
        "text": "response_format",
        "tool_choice.name": 'function={"name": …}',
        "tools[].name": 'function={"name": …}',
    },
    "field of /v1/completions": {
        "input": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "messages": "prompt; conversations go to /v1/chat/completions",
    },
    "field of /v1/responses": {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": 'reasoning={"effort": …}',
        "response_format": 'text={"format": …}',
        "tool_choice.function": "name, beside type",
        "tools[].function": "name, description and parameters, beside type",
    },
}
"""Map from a kind, such as "setting", and a name in another API to asyncllm's name, for error
messages. A nested name is written as a path. Names that are the same in asyncllm are left out."""
