"""An executor that passes pickles only."""

from __future__ import annotations

import pickle

from asyncllm.core.batch import GrammarMask, StepBatch, StepResult
from asyncllm.core.executor import Executor


class Pickling:
    """As an executor in another process: no object goes through, and no ``in_process``."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.info = executor.info

    def launch(self, batch: StepBatch) -> None:
        self.executor.launch(pickle.loads(pickle.dumps(batch)))

    def sample(self, masks: GrammarMask) -> None:
        self.executor.sample(pickle.loads(pickle.dumps(masks)))

    def collect(self) -> StepResult:
        return pickle.loads(pickle.dumps(self.executor.collect()))

    def discard(self) -> None:
        self.executor.discard()

    def close(self) -> None:
        self.executor.close()
