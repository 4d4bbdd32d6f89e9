"""A Pydantic AI model over an asyncllm engine in the same process."""

from pydantic_ai_asyncllm.model import AsyncLLMModel, AsyncLLMModelSettings

__all__ = ["AsyncLLMModel", "AsyncLLMModelSettings"]
