"""An engine that runs on the CPU as on a GPU: one step ahead, with traces for graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from asyncllm import AsyncLLMEngine
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.execution_mode import ExecutionMode
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.runtime.loading import LoadedModel, load_model
from tests.fakes import engine_with
from tests.static_runner import CPU, LateStream, TraceRecorder, run_late

PROMPTS = [
    "Tell me a story about Mia and a boat.",
    "What is 27 + 45?",
    "Ben lives in Rome. Clara lives in Oslo. Where does Clara live?",
    "Repeat after me: seven green lanterns",
]


@dataclass
class AheadOnCPU:
    """A loader whose engine runs one step ahead, with traces for graphs."""

    stream: LateStream = field(default_factory=LateStream)
    capturer: TraceRecorder = field(default_factory=TraceRecorder)
    said: list[tuple[int, int, str]] = field(default_factory=list)
    runner: ModelRunner | None = None

    def mode(self, config: EngineConfig) -> ExecutionMode:
        make = GraphCapturer if config.cuda_graphs == "off" else lambda: self.capturer
        return ExecutionMode(CPU, self.stream, make, 8, 256, 2)

    def load(self, config: EngineConfig, progress: Any) -> LoadedModel:
        def tell(done: int, total: int, stage: str = "weights") -> None:
            self.said.append((done, total, stage))
            progress(done, total, stage)

        plain = load_model(
            replace(config, cuda_graphs="auto", cudagraph_capture_sizes=None), progress
        )
        runner = build_model_runner(config, plain.model_config, tell, self.mode(config))
        self.runner = run_late(runner)
        self.num_layers = plain.model_config.num_layers
        return LoadedModel(self.runner, plain.tokenizer, plain.model_config)

    def engine(self, **fields: Any) -> AsyncLLMEngine:
        return engine_with(self.load, num_threads=1, attention_backend="torch", **fields)
