"""ExecutionReport: the path that an engine's steps take, and a lower bound of their time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """How steps run on this machine.

    A decode step reads each weight once, and the keys and values of its sequences: on a CPU it
    cannot be shorter than ``floor`` (where the weights fit into a cache it can).

    Attributes:
        device: "cpu" or "cuda:N".
        dtype: of weights and KV, as torch names it.
        op_set: "native", "onednn", "cpu", "torch" or "triton".
        attention_backend: of each kind of layer, by name.
        instruction_set: of the native ops; None without.
        num_threads: of the ops; None is torch's own number.
        weight_bytes: of all linear layers, the output head included, as they are stored; of
            experts those of one token.
        kv_bytes_per_token: of all layers, as far as the windows of those reach that have one.
        memory_bandwidth: bytes a second that the engine's own threads read, the median of five
            times 256 MiB; None on a GPU.
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

    def floor(self, num_kv_tokens: int) -> float | None:
        """Seconds of a decode step whose sequences have ``num_kv_tokens`` in all; None on a
        GPU."""
        if self.memory_bandwidth is None:
            return None
        bytes_read = self.weight_bytes + num_kv_tokens * self.kv_bytes_per_token
        return bytes_read / self.memory_bandwidth
