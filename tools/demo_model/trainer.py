"""Training from a fixed seed, in chunks of fresh text, resumable at each chunk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import batches, corpus, tokens
from .muon import Muon
from .network import Network, Shape


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    seed: int = 7
    chunks: int = 40
    late_chunk: int = 10
    characters: int = 2_700_000
    batch_tokens: int = 4096
    matrix_rate: float = 0.02
    vector_rate: float = 0.004
    warm_steps: int = 60
    decay_from: float = 0.45
    compile: bool = True
    device: str = "cpu"


def _rate(step: int, chunk: float, plan: Plan) -> float:
    """The share of the full rate: it rises within a few steps and falls to nothing at the end."""
    late = (1 - chunk / plan.chunks) / (1 - plan.decay_from)
    return min(1.0, (step + 1) / plan.warm_steps, late)


class Trainer:
    """The network, its optimisers and how far they are."""

    def __init__(self, plan: Plan, shape: Shape, tokenizer: Tokenizer) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.tokenizer = plan, tokenizer
        self.pieces = tokens.pieces(tokenizer)
        self.network = Network(shape).to(plan.device)
        named = list(self.network.named_parameters())
        matrices = [weight for name, weight in named if name.endswith("proj.weight")]
        others = [weight for name, weight in named if not name.endswith("proj.weight")]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.chunk = self.step = self.tokens = 0
        self.seconds = 0.0
        if plan.compile:
            torch._dynamo.config.recompile_limit = 64
            self.network.compile_layers()

    def state(self) -> dict:
        """Everything that a later run needs to go on."""
        return {
            "network": self.network.state_dict(), "adam": self.adam.state_dict(),
            "muon": self.muon.states, "chunk": self.chunk, "step": self.step,
            "tokens": self.tokens, "seconds": self.seconds,
        }

    def resume(self, path: Path) -> None:
        """Go on from a saved state."""
        state = torch.load(path, map_location=self.plan.device)
        self.network.load_state_dict(state["network"])
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.states, state["muon"], strict=True):
            mine.copy_(saved)
        self.chunk, self.step = state["chunk"], state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]

    def _learn(self, batch: batches.Batch, chunk: float) -> Tensor:
        device = self.plan.device
        ids, at, targets, weights = (
            torch.from_numpy(part).to(device)
            for part in (batch.ids, batch.at, batch.targets, batch.weights)
        )
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = self.network(ids, at)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        rate = _rate(self.step, chunk, self.plan)
        for group in self.adam.param_groups:
            group["lr"] = self.plan.vector_rate * rate
        self.muon.step(self.plan.matrix_rate * rate)
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        return loss.detach()

    def run_chunk(self) -> str:
        """Train on the next chunk of text; returns a line that says how it went."""
        plan = self.plan
        began = time.perf_counter()
        seed = f"{plan.seed}/{self.chunk}"
        late = self.chunk >= plan.late_chunk
        documents = corpus.documents(seed, plan.characters, self.pieces, late)
        # Later the short answers are what is left to learn.
        power = 0.7 if late else 0.5
        made = batches.make(self.tokenizer, documents, plan.batch_tokens, seed, power)
        prepared = time.perf_counter() - began
        losses = []
        for at, batch in enumerate(made):
            losses.append(self._learn(batch, self.chunk + at / len(made)))
            self.step += 1
            self.tokens += batch.ids.size
        self.chunk += 1
        spent = time.perf_counter() - began
        self.seconds += spent
        loss = torch.stack(losses).mean().item()
        speed = len(made) * plan.batch_tokens / spent
        return (
            f"chunk {self.chunk}/{plan.chunks} step {self.step} tokens {self.tokens} "
            f"loss {loss:.4f} {speed:.0f} tokens/s (text {prepared:.1f} s) {self.seconds:.0f} s"
        )
