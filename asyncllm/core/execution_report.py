"""ExecutionReport: the device, ops and backends of an engine, and a lower bound on step time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """Device, ops and backends of an engine, and the bytes that its steps read.

    A decode step reads each weight once, and the keys and values of its sequences. So on a CPU it
    takes at least ``floor`` seconds, unless the weights fit into a cache.

    Attributes:
        device: "cpu" or "cuda:N".
        dtype: torch's name of the type of weights and KV.
        op_set: "native", "onednn", "cpu", "torch" or "triton".
        attention_backend: names of the backends, one for each kind of layer.
        instruction_set: instruction set of the native ops; None if they do not run.
        num_threads: number of threads of the ops; None is torch's default.
        weight_bytes: bytes of all linear layers as stored, the output head included; of experts
            only those that one token uses.
        kv_bytes_per_token: bytes of KV per token, over all layers. A layer with a sliding
            window reads at most its window's tokens.
        memory_bandwidth: bytes per second that the engine's own threads read, measured as the
            median of five reads of 256 MiB; None on a GPU.
        packed_weights: file from which the weights were read, or to which they were written; or a
            phrase that says why there is none; see ``EngineConfig.packed_cache``.
    """

    device: str
    dtype: str
    op_set: str
    attention_backend: str
    instruction_set: str | None
    num_threads: int | None
    weight_bytes: int
    kv_bytes_per_token: float
    memory_bandwidth: float | None
    packed_weights: str

    def floor(self, num_kv_tokens: int) -> float | None:
        """Minimum duration, in seconds, of a decode step whose sequences have ``num_kv_tokens`` in
        all; None on a GPU."""
        if self.memory_bandwidth is None:
            return None
        bytes_read = self.weight_bytes + num_kv_tokens * self.kv_bytes_per_token
        return bytes_read / self.memory_bandwidth
