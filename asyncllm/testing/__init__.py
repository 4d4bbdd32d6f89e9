"""Test doubles for applications: an engine on a device that needs no model.

from asyncllm.testing import FakeExecutor
"""

from __future__ import annotations

from asyncllm.core.executor import ExecutorInfo as ExecutorInfo
from asyncllm.testing.fake_executor import FakeExecutor as FakeExecutor

__all__ = ["ExecutorInfo", "FakeExecutor"]
