"""Any decoder through transformers' own modules, on this engine's runner, KV cache and ops."""
