"""Engines without a model, for the tests of applications.

``fake_engine`` and ``fake_llm`` make engines with scripted answers. ``FakeExecutor`` replaces the
device of such an engine, and ``byte_tokenizer`` the model's tokenizer. See docs/testing.md.
"""

from __future__ import annotations

from asyncllm.core.executor import ExecutorInfo as ExecutorInfo
from asyncllm.testing.byte_tokenizer import byte_tokenizer as byte_tokenizer
from asyncllm.testing.fake_engine import fake_engine as fake_engine
from asyncllm.testing.fake_engine import fake_llm as fake_llm
from asyncllm.testing.fake_executor import FakeExecutor as FakeExecutor

__all__ = ["ExecutorInfo", "FakeExecutor", "byte_tokenizer", "fake_engine", "fake_llm"]
